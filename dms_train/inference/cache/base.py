"""What a model asks of a cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from dms_train.inference.policies.base import Arrival


class Attended(NamedTuple):
    """Result of one layer's attention.

    Attributes:
        output: [b, heads, n, d].
        reads: int64 [b, kv_heads], slots attended, summed over the queries.
    """

    output: Tensor
    reads: Tensor


class KVCache(Protocol):
    """Keys and values of several sequences ("rows"), all layers."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the system now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever taken from the system."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one KV head."""
        ...

    def attend(self, layer: int, rows: Tensor, query: Tensor, arrival: Arrival) -> Attended:
        """Store the arrival and let it attend. rows: int64 [b]; query: [b, heads, n, d]."""
        ...

    def live(self, rows: Tensor) -> Tensor:
        """Tokens held that a later query may read, int64 [layers, b, kv_heads]."""
        ...

    def held_slots(self, rows: Tensor) -> Tensor:
        """Slots reserved, live or not, int64 [layers, b, kv_heads]."""
        ...

    def free(self, rows: Tensor) -> None:
        """Forget the sequences in these rows, int64 [b]."""
        ...
