"""Constants of eviction by predicted importance, as in KVzap (arXiv:2601.07891).

The scorer of a KV head is linear: one row of the query projection, whose output is the eviction
channel. It adds no tensors. Only these rows are trained; the base model stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dms_train.limits import AtLeast, OneOf
from dms_train.method.base import LayerSizes, MethodOptions, MethodSpec

_FP32 = 4
_VALUES = 4  # float32 numbers per KV head and token: prediction, target, bias and gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzapSpec(MethodSpec):
    """Checked constants of eviction by predicted importance.

    A token is evicted after the window if alpha_scale * activation > alpha_offset. The left side
    predicts minus the logarithm of its importance, so that exp(-alpha_offset) is the threshold. It
    may differ between training and export.

    Attributes:
        clear_after_rope: false.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    kind: Annotated[str, OneOf("kvzap")] = "kvzap"
    window: Annotated[int, AtLeast(1)]
    clear_after_rope: Annotated[bool, OneOf(False)]

    full_name: ClassVar[str] = "Predicted Importance"
    paper: ClassVar[str] = "https://arxiv.org/abs/2601.07891"
    verb: ClassVar[str] = "evicted"
    inference_fields: ClassVar[tuple[str, ...]] = ("channel", "alpha_scale", "window")

    @property
    def label(self) -> str:
        """The method's name as the paper writes it."""
        return "KVzap"

    @property
    def summary(self) -> str:
        """Return the end of a sentence that describes a retrofitted model."""
        return (
            "each KV head predicts the importance of every token and evicts the tokens below a "
            f"threshold once they are more than {self.window} tokens back"
        )

    @property
    def governing_shift(self) -> int:
        """Return 0: a token's own score decides."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzapOptions(KVzapSpec, MethodOptions):
    """The `method` block of a configuration; its base classes have the fields."""

    spec_class: ClassVar[type[MethodSpec]] = KVzapSpec
    train: Annotated[str, OneOf("channel")]

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Count the predictions and their targets."""
        return _VALUES * _FP32 * sizes.samples * sizes.length * sizes.groups


OPTIONS, SPEC = KVzapOptions, KVzapSpec
