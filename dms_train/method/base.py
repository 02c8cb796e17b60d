"""What the constants of every retrofit method have in common; no torch.

A method is one package beside this module. It has a module `spec` with `OPTIONS` (its block of a
configuration) and `SPEC` (the same values, checked), and a module `attention` with `LAYER`, what
the method adds to the attention of a layer and to the loss (`method.layer`). `method.spec` finds
the packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from dms_train import limits
from dms_train.limits import OneOf


class LayerSizes(NamedTuple):
    """One microbatch in a layer, as a rank sees it.

    Attributes:
        samples: Samples.
        length: Tokens of each.
        groups: KV heads.
        queries: Query heads of a KV head.
        head: Head size.
        width: Bytes of a number in the precision of the weights.
        fused: Whether kernels take the place of torch operations, as on every GPU.
    """

    samples: int
    length: int
    groups: int
    queries: int
    head: int
    width: int
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Constants that every method has.

    Attributes:
        kind: Name of the method's package.
        preset: Name of the preset the values started from.
        channel: Borrowed channel of the heads; 0 is the first, -1 the last. Read after the norms
            of queries and keys (if the family has them) and before RoPE.
        alpha_scale: Factor on the borrowed activation.
        alpha_offset: Subtracted from the scaled activation (b = -5 in the DMS paper, c = 5 in the
            DMC paper).
        window: Tokens a key always stays visible: key j can be hidden from query i when
            i - j > window.
        tau: Temperature of the logistic relaxation used in training.
        clear_after_rope: Whether the borrowed channel is cleared again after RoPE.
        alpha_in_loss: `soft`, or `hard_st` (hard forward, soft gradient) in the compression loss.
        aux_form: `mean` normalises the compression hinge by layers x heads x tokens, `sum` not.
        kl_direction: `teacher_student` is KL(teacher || student), `student_teacher` the reverse.
        kl_temperature: Both models' logits are divided by it in the KL, which is multiplied by its
            square, so that the size of the gradient stays (arXiv:1503.02531, section 2).
    """

    kind: str
    preset: str
    channel: int
    alpha_scale: float
    alpha_offset: float
    window: int
    clear_after_rope: bool
    alpha_in_loss: Annotated[str, OneOf("soft", "hard_st")]
    tau: float
    aux_form: Annotated[str, OneOf("mean", "sum")]
    kl_direction: Annotated[str, OneOf("teacher_student", "student_teacher")]
    kl_temperature: float

    verb: ClassVar[str]
    """What becomes of a token that takes no slot, as a participle."""
    replaces_values: ClassVar[bool] = False
    """Whether attention reads other values than the projection's."""

    @property
    def label(self) -> str:
        """The method's name as the papers write it."""
        return self.kind.upper()

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Bytes that a layer keeps of the method for its backward pass.

        Beside the projections, and what attention keeps of its arguments.
        """
        raise NotImplementedError

    def check(self, path: str) -> Iterator[str]:
        """One line for every constant that no model can be trained with."""
        if self.channel not in (0, -1):
            yield f"{path}.channel={self.channel}: use 0 (first) or -1 (last)"
        for name in ("tau", "kl_temperature"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                yield f"{path}.{name}={value}: use a positive temperature"
        if not 0 < self.alpha_scale < math.inf:
            yield f"{path}.alpha_scale={self.alpha_scale}: use a positive scale"
        if not math.isfinite(self.alpha_offset):
            yield f"{path}.alpha_offset={self.alpha_offset}: use a finite offset"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec(MethodOptions):
    """Checked constants of a method.

    Attributes:
        full_name: Of the method.
        paper: Its address.
        inference_fields: Names of the constants that decide what a trained model computes; a
            student continues with the same.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    full_name: ClassVar[str]
    paper: ClassVar[str]
    inference_fields: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        found = list(limits.problems(self, "method"))
        if found:
            raise ValueError("\n".join(found))

    @property
    def governing_shift(self) -> int:
        """Distance from a key to the decision that governs it, in tokens."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """What a retrofitted model does, as the end of a sentence."""
        raise NotImplementedError

    def override(self, **values: Any) -> Self:
        """A copy in which every value that is not None replaces the present one."""
        return replace(self, **{k: v for k, v in values.items() if v is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form, stored with every checkpoint and export."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; unknown or missing keys raise ValueError naming them."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            missing, extra = sorted(known - set(values)), sorted(set(values) - known)
            raise ValueError(f"method spec: missing keys {missing}, unknown keys {extra}")
        return cls(**values)
