"""Results and arguments of attention through a cache, and defaults of caches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor

from dms_train.inference.cache.linear_states import LinearStates
from dms_train.inference.policies.base import NewTokens, Projected


class Attended(NamedTuple):
    """Result of one layer's attention.

    Attributes:
        output: [b, heads, n, d].
        reads: int64 [b, kv_heads], slots attended, summed over the queries.
    """

    output: Tensor
    reads: Tensor


class HostDrivenCache:
    """Defaults of a cache that the host drives step by step."""

    capturable: None = None
    states: LinearStates | None = None

    def note_empty(self, row: int) -> None:
        """Do nothing: the cache records nothing about rows on the host."""

    def reserved(self, parts: list[tuple[int, int]]) -> AbstractContextManager[None]:
        """Return an empty context: a pass takes pages when it needs them."""
        return nullcontext()


class UnrotatedTokens(Protocol):
    """Tokens of one layer before RoPE, for caches that store rotated keys."""

    @property
    def rows(self) -> Tensor:
        """Return the cache rows of the sequences, int64 [b]."""
        ...

    @property
    def sinks(self) -> Tensor | None:
        """Return the logits [heads] in the denominators of the softmax; None for none."""
        ...

    def projected(self) -> Projected:
        """Return the projections of the model, for policies that merge before RoPE."""
        ...

    def replaced(self, key: Tensor, value: Tensor) -> UnrotatedTokens:
        """Return the same tokens with other keys and values, [b, n, kv_heads, d] each."""
        ...

    def rotated(self) -> tuple[Tensor, NewTokens]:
        """Return the query [b, heads, n, d] and the arriving tokens, with RoPE."""
        ...
