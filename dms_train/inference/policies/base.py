"""The interface of cache policies: which tokens are evicted and when, merged, and read.

A cache passes its slots to the policy and does not depend on the method. Everything is vectorised
over sequences, KV heads and slots.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, q queries,
s slots, w `state_width`, d head size.

One forward pass of a layer calls, in this order:

1. `admit`: stored and arriving tokens get their state; arriving ones are identified by position.
2. Unscored policies and a single token: `expired` and `merge`, then the kept tokens and the
   arriving one are stored; `select` may restrict what is read; attention.
   Otherwise: attention over stored and arriving tokens, masked with `expired` at every query
   (scored policies see all of them), then `observe` if scored, `expired` at the newest token and
   `merge`, then the kept tokens are stored.

How known methods map onto the hooks:

- DMS: the decision logit's sign is the signal; `admit` copies it into the state of the token it
  governs, `expired` is the visibility rule. Local window: `expired` compares the age; StreamingLLM
  spares positions below the number of sinks.
- H2O, RoCo: scored; state = attention received (RoCo: also its count and squares); `observe` adds
  the column sums, `expired` is everything below the budget that is not recent.
- TOVA: scored, w = 1; `observe` overwrites the state with the last query's weights averaged over
  all heads, `expired` is the smallest once the budget is exceeded. With `max_chunk = 1` prompts
  stream through the budget as in decoding.
- SnapKV, PyramidKV: scored; `observe` keeps the observation window's pooled scores, `expired` cuts
  to the budget (of `slots.layer`) once, after the last prompt chunk; nothing is evicted later.
- R-KV: scored with `needs_content`; `observe` keeps recent weights, `expired` acts every 128th
  position and compares keys.
- CaM, D2O: as H2O with `needs_content`; `merge` folds evicted tokens into kept ones.
- DMC: unscored, `needs_content`, `max_chunk = 1`; the signal carries decision and importance, the
  state the accumulated weight; `merge` folds the arriving token into the last slot (that key is
  rotated further by the distance, as RoPE is linear), and `expired` is then the arriving token.
- Quest: nothing is evicted; `needs_content`; `select` bounds each page's scores from its keys and
  reads the best pages of each query head. Tokens never move, so pages hold consecutive tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Slots(NamedTuple):
    """The tokens of one layer, as a policy sees them.

    Attributes:
        layer: Layer number.
        position: int64 [b, h, s], the token's position in its sequence; -1 for an empty slot.
        state: float32 [b, h, s, w], the policy's own numbers; 0 when a token arrives.
        key: [b, h, s, d] with RoPE applied; only for policies with `needs_content`.
        value: [b, h, s, d], likewise.
    """

    layer: int
    position: Tensor
    state: Tensor
    key: Tensor | None = None
    value: Tensor | None = None


class Arrival(NamedTuple):
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


class CachePolicy(Protocol):
    """A compression method. Inherit from it to get default hooks that do nothing.

    Attributes:
        state_width: float32 numbers kept with each slot.
        scored: Whether tokens are evicted by the attention they receive, that is, after it.
        needs_content: Whether the hooks read keys and values.
        max_chunk: Most tokens of a sequence per forward pass, or None.
        window: Newest tokens that are never evicted.
    """

    state_width: int = 0
    scored: bool = False
    needs_content: bool = False
    max_chunk: int | None = None
    window: int = 0

    def admit(self, slots: Slots, arrival: Arrival) -> Tensor:
        """The state once the arrival, already among the slots, is known: [b, h, s, w]."""
        return slots.state

    def expired(self, slots: Slots, at: Tensor) -> Tensor:
        """Tokens evicted for queries at the positions `at`, int64 [b, q]: bool [b, h, q, s].

        Values of empty slots are unspecified.
        """
        b, h, s = slots.position.shape
        return torch.zeros(b, h, at.shape[1], s, dtype=torch.bool, device=at.device)

    def observe(self, slots: Slots, weights: Tensor) -> Tensor:
        """The state after attention [b, h * r, q, s]: [b, h, s, w]. For scored policies only."""
        return slots.state

    def merge(self, slots: Slots, evicted: Tensor) -> tuple[Slots, Tensor] | None:
        """Fold tokens that are about to be evicted (bool [b, h, s]) into the others.

        Returns:
            The slots afterwards and which of them changed, bool [b, h, s]; None for no change.
        """
        return None

    def select(self, slots: Slots, query: Tensor) -> Tensor | None:
        """What each query [b, h * r, 1, d] reads while decoding: bool [b, h, r, 1, s] or None."""
        return None
