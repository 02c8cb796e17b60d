"""Hard-KV: dense, sparse and condensed tokens, chosen by calibrated top-p (2026).

"Hard-KV: Head-Adaptive Regularization for Decoding-time KV Compression". Every query reads the
first tokens, the newest ones, and all tokens since the last selection (tier 1). A selection follows
the end of a prompt and every `interval` generated tokens. In a selection, each of the newest
queries votes for the older tokens that it needs. Tokens without a vote are hidden from queries
(tier 2). They keep their slots and may get votes again later. If more tokens are held than the
upper budget allows, hidden tokens are evicted and the tokens with the most votes stay (tier 3). The
authors' code at 448ad49 differs; the rules here follow the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.attention_scores import window_logits
from dms_train.inference.policies.base import (
    AttentionReceived,
    CachePolicy,
    Merge,
    PolicyKind,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.calibration import BINARY, GRADIENT, temperature, top_p
from dms_train.inference.policies.eviction import beyond_budget, beyond_shared_budget, newest
from dms_train.inference.policies.r_kv import combined, redundancy
from dms_train.limits import AtLeast, Below, OneOf, Positive, Share

VANILLA, SNAPKV, R_KV = "vanilla", "snapkv", "r_kv"
PER_HEAD, HEAD_SETS, PER_LAYER, LAYER_SETS = "ha", "hs", "la", "ls"
NOTHING, FIXED_BUDGET, MULTI_TO_ONE = "none", "fixed_budget", "multi_to_one"
_TEMPERATURE = "temperature"
_HIDDEN, _VOTES, _ATTENTION = range(3)  # numbers of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class HardKVOptions(BudgetOptions):
    """Options of `hard_kv`; the budget is B1, from which tokens are selected.

    Attributes:
        upper: B2 over B1: the largest number of held tokens, as a multiple of the budget (A-HARD1).
        base: Scores that are calibrated: `vanilla`, the attention; `snapkv`, its maximum over
            neighbours; `r_kv`, minus redundancy.
        p: Share of the attention that a query's votes must cover.
        window: Number of last queries, which vote; their tokens are always read.
        sinks: Number of first tokens, which are always read.
        interval: Generated tokens between two selections.
        layout: Freedom of the KV heads of a layer (appendix B.2). With `ha`, heads choose tokens
            and their number. With `hs`, they choose tokens and share their budgets. With `la` and
            `ls`, they hold the same tokens; the number differs by layer with `la`, and is the
            budget with `ls`.
        solver: `gradient` or `binary`; the temperature is solved at a request's first selection.
        kernel: Number of neighbouring tokens in `snapkv`, odd.
        importance: Weight of the attention in `r_kv`.
        threshold: Smallest cosine at which two keys repeat each other in `r_kv`.
        merge: Treatment of evicted tokens. `none` drops them. `fixed_budget` merges each of the
            weakest into one of the strongest kept tokens, `multi_to_one` all of them into the
            strongest.
    """

    upper: Annotated[float, AtLeast(1)] = 2.0
    base: Annotated[str, OneOf(VANILLA, SNAPKV, R_KV)] = VANILLA
    p: Annotated[float, Positive(), Share()] = 0.9
    window: Annotated[int, AtLeast(1), Below(2**16)] = 32
    sinks: Annotated[int, AtLeast(0)] = 1
    interval: Annotated[int, AtLeast(1), Below(2**31)] = 128
    layout: Annotated[str, OneOf(PER_HEAD, HEAD_SETS, PER_LAYER, LAYER_SETS)] = PER_HEAD
    solver: Annotated[str, OneOf(GRADIENT, BINARY)] = GRADIENT
    kernel: Annotated[int, AtLeast(1)] = 7
    importance: Annotated[float, Share()] = 0.07
    threshold: Annotated[float, Share()] = 0.5
    merge: Annotated[str, OneOf(NOTHING, FIXED_BUDGET, MULTI_TO_ONE)] = NOTHING

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, and one for an even kernel."""
        yield from BudgetOptions.check(self, path)
        if self.kernel % 2 == 0:
            yield f"kernel={self.kernel}: use an odd number"


class HardKVPolicy(CachePolicy):
    """Hard-KV; a slot keeps a hidden flag, votes, and mean attention at the last selection."""

    state_width = 3
    scored = True
    needs_content = True
    shareable = False
    evicts_prompt_only = False

    def __init__(self, options: HardKVOptions) -> None:
        self._options = options
        self.recent_queries = options.window

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Count the votes where a selection is due and the budget is reached."""
        sequences = slots.sequences
        assert sequences is not None
        selects = _due(sequences, self._options.interval)[:, None]
        selects = selects & (self._held(slots) >= self._options.tokens(sequences)[:, None])
        if not bool(selects.any()):
            return slots.state
        forced = self._forced(slots, sequences)
        free = (slots.position >= 0) & ~forced
        votes, attention = self._votes(slots, sequences, free, selects)
        hidden = free & (votes == 0)
        if self._options.layout in (HEAD_SETS, LAYER_SETS):
            hidden = self._beyond(votes.masked_fill(forced, torch.inf), slots, sequences)
        fresh = torch.stack([hidden.to(votes), votes, attention], -1).to(slots.state)
        return torch.where(selects[..., None, None], fresh, slots.state)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return tokens without votes, or with the fewest, where the upper budget is exceeded."""
        sequences = slots.sequences
        assert sequences is not None
        budget = self._options.tokens(sequences)
        most = (self._options.exact(sequences) * self._options.upper).long()
        count = self._held(slots)
        full = _due(sequences, self._options.interval)[:, None] & (count >= budget[:, None])
        full = full & (count + self._options.interval > most[:, None])
        if self._options.layout in (HEAD_SETS, LAYER_SETS):
            evicted = slots.state[..., _HIDDEN] > 0
        else:
            forced = self._forced(slots, sequences)
            score = slots.state[..., _VOTES].masked_fill(forced, torch.inf)
            evicted = self._beyond(score, slots, sequences)
            evicted = evicted | ((slots.position >= 0) & (score == 0))
        return (evicted & full[..., None])[:, :, None]

    def select(self, slots: Slots, query: Tensor) -> Tensor | None:
        """Return the tokens that are not hidden; all tokens inside a prompt."""
        sequences = slots.sequences
        assert sequences is not None
        prompt = (sequences.start < sequences.prompt)[:, None, None]
        read = (slots.state[..., _HIDDEN] == 0) | prompt
        return read[:, :, None].expand(-1, -1, query.shape[2], -1)

    def _held(self, slots: Slots) -> Tensor:
        """Return the number of tokens of every KV list, [b, h]; the mean if heads share budgets."""
        count = (slots.position >= 0).sum(-1)
        if self._options.layout == HEAD_SETS:
            count = count.double().mean(1, keepdim=True).expand_as(count)
        return count

    def _beyond(self, score: Tensor, slots: Slots, sequences: Sequences) -> Tensor:
        """Return the tokens beyond the budget of a KV list, or of all heads, bool [b, h, s]."""
        leaves = beyond_shared_budget if self._options.layout == HEAD_SETS else beyond_budget
        return leaves(score, slots.position, self._options.tokens(sequences))

    def _forced(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return the first and the newest tokens, within the budget, bool [b, h, s]."""
        budget = self._options.tokens(sequences)
        sinks = (budget - 1).clamp(max=self._options.sinks)
        window = (budget - sinks).clamp(max=self._options.window)
        first = (slots.position >= 0) & (slots.position < sinks[:, None, None])
        return first | newest(slots.position, sequences.end, window)

    def _votes(
        self, slots: Slots, sequences: Sequences, free: Tensor, selects: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the number of votes of each token, and its mean attention, [b, h, s] each.

        Only the tokens in `free`, bool [b, h, s], are candidates. Unknown temperatures are solved
        for the lists in `selects`, bool [b, h].
        """
        window = window_logits(slots, sequences)
        order = slots.position.masked_fill(~free, torch.iinfo(torch.int64).max).argsort(-1)
        across = order[:, :, None].expand(*window.logits.shape[:2], window.logits.shape[3], -1)
        lowest = torch.finfo(window.logits.dtype).min
        outside = ~(free[:, :, None] & window.seen[:, :, 0]).gather(-1, across)
        logits = window.logits.amax(2).gather(-1, across).masked_fill(outside, lowest)
        shifted = self._shifted(slots, logits, order, outside).masked_fill(outside, lowest)
        real = window.real[:, 0] & ~outside.all(-1, keepdim=True)  # rows with a candidate
        tau = self._temperature(sequences, logits, shifted, real, selects)
        named, _, _ = top_p(shifted / tau, self._options.p)
        votes = (named & ~outside & real).sum(2).to(logits.dtype)
        if self._options.layout in (PER_LAYER, LAYER_SETS):
            votes = votes.sum(1, keepdim=True).expand_as(votes)  # the heads hold the same tokens
        attention = (logits.softmax(-1) * ~outside * real).sum(2) / real.sum(2).clamp(min=1)
        back = torch.empty_like(votes)
        return back.scatter(-1, order, votes), back.scatter(-1, order, attention)

    def _shifted(self, slots: Slots, logits: Tensor, order: Tensor, outside: Tensor) -> Tensor:
        """Return the logits [b, h, m, s] of the scores, for tokens in order."""
        o = self._options
        if o.base == VANILLA:
            return logits
        if o.base == SNAPKV:
            flat = F.max_pool1d(logits.flatten(0, 1), o.kernel, stride=1, padding=o.kernel // 2)
            return flat.view_as(logits)
        repeated = redundancy(slots, threshold=o.threshold, fix_empty_rows=False)
        score = combined(logits.softmax(-1), repeated.gather(-1, order)[:, :, None], o.importance)
        score = score - score.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
        score = score.masked_fill(outside, 0)
        tiny = torch.finfo(score.dtype).tiny
        return (score / score.sum(-1, keepdim=True).clamp(min=tiny)).clamp(min=tiny).log()

    def _temperature(
        self, sequences: Sequences, logits: Tensor, shifted: Tensor, real: Tensor, selects: Tensor
    ) -> Tensor:
        """Return the temperature of each KV list, [b, h, 1, 1], fixed at its first selection."""
        known = sequences.lists.get(_TEMPERATURE)
        if known is None:
            known = logits.new_zeros(*logits.shape[:2], 1)
        fresh = temperature(logits, shifted, real, p=self._options.p, solver=self._options.solver)
        known = torch.where((known == 0) & selects[..., None], fresh[..., 0], known.to(fresh))
        sequences.lists[_TEMPERATURE] = known
        return known.masked_fill(known == 0, 1)[..., None]


def _due(sequences: Sequences, interval: int) -> Tensor:
    """Return whether a pass ends a prompt or `interval` more generated tokens, bool [b]."""
    generated = sequences.end - sequences.prompt
    return sequences.ends_prompt | ((generated > 0) & (generated % interval == 0))


class MergingHardKVPolicy(HardKVPolicy):
    """Merge evicted tokens; the weights preserve the LSE of their attention (appendix G).

    The weights are shares of the mean attention, as in the authors' code.
    """

    def merge(self, slots: Slots, evicted: Tensor) -> Merge | None:
        """Add each evicted token to a kept one."""
        if not bool(evicted.any()):
            return None
        attention = slots.state[..., _ATTENTION]
        kept = (slots.position >= 0) & ~evicted & (attention > 0)  # no token that always stays
        strong = _ranked(attention, slots.position, kept, strongest=True)
        weak = _ranked(attention, slots.position, evicted, strongest=False)
        pairs = torch.arange(evicted.shape[-1], device=evicted.device) < evicted.sum(-1)[..., None]
        targets = strong
        if self._options.merge == MULTI_TO_ONE:
            targets = strong[..., :1].expand_as(strong)
        pairs = pairs & kept.gather(-1, targets)
        b, h, rank = pairs.nonzero(as_tuple=True)
        first = (b * slots.position.shape[1] + h) * slots.position.shape[2]
        source, target = first + weak[b, h, rank], first + targets[b, h, rank]
        own = attention.flatten()
        total = own.index_add(0, target, own[source]).clamp(min=torch.finfo(own.dtype).tiny)
        scale = torch.ones_like(own)
        scale[target] = own[target] / total[target]
        weight = own[source] / total[target]
        scale = scale.view_as(attention)
        return Merge(source, target, weight, weight, scale, scale)


def _ranked(attention: Tensor, position: Tensor, among: Tensor, *, strongest: bool) -> Tensor:
    """Order slots by attention, slots in `among` first; of equal attention, the first token."""
    order = position.argsort(-1)
    score = attention if strongest else -attention
    score = score.masked_fill(~among, -torch.inf).gather(-1, order)
    return order.gather(-1, score.argsort(dim=-1, descending=True, stable=True))


def _build(options: HardKVOptions) -> HardKVPolicy:
    return HardKVPolicy(options) if options.merge == NOTHING else MergingHardKVPolicy(options)


POLICY = PolicyKind(HardKVOptions, lambda options, spec: _build(options))
