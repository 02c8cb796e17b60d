"""Constants of Dynamic Memory Sparsification (paper section 3 and appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dms_train.limits import AtLeast, OneOf
from dms_train.method.base import LayerSizes, MethodOptions, MethodSpec

_FP32 = 4
# float32 numbers per KV head and token: alpha, the negated logit and log(1 - alpha)
_DECISION_VALUES = 3
_FUSED_DECISION_VALUES = 1  # fused kernels keep the logit alone


@dataclass(frozen=True, slots=True, kw_only=True)
class DMSSpec(MethodSpec):
    """Checked constants of Dynamic Memory Sparsification.

    The first query head of each group holds the eviction channel.

    Attributes:
        decision_shift: Token j is governed by the decision made at position j + shift (0 or 1).
        window: Tokens a key always stays visible: key j is evictable for query i when
            i - j > window.
        eviction: `delayed` decides when the token is written (or one later), `immediate` when it
            leaves the window.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    kind: Annotated[str, OneOf("dms")] = "dms"
    decision_shift: Annotated[int, OneOf(0, 1)]
    window: Annotated[int, AtLeast(1)]
    eviction: Annotated[str, OneOf("delayed", "immediate")]

    full_name: ClassVar[str] = "Dynamic Memory Sparsification"
    paper: ClassVar[str] = "https://arxiv.org/abs/2506.05345"
    verb: ClassVar[str] = "evicted"
    inference_fields: ClassVar[tuple[str, ...]] = (
        "channel",
        "alpha_scale",
        "alpha_offset",
        "decision_shift",
        "window",
        "clear_after_rope",
        "eviction",
    )

    @property
    def summary(self) -> str:
        """Return the end of a sentence that describes a retrofitted model."""
        return (
            "each KV head decides for every token whether the token is evicted from the KV cache "
            f"once it is more than {self.window} tokens back"
        )

    @property
    def governing_shift(self) -> int:
        """Distance from a key to the decision that governs it, in tokens."""
        return self.decision_shift + (self.window if self.eviction == "immediate" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DMSOptions(DMSSpec, MethodOptions):
    """The `method` block of a configuration; its base classes have the fields."""

    spec_class: ClassVar[type[MethodSpec]] = DMSSpec

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Count decisions, and without kernels the mask that clears the eviction channel."""
        decisions = sizes.samples * sizes.length * sizes.groups * _FP32
        if sizes.fused:
            return _FUSED_DECISION_VALUES * decisions
        return _DECISION_VALUES * decisions + sizes.queries * sizes.head * sizes.width


OPTIONS, SPEC = DMSOptions, DMSSpec
