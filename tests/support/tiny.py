"""Tiny models and batches that every layout can build alike."""

from __future__ import annotations

import torch

from dms_train.data.batches import Batch
from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.mcore.model.weights import RandomWeights, WeightSource
from dms_train.method.documents import PackedDocuments
from tests.support import yarn
from tests.support.experts import experts_of
from tests.support.plain_delta import sizes_of

VOCAB = 61
HYBRIDS = ("qwen3_5_text", "qwen3_next")
LENGTH = 24


def architecture(family: str, **changes: object) -> Architecture:
    """Four layers, 8 query and 4 KV heads; Qwen2 untied, the others tied.

    SmolLM3 has RoPE in every second layer, Gemma 3 a window and another base in every second one,
    OLMo 3 YaRN in layers without a window, gpt-oss both in all, hybrids linear attention in every
    second one. Phi-3, GLM-4 and hybrids rotate half of each head.
    """
    values: dict[str, object] = {
        "family": family,
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16 if family in ("gemma3_text", "gpt_oss", "olmo3", "qwen3") else 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rotary_base": 10000.0,
        "layernorm_epsilon": 1e-6,
        "tie_word_embeddings": family != "qwen2",
        "experts": experts_of(family),
        "linear": sizes_of(family, key_heads=4),
        "rope_scaling": {"olmo3": yarn.RULE, "gpt_oss": yarn.UNROUNDED}.get(family),
    }
    if family in ("glm4", "phi3", *HYBRIDS):
        values |= {"kv_channels": 8, "partial_rotary_factor": 0.5}
    if family in HYBRIDS:  # outputs near 0 are divided by their size; that would amplify rounding
        values["layernorm_epsilon"] = 1e-2
    if family == "gpt_oss":
        values["ffn_hidden_size"] = 24
    values |= changes
    if family == "smollm3":
        rotated = [layer % 2 == 1 for layer in range(values["num_layers"])]
        values["layers"] = tuple(LayerAttention(rotary_base=1e4 if r else None) for r in rotated)
    if family == "gemma3_text":
        local = LayerAttention(rotary_base=1e2, window=7)
        values["layers"] = (local, LayerAttention(rotary_base=1e4)) * (values["num_layers"] // 2)
    if family in HYBRIDS:
        linear = LayerAttention(rotary_base=None, linear=True)
        values["layers"] = (linear, LayerAttention(rotary_base=1e4)) * (values["num_layers"] // 2)
    if family in ("gpt_oss", "olmo3"):
        local = LayerAttention(rotary_base=1e4, window=7)
        values["layers"] = (local, LayerAttention(rotary_base=1e4)) * (values["num_layers"] // 2)
    return Architecture(**values)


class SmallEvictionChannels(WeightSource):
    """Random weights whose borrowed rows are small, as trained ones are.

    scale / tau = 1000 amplifies rounding in the eviction channel, so an eviction channel of the
    size of other activations would measure float32 and not the layout.
    """

    def __init__(
        self,
        architecture: Architecture,
        seed: int,
        channel: int,
        factor: float = 0.005,
        std: float = 0.2,
    ) -> None:
        self._random = RandomWeights(architecture, seed, std)
        self._heads = architecture.num_attention_heads // architecture.num_query_groups
        self._architecture, self._channel, self._factor = architecture, channel, factor

    def get(self, name: str) -> torch.Tensor:
        """The tensor; eviction channel rows of the query projection scaled down."""
        tensor = self._random.get(name)
        if "q_proj" in name:
            d = self._architecture.kv_channels
            rows = tensor.unflatten(0, (self._architecture.num_query_groups, self._heads, d))
            rows[:, 0, self._channel] *= self._factor
        return tensor


class SmallKeyChannels(SmallEvictionChannels):
    """The same for a method whose decisions are in the keys."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor; borrowed rows of the key projection scaled down."""
        tensor = self._random.get(name)
        if "k_proj" in name:
            rows = tensor.unflatten(0, (-1, self._architecture.kv_channels))
            rows[:, self._channel] *= self._factor
        return tensor


def small_channels(kind: str) -> type[SmallEvictionChannels]:
    """The source of weights for a method."""
    return SmallKeyChannels if kind == "dmc" else SmallEvictionChannels


def batch(first: int, size: int = 2, length: int = LENGTH, vocab: int = VOCAB) -> Batch:
    """Microbatch of samples first .. first + size - 1 with uneven loss masks."""
    tokens = torch.stack(
        [
            torch.randint(0, vocab, (length + 1,), generator=torch.Generator().manual_seed(sample))
            for sample in range(first, first + size)
        ]
    )
    mask = torch.ones(size, length)
    for row in range(size):
        mask[row, : (first + row) % 5] = 0
    samples = torch.arange(first, first + size)
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask, samples=samples)


def microbatches(
    rank: int, ranks: int, groups: int = 4, size: int = 2, length: int = LENGTH
) -> list[Batch]:
    """This data rank's part of one global batch of `groups` microbatches."""
    return [batch(group * size, size, length) for group in range(rank, groups, ranks)]


def packed(batch: Batch, lengths: list[list[int]]) -> Batch:
    """The microbatch with documents of these lengths in its samples, and padding behind them."""
    length = batch.tokens.shape[1]
    mask = batch.loss_mask.clone()
    for row, own in enumerate(lengths):
        mask[row, sum(own) :] = 0
    documents = PackedDocuments.of([torch.tensor(own) for own in lengths], length)
    return batch._replace(loss_mask=mask, documents=documents)
