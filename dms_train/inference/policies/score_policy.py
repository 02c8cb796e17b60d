"""Policies that keep the tokens with the highest scores: the public base class.

A subclass computes scores, like a press of kvpress. Options say when tokens are evicted: at the
end of a prompt, after every block of a prompt, or after a number of generated tokens.

Shape letters: b sequences, h KV heads, r query heads per KV head, s tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.devices import sent
from dms_train.inference.policies.attention_scores import window_attention
from dms_train.inference.policies.base import CachePolicy, RequestSizes, Sequences, Slots
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.inference.policies.kernel_rules import NEVER, BudgetRule, KernelRule
from dms_train.limits import AtLeast, Below

_TIMES = (  # hooks of which a subclass with its own may act after any pass, or at any token
    *("evicts_after", "evict_mask", "observe", "select"),
    *("merge", "accumulate", "position_shift"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions(BudgetOptions):
    """Budget and times of evictions; by default, tokens are evicted at the end of a prompt.

    Attributes:
        interval: Number of generated tokens between two evictions; None keeps all of them.
        block: Evict after every `block` tokens of a prompt as well; its later tokens then read the
            kept tokens only. None computes the prompt with full attention.
        decode_only: Evict nothing from prompts; needs an interval.
    """

    interval: Annotated[int | None, AtLeast(1), Below(2**31)] = None
    block: Annotated[int | None, AtLeast(1), Below(2**31)] = None
    decode_only: bool = False

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, and one for options that exclude each other."""
        yield from BudgetOptions.check(self, path)
        if self.decode_only and self.interval is None:
            yield "decode_only: evicts nothing without interval, a number of generated tokens"
        if self.decode_only and self.block is not None:
            yield f"decode_only: leaves prompts as they are; drop block={self.block}"


class ScorePolicy(CachePolicy):
    """Keep the tokens with the highest scores.

    The decode kernels run every policy of this kind. Scores are torch operations, unless a
    subclass declares a rule that says otherwise.

    Args:
        options: The budget and the times of evictions.

    Attributes:
        protected: Newest tokens that stay at any score; they count against the budget.
        recent_queries: Number of newest queries whose mean attention `score` is given.
    """

    scored = True
    needs_content = True
    shareable = False
    shareable_prompts = True
    protected: int = 0

    def __init__(self, options: ScoreOptions) -> None:
        self.options = options
        kind = type(self)
        self._regular = all(getattr(kind, hook) is getattr(ScorePolicy, hook) for hook in _TIMES)
        at_the_end = self._regular and options.block is None
        self.shareable_prompts = kind.shareable_prompts and at_the_end
        self.evicts_prompt_only = options.interval is None

    def score(self, keys: Tensor, values: Tensor, attention: Tensor | None) -> Tensor:
        """Score the tokens of KV lists; the highest scores stay, of equal scores the first token.

        Args:
            keys: [b, h, s, d] in the order of their positions, with RoPE, at least float32.
            values: [b, h, s, d], likewise.
            attention: [b, h, r, s], mean attention of the newest `recent_queries` queries; None
                if there are none. May be changed.

        Returns:
            [b, h, s].
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method score")

    def kept(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return the number of tokens of each sequence that this layer keeps, int64 [b]."""
        return self.options.tokens(sequences)

    def kernel_rule(self) -> KernelRule | str:
        """Return the rule by which the kernels store and attend, and the hooks evict."""
        return BudgetRule(evicts=NEVER, interval=self.options.interval)

    def max_tokens(self, request: RequestSizes, computed: int) -> int | None:
        """Return the tokens up to the next eviction or the end of the prompt; None if none comes.

        A subclass with hooks of its own gets one token at a time after the prompt.
        """
        generated, o = computed - request.prompt, self.options
        if generated < 0:
            return -generated if o.block is None else min(-generated, o.block - computed % o.block)
        if not self._regular:
            return 1
        return None if o.interval is None else o.interval - generated % o.interval

    def evicts_after(self, sequences: Sequences) -> Tensor:
        """Return whether an eviction is due after this pass, bool [b]."""
        o, generated = self.options, sequences.end - sequences.prompt
        due = sequences.ends_prompt & (not o.decode_only)
        if o.block is not None:
            due = due | ((generated < 0) & (sequences.end % o.block == 0))
        if o.interval is not None:
            due = due | ((generated > 0) & (generated % o.interval == 0))
        return due

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens beyond the budget where an eviction is due, bool [b, h, 1, s]."""
        sequences = slots.sequences
        assert sequences is not None
        sequences = sequences._replace(held=self._held(slots, sequences))
        if not any(sequences.held or ()):
            return torch.zeros_like(slots.position, dtype=torch.bool)[:, :, None]
        due = self.evicts_after(sequences)
        budget = self.kept(slots, sequences)
        recent = newest(slots.position, sequences.end, budget.clamp(max=self.protected))
        score = self.slot_scores(slots, sequences).masked_fill(recent, torch.inf)
        evicted = beyond_budget(score, slots.position, budget)
        return (evicted & due[:, None, None])[:, :, None]

    def slot_scores(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return `score` by slot, [b, h, s], where an eviction is due; 0 elsewhere."""
        assert slots.key is not None
        assert slots.value is not None
        wide = torch.promote_types(slots.key.dtype, torch.float32)
        scores = torch.zeros_like(slots.position, dtype=wide)
        attention = window_attention(slots, sequences) if self.recent_queries else None
        far = torch.iinfo(torch.int64).max
        by_position = slots.position.masked_fill(slots.position < 0, far).argsort(-1)
        held = self._held(slots, sequences)
        for tokens in set(held) - {0}:
            same = sent([i for i, count in enumerate(held) if count == tokens], scores.device)
            order = by_position[same, :, :tokens]
            index = order[..., None].expand(-1, -1, -1, slots.key.shape[-1])
            keys, values = (x[same].gather(2, index).to(wide) for x in (slots.key, slots.value))
            seen = None
            if attention is not None:
                seen = attention[same]
                seen = seen.gather(3, order[:, :, None].expand(-1, -1, seen.shape[2], -1))
            new_scores = self.score(keys, values, seen)
            scores[same] = scores[same].scatter(2, order, new_scores.to(wide))
        return scores

    def _held(self, slots: Slots, sequences: Sequences) -> list[int]:
        """Return `Sequences.held`; waits for the device if the cache has not set it."""
        if sequences.held is not None:
            return sequences.held
        # all KV heads of a sequence hold the same number of tokens
        held = (slots.position >= 0).sum(-1).amax(-1)
        counts: list[int] = (held * self.evicts_after(sequences)).tolist()
        return counts
