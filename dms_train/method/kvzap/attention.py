"""Attention of a layer that learns to predict the importance of its tokens.

In training nothing is evicted. The eviction channel regresses on the attention that each token
receives. By the inference rule, DMS evicts what the threshold marks. The method follows
arXiv:2601.07891; docs/methods.md lists the differences. `method.layer` explains the shape letters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dms_train.method import decisions
from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.dms.attention import DMSLayer
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import Decided, Heads, LayerKernels, LayerPass, Projection

_BLOCK = 256  # queries whose attention is computed at a time
_LEAST = 1e-6  # smallest importance, so that its logarithm is finite


@torch.no_grad()
def importance(
    query: Tensor, key: Tensor, window: int, documents: PackedDocuments | None = None
) -> Tensor:
    """Return the largest attention weight of each token from queries that it may be hidden from.

    Args:
        query: [s, b, g, r, d] with RoPE.
        key: [s, b, g, d] with RoPE.
        window: Tokens before a query that it always sees.
        documents: Packed documents; None is one document for each sample.

    Returns:
        [b, g, s], at least float32; 0 for a token that no query of its document can lose.
    """
    s = len(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.permute(1, 2, 3, 0).unsqueeze(2).to(wide)  # [b, g, 1, d, s]
    at = torch.arange(s, device=key.device)
    largest = keys.new_zeros(*keys.shape[:2], s)
    for begin in range(0, s, _BLOCK):
        rows = query[begin : begin + _BLOCK].permute(1, 2, 3, 0, 4).to(wide)
        age = at[begin : begin + _BLOCK, None] - at
        hidden = age < 0
        if documents is not None:
            first = documents.first[:, begin : begin + _BLOCK, None]
            hidden = (hidden | (at < first))[:, None, None]
        scores = (rows @ keys * key.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1) * (age > window)
        largest = torch.maximum(largest, weights.amax((2, 3)))
    return largest


class KVzapLayer(DMSLayer):
    """Importance in a layer: the eviction channel of the first query head is the scorer."""

    def __init__(self, spec: MethodSpec, kernels: LayerKernels | None = None) -> None:
        super().__init__(spec, None)  # the kernels of DMS decide otherwise

    def prepare(self, heads: Heads, step: LayerPass) -> tuple[Heads, Decided | None]:
        """Return rotated heads with a scaled eviction channel, and the predictions if any."""
        channel = decisions.eviction_channel(heads.query, self.spec.channel)
        query, key = self.rotate(heads.query, heads.key, step)
        rotated = Heads(query, key, heads.value)
        return rotated, self._predict(channel, rotated, step)

    def prepare_fused(
        self, projection: Projection, step: LayerPass
    ) -> tuple[Heads, Decided | None]:
        """Do the same as `prepare`, with one kernel for the rotation."""
        rotated, channel = projection.rotated(self.spec.channel, clear_after_rope=False)
        return rotated, self._predict(channel, rotated, step)

    def _predict(self, channel: Tensor, heads: Heads, step: LayerPass) -> Decided | None:
        """Return the decisions of inference, or in training the loss and a bias of 0."""
        if step.plan.eviction != "soft":
            return self.decide(channel, step)
        ruled = self.decide(channel, step._replace(plan=replace(step.plan, eviction="hard")))
        assert ruled is not None
        predicted = self.spec.alpha_scale * channel.to(ruled.log_keep).permute(1, 2, 0)
        target = importance(heads.query, heads.key, self.spec.window, step.documents)
        error = predicted + target.clamp(min=_LEAST).log()
        loss = (error.square() * (target > 0)).sum((1, 2))
        stats = torch.cat([ruled.stats, loss[:, None].to(ruled.stats)], -1)
        return ruled._replace(log_keep=torch.zeros_like(ruled.log_keep), stats=stats)

    def loss(
        self,
        stats: EvictionStats,
        decisions: int | Tensor,
        target: float | Tensor,
        options: MethodOptions,
    ) -> Tensor:
        """Compute the squared error of the predicted logarithms, over layers, heads and tokens."""
        error: Tensor = stats.own_loss / decisions
        return (error * decisions if options.aux_form == "sum" else error).mean()


LAYER = KVzapLayer
