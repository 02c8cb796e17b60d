"""Constants that all retrofit methods share; no torch.

A method is one package beside this module. Its module `spec` has `SPEC` and `OPTIONS`. `SPEC` holds
the constants that every checkpoint and export stores. `OPTIONS`, the `method` block of a
configuration, adds constants of training. The module `attention` has `LAYER`, which changes the
attention of a layer and adds to the loss (`method.layer`). `method.spec` finds the packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from dms_train import limits
from dms_train.limits import AUTO, AtLeast, OneOf, OrAuto

FIRST_CHANNEL = 0
"""Eviction channel of the DMS paper; the value of `auto` in runs that rank no channels."""
TRAINED_WEIGHTS = ("all", "attention", "channel", "lora")
"""Values of `method.train`."""
SPEC_VERSION = 2
"""Version of the stored specification; `method.spec` reads this one and all earlier ones."""


class LayerSizes(NamedTuple):
    """One micro-batch in one layer of one rank.

    Attributes:
        samples: Number of samples.
        length: Number of tokens of each sample.
        groups: Number of KV heads.
        queries: Number of query heads per KV head.
        head: Head size.
        width: Bytes per number in the precision of the weights.
        fused: Whether fused kernels replace torch operations, as on every GPU.
    """

    samples: int
    length: int
    groups: int
    queries: int
    head: int
    width: int
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """Checked constants that a trained model carries, stored with its checkpoints and exports.

    Attributes:
        kind: Name of the method's package.
        preset: Name of the preset the values started from.
        channel: Index of the eviction channel in a head; 0 is the first, -1 the last. Read after
            the norms of queries and keys (if the family has them) and before RoPE.
        alpha_scale: Factor on the activation of the eviction channel.
        alpha_offset: Subtracted from the scaled activation (b = -5 in the DMS paper, c = 5 in the
            DMC paper).
        window: Tokens a key always stays visible: key j can be hidden from query i when
            i - j > window.
        clear_after_rope: Whether the eviction channel is cleared again after RoPE.
        tau: Temperature of the logistic relaxation used in training. It changes nothing that a
            trained model computes; it is stored because NVIDIA's format states it.

    Raises:
        ValueError: One line for every value that cannot be used.
    """

    kind: str
    preset: str
    channel: Annotated[int, AtLeast(-1)]
    alpha_scale: float
    alpha_offset: float
    window: int
    clear_after_rope: bool
    tau: float

    full_name: ClassVar[str]
    """Name of the method in words."""
    paper: ClassVar[str]
    """Address of the paper."""
    verb: ClassVar[str]
    """Past participle used in reports, for example "evicted" or "merged"."""
    inference_fields: ClassVar[tuple[str, ...]]
    """Constants that decide what a trained model computes; a student continues with the same."""
    replaces_values: ClassVar[bool] = False
    """Whether attention reads other values than the projection's."""
    decays: ClassVar[bool] = False
    """True if `log_keep` is multiplied by the distance from key to query; there is no window."""

    def __post_init__(self) -> None:
        self.require_valid()

    def require_valid(self) -> None:
        """Raise ValueError with one line for every value that cannot be used."""
        problems = list(limits.problems(self, "method"))
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def label(self) -> str:
        """The method's name as the papers write it."""
        return self.kind.upper()

    @property
    def governing_shift(self) -> int:
        """Distance from a key to the decision that governs it, in tokens."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """Return the end of a sentence that describes a retrofitted model."""
        raise NotImplementedError

    def channels(self, queries: int) -> int:
        """Return the number of eviction channels of a KV head with `queries` query heads."""
        return 1

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every constant that no model can be trained with."""
        if not 0 < self.tau < math.inf:
            yield f"{path}.tau={self.tau}: use a positive temperature"
        if not 0 < self.alpha_scale < math.inf:
            yield f"{path}.alpha_scale={self.alpha_scale}: use a positive scale"
        if not math.isfinite(self.alpha_offset):
            yield f"{path}.alpha_offset={self.alpha_offset}: use a finite offset"

    def override(self, **values: Any) -> Self:
        """Return a checked copy with the given values; None keeps the present value."""
        changed = replace(self, **{k: v for k, v in values.items() if v is not None})
        changed.require_valid()
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON form that is stored; `method.spec.spec_from_dict` reads it."""
        return {"version": SPEC_VERSION, **asdict(self)}

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        """Build it from all of its fields; ValueError names missing and unknown keys."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            missing, extra = sorted(known - set(values)), sorted(set(values) - known)
            raise ValueError(f"method spec: missing keys {missing}, unknown keys {extra}")
        return cls(**values)


# Without slots, because a method's options inherit fields from here and from their specification.
@dataclass(frozen=True, kw_only=True)
class MethodOptions(MethodSpec):
    """The `method` block of a configuration: a specification and the constants of training.

    The constants of training shape the loss alone, so neither checkpoints nor exports store them.
    A configuration is checked as a whole, so building a block checks nothing.

    Attributes:
        channel: As in the specification, or `auto`: the run ranks the channels of its model before
            the first step.
        train: Weights that train: `all`; `attention` (the q, k, v and o projections with their
            biases); `channel` (the rows that produce the eviction channels); `lora` (low-rank
            adapters of these projections, and those rows). The others stay as they are.
        alpha_in_loss: `soft`, or `hard_st` (hard forward, soft gradient) in the compression loss.
        aux_form: `mean` normalises the compression hinge by layers x heads x tokens; `sum` does
            not.
    """

    channel: Annotated[int | str, OrAuto(AtLeast(-1))]  # type: ignore[assignment]
    train: Annotated[str, OneOf(*TRAINED_WEIGHTS)]
    alpha_in_loss: Annotated[str, OneOf("soft", "hard_st")]
    aux_form: Annotated[str, OneOf("mean", "sum")]

    spec_class: ClassVar[type[MethodSpec]]
    """Class of the specification."""

    def __post_init__(self) -> None:
        pass

    @property
    def spec(self) -> MethodSpec:
        """The checked specification alone; `auto` stands for the first channel."""
        values = {f.name: getattr(self, f.name) for f in fields(self.spec_class)}
        if self.channel == AUTO:
            values["channel"] = FIRST_CHANNEL
        return self.spec_class(**values)

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every constant that no model can be trained with."""
        yield from super().check(path)
        if self.channel == AUTO and self.clear_after_rope:
            yield (
                f"{path}.channel={AUTO}: the ranking does not measure the clearing after RoPE; "
                f"set {path}.channel=-1, or {path}.clear_after_rope=false"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form of the specification."""
        return self.spec.to_dict()

    def kept_bytes(self, sizes: LayerSizes) -> int:
        """Return the number of bytes that a layer keeps for the backward pass of the method.

        The projections and the arguments that attention keeps do not count.
        """
        raise NotImplementedError
