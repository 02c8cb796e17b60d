"""The `method` group of the configuration: a preset and what replaces its values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dms_train.method.spec import PRESETS, DMSSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """A preset name plus overrides; None keeps the preset's value."""

    preset: str
    channel: int | None = None
    alpha_scale: float | None = None
    alpha_offset: float | None = None
    decision_shift: int | None = None
    window: int | None = None
    clear_after_rope: bool | None = None
    alpha_in_loss: str | None = None
    tau: float | None = None
    aux_form: str | None = None
    eviction: str | None = None
    kl_direction: str | None = None
    kl_temperature: float | None = None

    def spec(self) -> DMSSpec:
        """The resolved specification; raises ValueError for an unknown preset or value."""
        if self.preset not in PRESETS:
            raise ValueError(f"method.preset={self.preset!r}: choose one of {', '.join(PRESETS)}")
        overrides = {k: v for k, v in asdict(self).items() if k != "preset"}
        return PRESETS[self.preset].override(**overrides)
