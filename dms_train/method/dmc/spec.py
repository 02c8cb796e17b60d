"""Constants of Dynamic Memory Compression (arXiv:2403.09636).

Sections and appendices are numbered as in the paper. Where the paper is silent, the public code of
its authors decides. Queries and keys use the same eviction channel, the offset is subtracted at
inference too, and keys are merged before RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dms_train.limits import AtLeast, OneOf
from dms_train.method.base import LayerSizes, MethodOptions, MethodSpec

_FP32 = 4
# float32 numbers per KV head and token: decisions, importance and their sums
_VALUES = 9
_FUSED_VALUES = 4  # decisions take 1 of these numbers, or 3 where kernels cannot make them
_DECISIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DMCSpec(MethodSpec):
    """Checked constants of Dynamic Memory Compression.

    A key's eviction channel decides. The eviction channel of its group's queries weighs the token.
    Both are cleared before RoPE.

    Attributes:
        window: 0: a token that is merged into its successor is hidden at once.
        clear_after_rope: false.
        merge_window: Number of newest tokens of a slot that its average covers.
        importance: `query` weighs a token by sigmoid(mean activation of the eviction channel in
            its queries + importance_offset), `uniform` weighs all tokens alike.
        importance_offset: Offset with which weights start near 1.
        heads: `separate`: every KV head decides. `shared`: the first KV head of a layer decides for
            all (DMC-HardC).

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    kind: Annotated[str, OneOf("dmc")] = "dmc"
    window: Annotated[int, OneOf(0)]
    clear_after_rope: Annotated[bool, OneOf(False)]
    merge_window: Annotated[int, AtLeast(1)]
    importance: Annotated[str, OneOf("query", "uniform")]
    importance_offset: float
    heads: Annotated[str, OneOf("separate", "shared")]

    full_name: ClassVar[str] = "Dynamic Memory Compression"
    paper: ClassVar[str] = "https://arxiv.org/abs/2403.09636"
    verb: ClassVar[str] = "merged"
    replaces_values: ClassVar[bool] = True
    inference_fields: ClassVar[tuple[str, ...]] = (
        "channel",
        "alpha_scale",
        "alpha_offset",
        "merge_window",
        "importance",
        "importance_offset",
        "heads",
    )

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every constant that no model can be trained with."""
        yield from super(DMCSpec, self).check(path)
        if not math.isfinite(self.importance_offset):
            yield f"{path}.importance_offset={self.importance_offset}: use a finite offset"

    def channels(self, queries: int) -> int:
        """Count one channel of every query head and one of the key."""
        return queries + 1

    @property
    def summary(self) -> str:
        """Return the end of a sentence that describes a retrofitted model."""
        return (
            "each KV head decides for every token whether it takes a slot of the KV cache or is "
            "averaged into the slot of the token before it"
        )

    @property
    def governing_shift(self) -> int:
        """Return 1: the decision of a token hides the token before it."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DMCOptions(DMCSpec, MethodOptions):
    """The `method` block of a configuration; its base classes have further fields.

    Attributes:
        consistency: Weight of the loss sum |alpha - mean over the heads of alpha| (DMC-C).
        prior: Whether the compression loss asks for the ratio over all layers (`global`) or in
            each (`layer`).
    """

    consistency: Annotated[float, AtLeast(0)]
    prior: Annotated[str, OneOf("global", "layer")]

    spec_class: ClassVar[type[MethodSpec]] = DMCSpec

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Count the decisions, the tensors of the average, and the masks that clear both channels.

        The kernels keep keys and values as they are given, and the share of each of `merge_window`
        tokens in the average of every token. Torch operations keep keys, values and their sums in
        float32.
        """
        lists = sizes.samples * sizes.groups
        others = min(self.merge_window, sizes.length) - 1
        numbers = lists * sizes.length * sizes.head
        if sizes.fused:
            kept = 2 * numbers * sizes.width
            values = (_FUSED_VALUES + others + 1) * sizes.length
            if not self.independent_heads:
                values += (_DECISIONS - 1) * sizes.length
        else:
            kept = 4 * numbers * _FP32
            values = (_VALUES + 2 * others) * sizes.length - others * (others + 1)
        masks = 2 * sizes.head * sizes.width
        if not (sizes.fused and self.independent_heads):
            masks += sizes.length  # mask of the tokens without a predecessor
        return kept + values * lists * _FP32 + masks

    @property
    def independent_heads(self) -> bool:
        """True if every KV head decides by itself and the loss sums over heads."""
        return self.heads == "separate" and self.prior == "global" and not self.consistency

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every constant that no model can be trained with."""
        yield from super(DMCOptions, self).check(path)
        if self.consistency and self.heads == "shared":
            yield f"{path}.consistency={self.consistency}: use 0 with {path}.heads=shared"
        if self.consistency and self.prior == "layer":
            yield f"{path}.consistency={self.consistency}: use 0 with {path}.prior=layer"


OPTIONS, SPEC = DMCOptions, DMCSpec
