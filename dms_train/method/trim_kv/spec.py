"""Constants of token retention as in TRIM-KV (arXiv:2512.03324).

The gate of a KV head is linear: one row of the query projection, whose output is the eviction
channel. It adds no tensors. Only these rows are trained; the base model stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dms_train.limits import AtLeast, Below, OneOf
from dms_train.method.base import LayerSizes, MethodOptions, MethodSpec

_FP32 = 4
_VALUES = 4  # float32 numbers per KV head and token: logit, retention and their gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimKVSpec(MethodSpec):
    """Checked constants of token retention.

    A token's retention is beta = sigmoid(alpha_offset - alpha_scale * activation).

    Attributes:
        window: 0: retention decays from a token's first successor on.
        clear_after_rope: false.
        budget: Tokens of each KV list at inference where the request states no other budget.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    kind: Annotated[str, OneOf("trim_kv")] = "trim_kv"
    window: Annotated[int, OneOf(0)]
    clear_after_rope: Annotated[bool, OneOf(False)]
    budget: Annotated[int, AtLeast(1), Below(2**31)]

    full_name: ClassVar[str] = "Token Retention"
    paper: ClassVar[str] = "https://arxiv.org/abs/2512.03324"
    verb: ClassVar[str] = "evicted"
    decays: ClassVar[bool] = True
    inference_fields: ClassVar[tuple[str, ...]] = (
        "channel",
        "alpha_scale",
        "alpha_offset",
        "budget",
    )

    @property
    def label(self) -> str:
        """The method's name as the paper writes it."""
        return "TRIM-KV"

    @property
    def summary(self) -> str:
        """Return the end of a sentence that describes a retrofitted model."""
        return (
            "each KV head predicts for every token how fast its worth decays, and the KV cache "
            "evicts the tokens of the lowest remaining worth beyond a budget"
        )

    @property
    def governing_shift(self) -> int:
        """Return 0: a token's own gate decides."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimKVOptions(TrimKVSpec, MethodOptions):
    """The `method` block of a configuration; its base classes have further fields.

    Attributes:
        capacity_weight: Weight of the capacity loss.
    """

    capacity_weight: Annotated[float, AtLeast(0)]

    spec_class: ClassVar[type[MethodSpec]] = TrimKVSpec
    train: Annotated[str, OneOf("channel")]

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Count the retentions; the capacity loss computes its blocks again."""
        return _VALUES * _FP32 * sizes.samples * sizes.length * sizes.groups


OPTIONS, SPEC = TrimKVOptions, TrimKVSpec
