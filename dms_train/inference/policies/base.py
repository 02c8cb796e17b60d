"""Interface of cache policies, which decide about eviction, merging and reading of tokens.

A cache passes its slots to the policy and does not depend on the method. Everything is vectorised
over sequences, KV heads and slots. The cache owns the state of every slot and of every KV list
(`PolicyState`). It resets, copies and restores this state together with the tokens.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, q queries,
s slots, w `state_width`, m recent queries, d head size.

One forward pass of a layer calls, in this order:

0. `accumulate`: arriving tokens may be merged with those before them, before RoPE.
1. `on_store`: stored and arriving tokens get their state; arriving ones are identified by position.
2. Unscored policies and a single token: `evict_mask` and `merge`, then the kept tokens and the
   arriving one are stored; `select` may restrict what is read; attention.
   Otherwise: attention over stored and arriving tokens. `evict_mask` masks them at every query. A
   scored policy masks none, and `observe` follows instead. Then `evict_mask` at the newest token
   and `merge`, and the kept tokens are stored.

After the last layer of a pass that ends prompts, `balance` may set the policy's tensors of all
layers; `evict_mask` and `merge` are then asked once more for each layer of these sequences, with
`start` equal to `end`.

Before a pass is planned, `max_tokens` states how many tokens it may have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.inference.policies.kernel_rules import KernelRule, Limits

_RULED = (  # what a kernel rule describes
    "accumulate",
    "on_store",
    "evict_mask",
    "observe",
    "merge",
    "balance",
    "position_shift",
    "select",
    "evicts_after",
    "scored",
)


class RequestSizes(NamedTuple):
    """Sizes of a request, known before it runs.

    Attributes:
        prompt: Number of tokens of its prompt, earlier turns included.
        limit: Most tokens of the sequence, including generated ones.
        seed: Seed of its random numbers.
    """

    prompt: int
    limit: int
    seed: int


class Sequences(NamedTuple):
    """Sequences of a pass.

    Attributes:
        layers: Attention layers of the model.
        start: int64 [b], tokens before the pass.
        end: int64 [b], tokens after it.
        prompt: int64 [b], as in `RequestSizes`.
        limit: int64 [b], likewise.
        seed: int64 [b], likewise.
        lists: The policy's own tensors [b, h, ...], by name. The policy replaces them to keep new
            values. A name is absent until it is set. The third dimension may grow.
        query: [b, h, m, r, d], the newest queries with RoPE, the last one at the end; 0 for missing
            ones. Only for policies with `recent_queries`.
        frequency: [d / 2], radians by which RoPE turns a pair of channels for each position; None
            if the cache was built without it.
        held: [b], on the host: tokens in each KV list of a sequence after which `evicts_after` is
            true, 0 for other sequences. None if the cache does not know them without waiting.
    """

    layers: int
    start: Tensor
    end: Tensor
    prompt: Tensor
    limit: Tensor
    seed: Tensor
    lists: dict[str, Tensor]
    query: Tensor | None = None
    frequency: Tensor | None = None
    held: list[int] | None = None

    @property
    def ends_prompt(self) -> Tensor:
        """Return whether the pass computes the last token of the prompt, bool [b]."""
        return (self.start < self.prompt) & (self.end >= self.prompt)


class Slots(NamedTuple):
    """Tokens of one layer in the form that a policy reads.

    Attributes:
        layer: Layer number.
        position: int64 [b, h, s], the token's position in its sequence; -1 for an empty slot.
        state: float32 [b, h, s, w], the policy's own numbers; 0 when a token arrives.
        key: [b, h, s, d] with RoPE applied; only for policies with `needs_content`.
        value: [b, h, s, d], likewise.
        sequences: Sequences of the tokens; None where the cache does not know them.
    """

    layer: int
    position: Tensor
    state: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    sequences: Sequences | None = None


class NewTokens(NamedTuple):
    """Tokens that enter one layer.

    Attributes:
        position: int64 [b, n], rising by 1 from column to column; -1 for padding anywhere.
        key: [b, h, n, d] with RoPE applied.
        value: [b, h, n, d].
        signal: [b, h, n, ...], what the model outputs about each token for its policy; for DMS the
            hard decisions. None if there is nothing.
    """

    position: Tensor
    key: Tensor
    value: Tensor
    signal: Tensor | None

    def of(self, sequences: slice) -> NewTokens:
        """Return the tokens of some sequences."""
        signal = None if self.signal is None else self.signal[sequences]
        position, key, value = (x[sequences] for x in (self.position, self.key, self.value))
        return NewTokens(position, key, value, signal)


class Projected(NamedTuple):
    """Tokens of a pass before RoPE, as projected by the model.

    Attributes:
        query: [b, n, h, r, d].
        key: [b, n, h, d].
        value: [b, n, h, d].
        position: int64 [b, n], as in `NewTokens`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor


class AttentionReceived(NamedTuple):
    """Attention that the slots received in a pass, at least float32; padding gives none.

    Attributes:
        total: [b, h, r, s], summed over the queries.
        newest: [b, h, r, s], from the newest query of each sequence; 0 where it has none.
        squares: [b, h, r, s], sum of the squared attention of each query.
    """

    total: Tensor
    newest: Tensor
    squares: Tensor


class Merge(NamedTuple):
    """Evicted tokens that are added to others, after these were scaled.

    Attributes:
        source: int64 [pairs], slots by their index in b * h * s.
        target: int64 [pairs], likewise; kept slots of the same KV lists.
        key_weight: [pairs], factor on each source's key.
        value_weight: [pairs].
        key_scale: [b, h, s], factor on keys before the addition; 1 except in targets.
        value_scale: [b, h, s].
        source_key: [pairs, d], added instead of each source's stored key, such as the key at
            another position; None adds the stored key.
    """

    source: Tensor
    target: Tensor
    key_weight: Tensor
    value_weight: Tensor
    key_scale: Tensor
    value_scale: Tensor
    source_key: Tensor | None = None


class PositionShift(NamedTuple):
    """Tokens whose keys are read as if they were at other positions.

    Attributes:
        slots: bool [b, h, s], True for these tokens.
        by: int64 [b, q], distance to the new position, for each query.
    """

    slots: Tensor
    by: Tensor


class CachePolicy:
    """Compression method. Subclasses inherit default hooks that do nothing.

    Attributes:
        state_width: float32 numbers kept with each slot.
        scored: Whether tokens are evicted after attention, by received attention or content.
        needs_content: Whether the hooks read keys and values.
        recent_queries: Number of the newest queries that the hooks read.
        state_tokens: Tokens per entry of `Sequences.lists` if its tensors grow with the sequence;
            otherwise 0. `cache_bytes` counts them.
        window: Newest tokens that are never evicted.
        shareable: Whether other requests can start from the state after a token. The state may then
            depend only on the tokens up to it, not on the request or on the division of a prompt
            into passes. A scored policy that evicts inside a prompt must state one token in
            `max_tokens`.
        shareable_prompts: Whether they can start from the state after a token before the end of a
            prompt, which then depends on the tokens up to it alone. `shareable` implies it.
        evicts_prompt_only: Whether prompt tokens are evicted no later than `window` tokens after
            the end of the prompt.
    """

    state_width: int = 0
    scored: bool = False
    needs_content: bool = False
    recent_queries: int = 0
    state_tokens: int = 0
    window: int = 0
    shareable: bool = True
    shareable_prompts: bool = False
    evicts_prompt_only: bool = True

    def kernel_rule(self) -> KernelRule | str:
        """Return the rule by which the decode kernels serve this policy, or why they cannot.

        The reason completes a sentence that starts with the name of the class. A subclass inherits
        the rule unless it overrides a hook below; it then declares a rule of its own.
        """
        return "declares no kernel rule"

    def limits(self, sequences: Sequences) -> Limits:
        """Return budgets, for a `BudgetRule` with OLDEST or LEAST.

        A longer request must not have a smaller budget, because the longest sequence sizes memory.
        Called while a decode step is captured: use torch operations that do not wait for the
        device.
        """
        raise NotImplementedError

    def retention(self, channel: Tensor) -> Tensor:
        """Return the numbers that tokens bring, for a `BudgetRule` with RETENTION.

        The hook `on_store` must store the same numbers.

        Args:
            channel: Eviction channels of their queries before RoPE, any shape.

        Returns:
            float32, the same shape; at most 0. Captured like `limits`.
        """
        raise NotImplementedError

    def pages(self, sequences: Sequences) -> Tensor:
        """Return the number of pages that a query head reads, int64 [b], for a `PageRule`.

        Called while a decode step is captured, like `limits`.
        """
        raise NotImplementedError

    def evicts_after(self, sequences: Sequences) -> Tensor:
        """Return whether `evict_mask` may evict tokens after this pass, bool [b]."""
        return torch.ones_like(sequences.end, dtype=torch.bool)

    def max_tokens(self, request: RequestSizes, computed: int) -> int | None:
        """Return the most tokens of the next pass of a sequence; None for any number.

        By default, a scored policy takes chunks of the prompt, then one token at a time. The same
        holds when generated tokens are computed again.
        """
        if not self.scored:
            return None
        return max(1, request.prompt - computed)

    def accumulate(
        self, tokens: Projected, lists: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [b, n, h, d], before RoPE, to store instead of the tokens' own.

        Called before anything else. `lists` are the policy's own tensors, as in `Sequences`, and
        may be replaced. None, the default, leaves the tokens as they are.
        """
        return None

    def on_store(self, slots: Slots, arrival: NewTokens) -> Tensor:
        """Return the state of stored and arriving tokens: [b, h, s, w]."""
        return slots.state

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens evicted for queries at positions `at` [b, q]: bool [b, h, q, s].

        Values of empty slots are unspecified.
        """
        b, h, s = slots.position.shape
        return torch.zeros(b, h, at.shape[1], s, dtype=torch.bool, device=at.device)

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Return the state after attention: [b, h, s, w]. For scored policies only."""
        return slots.state

    def merge(self, slots: Slots, evicted: Tensor) -> Merge | None:
        """Return the merge of tokens about to be evicted, bool [b, h, s]; None merges nothing.

        For policies with `needs_content` only.
        """
        return None

    def balance(self, lists: list[dict[str, Tensor]], sequences: Sequences) -> None:
        """Decide over all layers at the end of a prompt.

        Args:
            lists: The policy's tensors of every layer, as `Sequences.lists`; to be changed.
            sequences: Sequences whose prompts end; their own `lists` are empty.
        """
        return

    def position_shift(self, slots: Slots, at: Tensor) -> PositionShift | None:
        """Return the tokens that queries at positions `at` [b, q] read at other positions.

        For policies that are not scored. None for no tokens.
        """
        return None

    def select(self, slots: Slots, query: Tensor) -> Tensor | None:
        """Return the slots that queries [b, h, r, d] of one decoded token read, bool [b, h, r, s].

        None, the default, reads all slots.
        """
        return None


def find_kernel_rule(policy: CachePolicy) -> KernelRule | str:
    """Return the kernel rule of a policy, or why there is none.

    A rule describes the hooks and `scored` of the class that declares it. It does not hold for a
    subclass that overrides one of them.
    """
    kind = type(policy)
    declared = _depth(kind, "kernel_rule")
    for hook in _RULED if kind.kernel_rule is not CachePolicy.kernel_rule else ():
        if _depth(kind, hook) < declared:
            return f"{kind.__name__} overrides {hook} without a kernel_rule of its own"
    rule = policy.kernel_rule()
    return f"{kind.__name__} {rule}" if isinstance(rule, str) else rule


def _depth(kind: type, name: str) -> int:
    """Return the index of the class that defines an attribute, in the order of resolution."""
    return next(i for i, cls in enumerate(kind.__mro__) if name in vars(cls))


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a policy that has none."""


@dataclass(frozen=True)
class PolicyKind:
    """Policy that can be selected by name.

    Attributes:
        options: A frozen dataclass. Its fields are bool, int, float or str, each optionally None,
            and have defaults. They may state limits, for example `Annotated[int, AtLeast(1)]`.
        build: Builds the policy from its options and the `MethodSpec` of the model; None for a
            dense model.
        trained: Whether the model must have been trained for the method with the policy's name.
    """

    options: type
    build: Callable[[Any, Any], CachePolicy]
    trained: bool = False
