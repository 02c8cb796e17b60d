"""Attention of a layer under DMC: merged keys and values, a mask, and losses.

Attention reads the states of `merge`, one per token, with the mask of equation 10. The mask is 0
for the state of a query's own token, and log(1 - alpha_{j+1}) for the state of an earlier token j.
DMS with a window of 0 and a shift of 1 has the same mask. `method.layer` explains the shape
letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.method import decisions
from dms_train.method.accounting import slots_held_and_read
from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.dmc.merge import merge
from dms_train.method.dmc.spec import DMCOptions, DMCSpec
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import Decided, Heads, LayerKernels, LayerPass, MethodLayer
from dms_train.method.losses import compression_hinge
from dms_train.method.noise import LayerNoise
from dms_train.method.visibility import align_to_keys

SMALLEST_WEIGHT = 1e-6  # so that no average divides by 0


def _options(options: MethodOptions) -> DMCOptions:
    assert isinstance(options, DMCOptions)
    return options


def eviction_channels(query: Tensor, key: Tensor, channel: int) -> tuple[Tensor, Tensor]:
    """Return the eviction channels: the key's decides, the mean of the queries' weighs the token.

    Args:
        query: [..., g, r, d] before RoPE.
        key: [..., g, d] before RoPE.
        channel: Index of the eviction channel.

    Returns:
        Both [..., g].
    """
    return key[..., channel], query[..., channel].mean(-1)


def scaled(x: Tensor, channel: int, factor: float) -> Tensor:
    """Return a copy of x [..., d] with its eviction channel multiplied by `factor`."""
    mask = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype)
    mask[channel].fill_(factor)  # an assignment would copy the number from the host
    return x * mask


def weights(activation: Tensor, spec: DMCSpec) -> Tensor:
    """Compute the importance omega (section 3.1), in float32 (float64 stays)."""
    if spec.importance == "uniform":
        return torch.ones_like(activation, dtype=torch.promote_types(activation.dtype, torch.float))
    wide = activation if activation.dtype == torch.float64 else activation.float()
    return torch.sigmoid(wide + spec.importance_offset) + SMALLEST_WEIGHT


def _begins(like: Tensor, documents: PackedDocuments | None) -> Tensor:
    """Mark the tokens without a predecessor, bool [s, b or 1, 1], for a tensor [s, b, g]."""
    numbers = torch.arange(len(like), device=like.device)[:, None]
    if documents is None:
        return (numbers == 0)[..., None]
    return (numbers == documents.first.t())[..., None]


class DMCLayer(MethodLayer):
    """DMC in a layer: each KV head decides whether a token continues its predecessor's slot."""

    def __init__(self, spec: MethodSpec, kernels: LayerKernels | None = None) -> None:
        assert isinstance(spec, DMCSpec)
        self.spec: DMCSpec = spec
        self.merge = merge if kernels is None else kernels.merge
        self.decide = None if kernels is None else kernels.decide_merges

    def prepare(self, heads: Heads, step: LayerPass) -> tuple[Heads, Decided | None]:
        """Return merged heads with RoPE at each token's own position, and the decisions."""
        spec, factor = self.spec, step.plan.channel_scale
        query, key, value = heads
        deciding, weighing = eviction_channels(query, key, spec.channel)
        if factor != 1.0:
            query, key = (scaled(x, spec.channel, factor) for x in (query, key))
        if step.plan.eviction == "none":
            return Heads(*step.rotate(query, key), value), None
        if spec.heads == "shared":
            deciding, weighing = (self._shared(x, step) for x in (deciding, weighing))
        fused = _options(step.options).independent_heads and not step.recorded
        if self.decide is not None and step.plan.eviction == "soft" and fused:
            alpha, *rest = self.decide(deciding.float(), step.options, step.noise, step.documents)
            decided = Decided(*rest)
        else:
            alpha, decided = self._decide(deciding, step)
        key, value = self.merge(key, value, alpha, weights(weighing, spec), spec.merge_window)
        return Heads(*step.rotate(query, key), value), decided

    def _shared(self, activation: Tensor, step: LayerPass) -> Tensor:
        """Replace every head by the first head of the model."""
        # every rank multiplies, so that every rank takes part in the sum of the gradients
        first = step.sum_ranks(activation[..., :1] * float(step.first_rank))
        return first.expand_as(activation)

    def _decide(self, activation: Tensor, step: LayerPass) -> tuple[Tensor, Decided]:
        """Return alpha [s, b, g], 0 where a token has no predecessor, and the decisions."""
        spec, plan, documents = self.spec, step.plan, step.documents
        s, _, g = activation.shape
        begins = _begins(activation, documents)
        logits = decisions.eviction_logits(activation, spec)
        hard = decisions.hard_decisions(logits.detach()) & ~begins
        if plan.eviction == "all":
            hard = (~begins).expand_as(hard)
        if plan.eviction == "soft":
            noise = None if step.noise is None else self._noise(step.noise, s, g)
            alpha, log_keep, straight_through = decisions.relax(logits, noise, spec.tau)
            alpha = alpha.masked_fill(begins, 0.0)
            counted = straight_through if step.options.alpha_in_loss == "hard_st" else alpha
            counted = counted.masked_fill(begins, 0.0)
        else:
            log_keep = torch.zeros_like(logits).masked_fill(hard, float("-inf"))
            alpha = counted = hard.to(logits.dtype)
        held, read = slots_held_and_read(hard.permute(1, 2, 0), spec, documents)
        if documents is not None:
            counted = counted * documents.is_token.t()[..., None]
        alpha_sum = counted.sum((0, 2))
        stats = EvictionStats(
            alpha=alpha_sum,
            live=held.sum(1).float(),
            reads=read.sum(1).float() / s,
            own_loss=self._own_loss(alpha, alpha_sum, step),
        )
        by_key = align_to_keys(log_keep.permute(1, 2, 0), spec, keep=0.0, documents=documents)
        return alpha, Decided(by_key, torch.stack(stats, dim=-1), logits.detach(), held)

    def _noise(self, noise: LayerNoise, s: int, g: int) -> Tensor:
        """Draw noise [s, b, g], or [s, b, 1] for the model's first head if it decides for all."""
        if self.spec.heads == "shared":
            return noise._replace(first_head=0).logistic(s, 1)
        return noise.logistic(s, g)

    def _own_loss(self, alpha: Tensor, alpha_sum: Tensor, step: LayerPass) -> Tensor:
        """Compute this rank's part of the layer's own loss, [b], times the number of decisions.

        Args:
            alpha: [s, b, g].
            alpha_sum: Sum of the decisions that the compression loss counts, [b].
            step: The pass.
        """
        options, documents = _options(step.options), step.documents
        if options.prior == "layer":
            return step.hinge(alpha_sum, alpha.shape[-1], len(alpha))
        if options.consistency:
            mean = step.sum_ranks(alpha.sum(-1, keepdim=True)) / step.heads
            apart = (alpha - mean).abs().sum(-1)
            apart = apart if documents is None else apart * documents.is_token.t()
            return options.consistency * apart.sum(0)
        return torch.zeros_like(alpha_sum)

    def loss(
        self,
        stats: EvictionStats,
        decisions: int | Tensor,
        target: float | Tensor,
        options: MethodOptions,
    ) -> Tensor:
        """Compute the compression hinge, and the variant's own loss in the same form."""
        form = options.aux_form
        own: Tensor = stats.own_loss / decisions
        own = (own * decisions if form == "sum" else own).mean()
        if _options(options).prior == "layer":
            return own
        return compression_hinge(stats.alpha, decisions, target, form) + own

    def hard(self, query: Tensor, key: Tensor) -> Tensor:
        """Decide whether a token continues its predecessor's slot, bool [..., g]."""
        activation, _ = self.activations(query, key)
        return decisions.hard_decisions(decisions.eviction_logits(activation, self.spec))

    def activations(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return `eviction_channels` of the deciding heads, given all heads of a layer."""
        deciding, weighing = eviction_channels(query, key, self.spec.channel)
        if self.spec.heads == "shared":
            deciding, weighing = (x[..., :1].expand_as(x) for x in (deciding, weighing))
        return deciding, weighing

    def cleared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with 0 in the eviction channel of every head."""
        channel = self.spec.channel
        return scaled(query, channel, 0.0), scaled(key, channel, 0.0)

    def channel_rows(self, query: int, size: int) -> list[int]:
        """Return the eviction channel of every query head and of the key."""
        return [first + self.spec.channel % size for first in range(0, query + size, size)]


LAYER = DMCLayer
