"""Cost of zeroing each channel of a tiny model, computed with transformers."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore.model.weights import RandomWeights, WeightSource
from tests.support import tiny


class Weights(WeightSource):
    """A source of weights by their Hugging Face names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name]


def architecture(family: str) -> Architecture:
    """Four layers, whose heads have 8 channels or more."""
    a = tiny.architecture(family)
    return replace(a, kv_channels=max(8, a.kv_channels))


def random_weights(a: Architecture) -> Weights:
    """Random tensors, also norms and biases."""
    source, generator = RandomWeights(a, 1, 0.3), torch.Generator().manual_seed(2)
    tensors = {name: source.get(name).clone() for name in expected_shapes(a)}
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return Weights(tensors)


def model_of(a: Architecture, source: WeightSource) -> transformers.PreTrainedModel:
    """The model of transformers, in float64."""
    config = transformers.AutoConfig.for_model(**to_hf_config(a))
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    tensors = {name: source.get(name).double() for name in expected_shapes(a)}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def zeroed(
    model: transformers.PreTrainedModel, a: Architecture, kind: str, channel: int
) -> transformers.PreTrainedModel:
    """A copy without a channel: of the first query heads (`dms`), or of all heads and keys."""
    other = copy.deepcopy(model)
    group, d = a.num_attention_heads // a.num_query_groups, a.kv_channels
    for layer in other.model.layers:
        attention = layer.self_attn
        for name, heads in (("q_proj", group), ("k_proj", 1)):
            if name == "k_proj" and kind == "dms":
                continue
            projection = getattr(attention, name)
            for parameter in (projection.weight, projection.bias):
                if parameter is None:
                    continue
                rows = parameter.data.view(a.num_query_groups, heads, d, -1)
                rows[:, slice(0, 1) if kind == "dms" else slice(None), channel] = 0
    return other


@torch.no_grad()
def next_token_loss(a: Architecture, source: WeightSource, batches: list[Batch]) -> float:
    """Mean cross-entropy of the loss positions, nats per token."""
    tokens, labels, mask = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("tokens", "labels", "loss_mask")
    )
    logits = model_of(a, source)(tokens).logits
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return float((losses * mask).sum() / mask.sum())


@torch.no_grad()
def divergences(a: Architecture, kind: str, source: Weights, batches: list[Batch]) -> list[float]:
    """KL(original || model without the channel) of every channel, nats per token."""
    original, tokens = model_of(a, source), torch.cat([batch.tokens for batch in batches])
    before = original(tokens).logits.log_softmax(-1)

    def divergence(channel: int) -> float:
        after = zeroed(original, a, kind, channel)(tokens).logits.log_softmax(-1)
        return float((before.exp() * (before - after)).sum(-1).mean())

    return [divergence(channel) for channel in range(a.kv_channels)]
