"""What caches and models exchange."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from dms_train.inference.policies.base import Arrival, Projected


class Attended(NamedTuple):
    """Result of one layer's attention.

    Attributes:
        output: [b, heads, n, d].
        reads: int64 [b, kv_heads], slots attended, summed over the queries.
    """

    output: Tensor
    reads: Tensor


class UnrotatedTokens(Protocol):
    """Tokens of one layer before RoPE, for caches that store rotated keys."""

    @property
    def rows(self) -> Tensor:
        """Cache rows of the sequences, int64 [b]."""
        ...

    def projected(self) -> Projected:
        """What the model projects, for policies that merge before RoPE."""
        ...

    def replaced(self, key: Tensor, value: Tensor) -> UnrotatedTokens:
        """The same tokens and decisions with other content, [b, n, kv_heads, d] each."""
        ...

    def rotated(self) -> tuple[Tensor, Arrival]:
        """The query [b, heads, n, d] and the arriving tokens, with RoPE."""
        ...
