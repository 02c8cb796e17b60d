"""The DMS specification: every constant that defines what a retrofitted model computes.

`MethodOptions` is the `method` block of a configuration, `DMSSpec` the same values after their
check. A spec is stored with each checkpoint and export. `conf/method/NAME.yaml` holds all values of
each preset, so that there are no defaults here; `PRESETS` is read from these files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from dms_train import limits
from dms_train.limits import AtLeast, OneOf

_PRESET_DIR = Path(__file__).resolve().parents[1] / "conf" / "method"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Constants of Dynamic Memory Sparsification (paper section 3 and appendix B).

    Attributes:
        preset: Name of the preset the values started from.
        channel: Borrowed channel of the first query head of each group; 0 is the first, -1 the
            last. Read after q_norm (if the family has one) and before RoPE.
        alpha_scale: Factor on the borrowed activation.
        alpha_offset: Subtracted from the scaled activation (the paper's b = -5).
        decision_shift: Token j is governed by the decision made at position j + shift (0 or 1).
        window: Tokens a key always stays visible: key j is evictable for query i when
            i - j > window.
        tau: Temperature of the logistic relaxation used in training.
        clear_after_rope: Whether the eviction channel is cleared again after RoPE.
        alpha_in_loss: `soft`, or `hard_st` (hard forward, soft gradient) in the compression loss.
        aux_form: `mean` normalises the compression hinge by layers x heads x tokens, `sum` not.
        eviction: `delayed` decides when the token is written (or one later), `immediate` when it
            leaves the window.
        kl_direction: `teacher_student` is KL(teacher || student), `student_teacher` the reverse.
        kl_temperature: Both models' logits are divided by it in the KL, which is multiplied by its
            square, so that the size of the gradient stays (arXiv:1503.02531, section 2).
    """

    preset: str
    channel: int
    alpha_scale: float
    alpha_offset: float
    decision_shift: Annotated[int, OneOf(0, 1)]
    window: Annotated[int, AtLeast(1)]
    clear_after_rope: bool
    alpha_in_loss: Annotated[str, OneOf("soft", "hard_st")]
    tau: float
    aux_form: Annotated[str, OneOf("mean", "sum")]
    eviction: Annotated[str, OneOf("delayed", "immediate")]
    kl_direction: Annotated[str, OneOf("teacher_student", "student_teacher")]
    kl_temperature: float

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
class DMSSpec(MethodOptions):
    """Checked constants of Dynamic Memory Sparsification.

    Fields are those of `MethodOptions`.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    def __post_init__(self) -> None:
        found = list(limits.problems(self, "method"))
        if found:
            raise ValueError("\n".join(found))

    @property
    def governing_shift(self) -> int:
        """Distance from a key to the decision that governs it, in tokens."""
        return self.decision_shift + (self.window if self.eviction == "immediate" else 0)

    def override(self, **values: Any) -> DMSSpec:
        """A copy in which every value that is not None replaces the present one."""
        return replace(self, **{k: v for k, v in values.items() if v is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form, stored with every checkpoint and export."""
        return asdict(self)

    @classmethod
    def from_options(cls, options: MethodOptions) -> DMSSpec:
        """The specification of a configuration."""
        return cls(**asdict(options))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DMSSpec:
        """Inverse of `to_dict`; unknown or missing keys raise ValueError naming them."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            missing, extra = sorted(known - set(values)), sorted(set(values) - known)
            raise ValueError(f"DMS spec: missing keys {missing}, unknown keys {extra}")
        return cls(**values)


def _presets() -> dict[str, DMSSpec]:
    files = sorted(_PRESET_DIR.glob("*.yaml"))
    return {file.stem: DMSSpec(**yaml.safe_load(file.read_text("utf-8"))) for file in files}


PRESETS = _presets()
