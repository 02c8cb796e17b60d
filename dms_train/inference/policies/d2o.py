"""D2O: budgets by layer, and evicted tokens merged into similar ones (Wan et al., 2024).

arXiv:2406.13035. At the end of a prompt, the layers share the budget. A layer gets more if its
attention is spread evenly, and less if few tokens receive most of it. In each layer the first
tokens, the newest tokens and the most attended tokens stay, as with H2O. An evicted token is merged
into the kept one with the most similar key, unless it is less similar than a moving threshold. The
symbols of the equations are lost in the available text; the weights are a reconstruction (A-D2O1).
`reference_compat` follows the authors' code at 12c99d8 instead (A-D2O2 to A-D2O8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import (
    AttentionReceived,
    CachePolicy,
    Merge,
    PolicyKind,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import GROWING, INPUT, TOTAL, BudgetOptions
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.limits import AtLeast, OneOf, Positive, Share

SOFTMAX, RECIPROCAL, UNIFORM = "softmax", "reciprocal", "uniform"
RAW, BY_LENGTH, HEAD_RANGE = "raw", "by_len", "head_minmax"
_VARIANCE, _SHARE, _THRESHOLD = "variance of attention", "share of the layer", "merge threshold"
_ROWS = 1024  # number of keys whose cosines are computed at a time
_CODE_RANGE, _CODE_SHARES = 1e-6, (0.01, 1.0)  # constants of the authors' code


@dataclass(frozen=True, slots=True, kw_only=True)
class D2OOptions(BudgetOptions):
    """Options of `d2o`.

    Attributes:
        budget_mode: As in `BudgetOptions`; the paper divides the length of the prompt.
        sinks: Number of first tokens that stay; they count as most attended ones.
        recent: Share of a layer's budget for the newest tokens; None takes 0.25, with
            `reference_compat` 0.5.
        beta: Weight of the newest similarities in the threshold; None takes 0.7, with
            `reference_compat` 0.5.
        allocation: How layers share the budget by the variance F of the attention that tokens
            receive: `softmax` of -decay * F, `reciprocal` of F, or `uniform`.
        decay: Factor in `softmax` of `allocation`.
        variance_norm: Scale of the variance: `raw`; `by_len` divides the sums by the length of the
            prompt; `head_minmax` scales the variances of a layer's KV heads to the range 0 to 1.
            None takes `by_len`, with `reference_compat` `head_minmax`.
        reference_compat: Follow the authors' code. Layers 0, 1 and the last one are not compressed;
            the other layers keep from 1 % to 100 %. The first eviction follows the first generated
            token. All heads merge the same rows. Similarities are the weights of a mean.
    """

    budget_mode: Annotated[str, OneOf(TOTAL, INPUT, GROWING)] = INPUT
    sinks: Annotated[int, AtLeast(0)] = 4
    recent: Annotated[float | None, Share()] = None
    beta: Annotated[float | None, Share()] = None
    allocation: Annotated[str, OneOf(SOFTMAX, RECIPROCAL, UNIFORM)] = SOFTMAX
    decay: Annotated[float, Positive()] = 1.0
    variance_norm: Annotated[str | None, OneOf(None, RAW, BY_LENGTH, HEAD_RANGE)] = None
    reference_compat: bool = False


class _Pairs(NamedTuple):
    """Evicted tokens of each KV list, at most E, in the order of their positions.

    Attributes:
        slots: int64 [b, h, E], their slots.
        real: bool [b, h, E], False after the last one.
        similarity: [b, h, E], the largest cosine to a kept key.
        nearest: int64 [b, h, E], the slot of that key.
    """

    slots: Tensor
    real: Tensor
    similarity: Tensor
    nearest: Tensor


class D2OPolicy(CachePolicy):
    """D2O; a slot keeps the attention received, a KV list the layer's share and the threshold."""

    state_width = 1
    scored = True
    needs_content = True
    shareable = False
    evicts_prompt_only = False

    def __init__(self, options: D2OOptions) -> None:
        self._options, compat = options, options.reference_compat
        self._recent = _chosen(options.recent, 0.5 if compat else 0.25)
        self._beta = _chosen(options.beta, 0.5 if compat else 0.7)
        self._norm = options.variance_norm or (HEAD_RANGE if compat else BY_LENGTH)

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Add the attention of the pass; at the end of a prompt, keep its variance."""
        sequences = slots.sequences
        assert sequences is not None
        state = slots.state + received.total.mean(2)[..., None].to(slots.state)
        if bool(sequences.ends_prompt.any()):
            variance = attention_variance(state[..., 0], slots.position, self._norm)
            lists = variance[:, None, None].expand(-1, slots.position.shape[1], 1)
            sequences.lists[_VARIANCE] = lists.contiguous()
        return state

    def balance(self, lists: list[dict[str, Tensor]], sequences: Sequences) -> None:
        """Share the budget among the layers."""
        variance = torch.stack([known[_VARIANCE].double() for known in lists])
        o = self._options
        share = layer_shares(variance, allocation=o.allocation, decay=o.decay)
        for known, own in zip(lists, share, strict=True):
            known[_SHARE] = own

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the least attended tokens, except first and recent ones; none inside a prompt."""
        sequences = slots.sequences
        assert sequences is not None
        waits = sequences.start < sequences.prompt
        if self._options.reference_compat:
            waits = waits | (sequences.start == sequences.end)
            waits = waits | (slots.layer in (0, 1, sequences.layers - 1))
        if bool(waits.all()):
            return torch.zeros_like(slots.position, dtype=torch.bool)[:, :, None]
        budget, recent = self._sizes(sequences)
        stays = newest(slots.position, sequences.end, recent)
        stays = stays | (slots.position < self._options.sinks)
        score = slots.state[..., 0].masked_fill(stays, torch.inf)
        evicted = beyond_budget(score, slots.position, budget)
        return (evicted & ~waits[:, None, None])[:, :, None]

    def _sizes(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return the number of tokens that a layer keeps, and of recent ones, int64 [b] each."""
        share = sequences.lists[_SHARE][:, 0, 0]
        if not self._options.reference_compat:
            budget = self._options.whole_tokens(self._options.exact(sequences) * share)
            return budget, (budget * self._recent).long()
        ratio = self._options.exact(sequences) / sequences.prompt.clamp(min=1) * share
        tokens = (sequences.prompt + 1) * ratio.clamp(*_CODE_SHARES)
        recent = (tokens * self._recent).long()
        return (tokens * (1 - self._recent)).long() + recent, recent

    def merge(self, slots: Slots, evicted: Tensor) -> Merge | None:
        """Add evicted tokens to the kept ones with the most similar keys."""
        if not bool(evicted.any()):
            return None
        pairs = _pairs(slots, evicted)
        b, h, e = self._accepted(slots, pairs).nonzero(as_tuple=True)
        heads, count = slots.position.shape[1:]
        first = (b * heads + h) * count
        source, target = (first + x[b, h, e] for x in (pairs.slots, pairs.nearest))
        own, weight = (1.0, pairs.similarity[b, h, e])
        added = torch.ones_like(weight)
        if not self._options.reference_compat:
            own, added = math.e, weight.exp()
            weight = added
        total = torch.full_like(slots.position, own, dtype=weight.dtype).flatten()
        total = total.index_add(0, target, added)
        scale = (own / total).view_as(slots.position)
        weight = weight / total[target]
        return Merge(source, target, weight, weight, scale, scale)

    def _accepted(self, slots: Slots, pairs: _Pairs) -> Tensor:
        """Return which evicted tokens are similar enough, bool [b, h, E]; update the threshold.

        Each KV list has a threshold; with `reference_compat`, each layer has one.
        """
        assert slots.sequences is not None
        lists = slots.sequences.lists
        similarity, real = pairs.similarity, pairs.real
        mean = _mean(similarity, real, -1)
        if self._options.reference_compat:
            mean = _mean(similarity.flatten(1), real.flatten(1), -1)[:, None].expand_as(mean)
            similarity = _mean(similarity, real, 1)[:, None].expand_as(similarity)
        known = lists.get(_THRESHOLD)
        if known is None:
            known = mean.new_zeros(*mean.shape, 2)
        before, set_before = known.to(mean).unbind(-1)
        moved = self._beta * mean + (1 - self._beta) * before
        threshold = torch.where(set_before > 0, moved, mean)
        fresh = torch.stack([threshold, torch.ones_like(threshold)], -1)
        lists[_THRESHOLD] = torch.where(real.any(-1)[..., None], fresh, known.to(fresh))
        return real & (similarity >= threshold[..., None])


def attention_variance(received: Tensor, position: Tensor, norm: str) -> Tensor:
    """Return the variance F of the attention that tokens of one layer have received, [b].

    The attention of a token is averaged over the KV heads; a head that has evicted it gives 0. The
    variance is over the tokens that any head holds. With `head_minmax`, each head has its own
    variance over the tokens that it holds, and F is their mean.

    Args:
        received: [b, h, s], summed over the queries, mean over the query heads of a KV head.
        position: int64 [b, h, s]; -1 for an empty slot.
        norm: As `variance_norm` of the options.
    """
    b, h, _ = position.shape
    held = position >= 0
    size = int(position.amax()) + 1
    index = position.masked_fill(~held, size)
    by_position = received.double().new_zeros(b, h, size + 1)
    by_position = by_position.scatter(2, index, received.double())[..., :-1]
    there = torch.zeros(b, h, size + 1, dtype=torch.bool, device=position.device)
    there = there.scatter(2, index, held)[..., :-1]
    if norm != HEAD_RANGE:
        by_position, there = by_position.mean(1, keepdim=True), there.any(1, keepdim=True)
    count = there.sum(-1).clamp(min=1)
    deviation = (by_position - _mean(by_position, there, -1)[..., None]) * there
    variance = deviation.square().sum(-1) / (count - 1).clamp(min=1)
    if norm == BY_LENGTH:
        variance = variance / count**2
    elif norm == HEAD_RANGE:
        least = variance.amin(1, keepdim=True)
        span = variance.amax(1, keepdim=True) - least + _CODE_RANGE
        variance = (variance - least) / span
    return variance.mean(1)


def layer_shares(variance: Tensor, *, allocation: str, decay: float) -> Tensor:
    """Return each layer's budget over the mean budget, [layers, ...], from F of the layers."""
    layers = len(variance)
    if allocation == UNIFORM:
        return torch.ones_like(variance)
    if allocation == RECIPROCAL:
        inverse = 1 / variance.clamp(min=torch.finfo(variance.dtype).tiny)
        return layers * inverse / inverse.sum(0)
    return layers * (-decay * variance).softmax(0)


def _pairs(slots: Slots, evicted: Tensor) -> _Pairs:
    """Pair the evicted tokens with the kept ones that have the most similar keys.

    Computes E * s cosines for each KV list.
    """
    assert slots.key is not None
    count = evicted.sum(-1, keepdim=True)
    far = torch.iinfo(torch.int64).max
    slot = slots.position.masked_fill(~evicted, far).argsort(-1)[..., : int(count.max())]
    real = torch.arange(slot.shape[-1], device=slot.device) < count
    key = slots.key.to(torch.promote_types(slots.key.dtype, torch.float32))
    unit = F.normalize(key, dim=-1)
    own = unit.gather(2, slot[..., None].expand(*slot.shape, unit.shape[-1]))
    gone = ((slots.position < 0) | evicted)[:, :, None]
    similarity, nearest = [], []
    for start in range(0, own.shape[2], _ROWS):
        cosine = own[:, :, start : start + _ROWS] @ unit.transpose(-1, -2)  # [b, h, rows, s]
        best = cosine.masked_fill(gone, -torch.inf).max(-1)
        similarity.append(best.values)
        nearest.append(best.indices)
    largest = torch.cat(similarity, 2).masked_fill(~real, 0)
    return _Pairs(slot, real, largest, torch.cat(nearest, 2))


def _mean(x: Tensor, real: Tensor, dim: int) -> Tensor:
    """Return the mean of the real entries along a dimension; 0 without any."""
    return (x * real).sum(dim) / real.sum(dim).clamp(min=1)


def _chosen(value: float | None, default: float) -> float:
    return default if value is None else value


POLICY = PolicyKind(D2OOptions, lambda options, spec: D2OPolicy(options))
