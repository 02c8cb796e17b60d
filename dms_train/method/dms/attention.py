"""Attention of a layer under DMS: an eviction channel in the query, and a mask.

`method.layer` explains the shape letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.method import decisions
from dms_train.method.accounting import slots_held_and_read
from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import Decided, Heads, LayerKernels, LayerPass, MethodLayer, Projection
from dms_train.method.losses import compression_hinge
from dms_train.method.visibility import align_to_keys


class DMSLayer(MethodLayer):
    """DMS in a layer: each KV head reads a token's decision from its first query head."""

    scale_on_device = True

    def __init__(self, spec: MethodSpec, kernels: LayerKernels | None = None) -> None:
        self.spec = spec
        self._kernels = kernels

    def prepare(self, heads: Heads, step: LayerPass) -> tuple[Heads, Decided | None]:
        """Return rotated heads with a scaled eviction channel, and the decisions if any."""
        channel = decisions.eviction_channel(heads.query, self.spec.channel)
        query, key = self.rotate(heads.query, heads.key, step)
        return Heads(query, key, heads.value), self.decide(channel, step)

    def prepare_fused(
        self, projection: Projection, step: LayerPass
    ) -> tuple[Heads, Decided | None]:
        """Do the same as `prepare`; in training, a kernel also computes the decisions."""
        spec = self.spec
        heads, channel = projection.rotated(spec.channel, clear_after_rope=spec.clear_after_rope)
        if self._kernels is None or step.plan.eviction != "soft" or step.recorded:
            return heads, self.decide(channel, step)
        keep, stats = self._kernels.decide(channel, step.options, step.noise, step.documents)
        return heads, Decided(keep, self._with_own_loss(stats, channel, step))

    def rotate(self, query: Tensor, key: Tensor, step: LayerPass) -> tuple[Tensor, Tensor]:
        """Apply RoPE with the eviction channel multiplied by the plan's factor.

        When the eviction channel is also cleared after RoPE, full and cleared queries are
        interpolated. Every path through the eviction channel then carries the factor once, and none
        carries its square.
        """
        spec, factor = self.spec, step.plan.channel_scale
        if factor == 1.0:
            return step.rotate(query, key)
        if not spec.clear_after_rope:
            query = decisions.scale_eviction_channel(query, spec.channel, factor)
            return step.rotate(query, key)
        cleared = decisions.scale_eviction_channel(query, spec.channel, 0.0)
        cleared, key_turned = step.rotate(cleared, key)
        cleared = decisions.scale_eviction_channel(cleared, spec.channel, 0.0)
        if factor == 0.0:
            return cleared, key_turned
        whole, _ = step.rotate(query, key)
        return torch.lerp(cleared, whole, factor), key_turned

    def decide(self, eviction_channel: Tensor, step: LayerPass) -> Decided | None:
        """Decide from the eviction channel [s, b, g]; None when the plan evicts nothing."""
        spec, plan, documents = self.spec, step.plan, step.documents
        if plan.eviction == "none":
            return None
        s, _, g = eviction_channel.shape
        logits = decisions.eviction_logits(eviction_channel, spec)
        hard = decisions.hard_decisions(logits.detach())
        if plan.eviction == "all":
            hard = torch.ones_like(hard)
        if plan.eviction == "soft":
            noise = None if step.noise is None else step.noise.logistic(s, g)
            alpha, log_keep, straight_through = decisions.relax(logits, noise, spec.tau)
            counted = straight_through if step.options.alpha_in_loss == "hard_st" else alpha
        else:
            log_keep = torch.zeros_like(logits).masked_fill(hard, float("-inf"))
            counted = hard.to(logits.dtype)
        held, read = slots_held_and_read(hard.permute(1, 2, 0), spec, documents)
        if documents is not None:
            counted = counted * documents.is_token.t()[..., None]
        alpha_sum, live, reads = counted.sum((0, 2)), held.sum(1).float(), read.sum(1).float() / s
        stats = torch.stack([alpha_sum, live, reads], dim=-1)  # columns of `EvictionStats`
        by_key = align_to_keys(log_keep.permute(1, 2, 0), spec, keep=0.0, documents=documents)
        stats = self._with_own_loss(stats, eviction_channel, step)
        return Decided(by_key, stats, logits.detach(), held)

    def _with_own_loss(self, stats: Tensor, channel: Tensor, step: LayerPass) -> Tensor:
        """Append the hinge of the layer's own target to the statistics, if the plan has one.

        `channel` is any tensor [s, b, g] of the layer.
        """
        if not step.plan.layer_weights:
            return stats
        own = step.hinge(stats[:, 0], channel.shape[2], len(channel))
        return torch.cat([stats, own[:, None]], -1)

    def loss(
        self,
        stats: EvictionStats,
        decisions: int | Tensor,
        target: float | Tensor,
        options: MethodOptions,
    ) -> Tensor:
        """Compute the compression hinge of all layers together, and the sum of their own."""
        own: Tensor = stats.own_loss / decisions
        own = (own * decisions if options.aux_form == "sum" else own).mean()
        return compression_hinge(stats.alpha, decisions, target, options.aux_form) + own

    def hard(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the evictions by deciding token, bool [..., g]."""
        activation = decisions.eviction_channel(query, self.spec.channel)
        return decisions.hard_decisions(decisions.eviction_logits(activation, self.spec))

    def cleared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query with 0 in its eviction channel, and the key as it is."""
        return decisions.scale_eviction_channel(query, self.spec.channel, 0.0), key

    def channel_rows(self, query: int, size: int) -> list[int]:
        """Return the eviction channel of the first query head."""
        return [self.spec.channel % size]


LAYER = DMSLayer
