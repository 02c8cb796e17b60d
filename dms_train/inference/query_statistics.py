"""Statistics of a model's queries on a text, for policies that score keys with expected queries."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.blocks import layer_frequencies
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.triattention import QueryStatistics, pair_norms
from dms_train.method.layer import method_layer


class _Recorder(DenseCache):
    """Attend within each pass, store nothing, and sum the queries in float64.

    Args:
        model: The model.
    """

    def __init__(self, model: LoadedModel) -> None:
        a, device = model.architecture, model.decoder.norm.weight.device
        like = torch.zeros(0, a.kv_channels, dtype=model.dtype, device=device)
        super().__init__(
            KeepAllPolicy(), layers=a.num_layers, rows=1, heads=a.num_query_groups, like=like
        )
        shape = a.num_layers, a.num_attention_heads, a.kv_channels
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.norm = self.mean[..., : a.kv_channels // 2].clone()

    def step(self, layer: int, step: AttentionStep) -> Attended:  # type: ignore[override]
        """Add the queries of a pass, and compute causal attention."""
        plain = step.query
        if step.spec is not None:  # eviction channels are no part of the attention
            plain, _ = method_layer(step.spec).cleared(plain, step.key.squeeze(3))
        plain = plain.flatten(2, 3).double()
        self.mean[layer] += plain.sum((0, 1))
        self.norm[layer] += pair_norms(plain).sum((0, 1))
        query, arrival = step.rotated()
        output = F.scaled_dot_product_attention(
            query, arrival.key, arrival.value, is_causal=True, enable_gqa=True
        )
        return Attended(output, torch.zeros_like(arrival.key[:, :, 0, 0], dtype=torch.int64))


@torch.no_grad()
def measure_queries(model: LoadedModel, samples: Iterable[Tensor]) -> QueryStatistics:
    """Return the mean query and the mean norms of each head over the tokens of a text.

    Args:
        model: The model; it is run without eviction.
        samples: Token ids, int64 [n] each, on the device of the model.

    Raises:
        InferenceError: There are no tokens, some layers have linear attention, or the layers differ
            in RoPE.
    """
    if model.architecture.linear is not None:
        raise InferenceError(
            "the statistics do not describe models with linear attention; use another policy"
        )
    if len(set(model.architecture.ropes)) > 1:
        raise InferenceError(
            f"the layers of this {model.architecture.family} model differ in RoPE, which the "
            "statistics do not describe; use another policy"
        )
    recorder, tokens = _Recorder(model), 0
    for ids in samples:
        position = torch.arange(len(ids), device=ids.device)[None]
        batch = TokenBatch.rectangular(ids[None], position, torch.zeros_like(ids[:1]))
        model.decoder(batch, recorder)
        tokens += len(ids)
    if not tokens:
        raise InferenceError("no tokens to measure queries on; give a longer text")
    return QueryStatistics(
        mean=(recorder.mean / tokens).float().cpu(),
        norm=(recorder.norm / tokens).float().cpu(),
        frequency=layer_frequencies(model.architecture, torch.device("cpu"))[0],
    )
