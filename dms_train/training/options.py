"""Options of the stages, their lengths, and the run folder."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dms_train.hf.formats import FORMATS
from dms_train.hf.options import PRECISIONS
from dms_train.limits import AtLeast, Below, Matches, OneOf, Positive, Share
from dms_train.method.token_losses import TOKEN_LOSSES

EVICTING_STAGES = ("retrofit", "hold")
RETROFIT_STAGES = ("zero_neuron", *EVICTING_STAGES)
TRAINED_STAGES = ("pretrain", *RETROFIT_STAGES)
VALIDATE_EXPORT, RUN_TASKS = "validate_export", "run_tasks"
TEACHER_LOGITS = "teacher_logits"
STAGES = (TEACHER_LOGITS, *TRAINED_STAGES, "export", VALIDATE_EXPORT, RUN_TASKS)
_SEEDS = 2**32
_RATIOS, _STEPS_PER_RATIO = 10_000, 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainOptions:
    """Plain language-model training, of `model.path` or from scratch.

    Cosine learning rate to `min_lr_ratio`; 1 keeps it constant.
    """

    steps: Annotated[int, AtLeast(1)]
    lr: Annotated[float | None, Positive()] = None
    min_lr_ratio: Annotated[float, Share()] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroNeuronOptions:
    """Ramp the eviction channel to zero over `steps` (the paper's n_t).

    With `resets_eviction_channel` the weights of the channel are zeroed at the end of the stage, so
    that every decision logit starts at -offset. Without it decisions start from the original
    weights.
    """

    steps: Annotated[int, AtLeast(0)]
    resets_eviction_channel: bool = True
    loss: Annotated[str, OneOf(*TOKEN_LOSSES)] = "distill"
    lr: Annotated[float | None, Positive()] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitOptions:
    """Anneal the compression ratio by one unit per `steps_per_cr` steps up to `target_cr`.

    With `annealing=immediate` the same number of steps is taken at the final ratio (DMC paper,
    appendix E). The annealing starts from `start_cr`. None is the ratio of the student that
    `run.load` names, or 1 for the original model.

    The annealing ends early when the validation KL at an integer ratio, or at the target, is above
    `max_kl` nats per token. The run then continues from the last ratio within that limit. None
    anneals to the target.

    `layer_ratios` gives layers a ratio of their own at the target, by number from 0. The other
    layers evict the rest, so that `target_cr` stays the ratio of all. At a lower ratio on the way,
    and in `hold`, the evicted shares of layers keep their proportions.
    """

    target_cr: Annotated[float, AtLeast(1), Below(_RATIOS)]
    steps_per_cr: Annotated[int, AtLeast(1), Below(_STEPS_PER_RATIO)]
    start_cr: Annotated[float | None, AtLeast(1)] = None
    annealing: Annotated[str, OneOf("linear", "immediate")] = "linear"
    max_kl: Annotated[float | None, Positive()] = None
    layer_ratios: dict[int, float] | None = None
    loss: Annotated[str, OneOf(*TOKEN_LOSSES)] = "distill"
    lr: Annotated[float | None, Positive()] = None

    def check(self, path: str) -> Iterator[str]:
        """Yield a line for a ratio that would have to fall, and for a KL that is not measured."""
        if self.start_cr is not None and not self.target_cr >= self.start_cr:
            yield (
                f"{path}.target_cr={self.target_cr}: below {path}.start_cr={self.start_cr}; "
                "anneal upwards"
            )
        for layer, ratio in (self.layer_ratios or {}).items():
            if not 1 <= ratio < math.inf:
                yield f"{path}.layer_ratios.{layer}={ratio:g}: use a number of at least 1"
        if self.max_kl is None:
            return
        if self.annealing == "immediate":
            yield f"{path}.max_kl={self.max_kl}: needs {path}.annealing=linear; change one of them"
        if self.loss in TOKEN_LOSSES and "kl" not in TOKEN_LOSSES[self.loss].terms:
            yield f"{path}.max_kl={self.max_kl}: {path}.loss={self.loss} has no KL; use distill"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """Fixed compression ratio, cosine learning rate to `min_lr_ratio`.

    The annealing also holds each integer ratio of `branch_ratios` that it passes before its target.
    The result of such a branch is exported. The annealing then continues from the weights and the
    optimizer state before the branch. None holds the final ratio only.
    """

    steps: Annotated[int, AtLeast(1)]
    branch_ratios: tuple[int, ...] | None = None
    loss: Annotated[str, OneOf(*TOKEN_LOSSES)] = "distill"
    lr: Annotated[float | None, Positive()] = None
    min_lr_ratio: Annotated[float, Share()] = 0.1

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for a ratio that no annealing passes."""
        for ratio in self.branch_ratios or ():
            if ratio < 2:
                yield f"{path}.branch_ratios={list(self.branch_ratios or ())}: use ratios from 2"
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Format and precision of an export.

    Attributes:
        format: Name of a format (`dms_train/hf/formats`). None is the format that goes with the
            method's preset; it is replaced when the configuration is composed.
        dtype: `fp32` or `bf16`. None is the dtype that the format requires, otherwise the
            precision of the training.
        every_integer_cr: Also export whenever the annealed ratio passes an integer.
        paged_attention_block_size: Page size that an `nvidia` export states for its consumer.
    """

    format: Annotated[str | None, OneOf(None, *FORMATS)] = None
    dtype: Annotated[str | None, OneOf(None, *PRECISIONS)] = None
    every_integer_cr: bool = True
    paged_attention_block_size: Annotated[int, AtLeast(1)] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogitsOptions:
    """Store the original's most probable tokens of every position, for later runs.

    Attributes:
        samples: Number of training samples, a multiple of `data.global_batch_size`. A run that
            reads them takes at most as many. The samples of evaluations are stored too.
        top_k: Stored tokens of a position, each with its probability; one more number is the
            probability of all others together. Above the vocabulary's size all tokens are stored.
    """

    samples: Annotated[int | None, AtLeast(1)] = None
    top_k: Annotated[int, AtLeast(1)] = 64


NO_TEACHER_LOGITS = TeacherLogitsOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOptions:
    """The frozen original that a loss compares the student with.

    Attributes:
        logits: Run folder of a finished stage `teacher_logits` with the same model, data, split,
            sequence length, seed and temperature. Its files replace the teacher. None runs the
            original beside the student.
        offload: Keep the layers of the original in pinned host memory, and copy each to the GPU
            ahead of its turn in a pass.
    """

    logits: str | None = None
    offload: bool = False


LIVE_TEACHER = TeacherOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Stages to run, in order, and one block of settings for each."""

    run: tuple[str, ...]
    pretrain: PretrainOptions
    zero_neuron: ZeroNeuronOptions
    retrofit: RetrofitOptions
    hold: HoldOptions
    export: ExportOptions
    teacher_logits: TeacherLogitsOptions = NO_TEACHER_LOGITS

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for stages that are unknown or in a wrong order."""
        if not self.run:
            yield f"{path}.run=[]: name at least one of {', '.join(STAGES)}"
        unknown = [name for name in self.run if name not in STAGES]
        for name in unknown:
            near = difflib.get_close_matches(name, STAGES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(STAGES)}"
            yield f"{path}.run: unknown stage {name!r}; {hint}"
        if unknown:
            return
        ordered = [name for name in STAGES if name in self.run]
        if list(self.run) != ordered:
            yield (
                f"{path}.run=[{', '.join(self.run)}]: run each stage once, as "
                f"[{', '.join(ordered)}]"
            )
        if TEACHER_LOGITS in self.run and len(self.run) > 1:
            yield (
                f"{path}.run: {TEACHER_LOGITS} and {self.run[1]} are different runs; run "
                f"[{TEACHER_LOGITS}], then the others with teacher.logits set to its run.dir"
            )
        late = [name for name in self.run if name in RETROFIT_STAGES]
        if "pretrain" in self.run and late:
            yield (
                f"{path}.run: pretrain and {late[0]} are different runs; run [pretrain, export], "
                f"then {late[0]} with model.path set to the export"
            )
        yield from self._check_branches(path)

    def _check_branches(self, path: str) -> Iterator[str]:
        """Yield one line for branches without an export or without the samples of `hold`."""
        missing = [name for name in ("hold", "export") if name not in self.run]
        if self.hold.branch_ratios and "retrofit" in self.run and missing:
            yield (
                f"{path}.hold.branch_ratios={list(self.hold.branch_ratios)}: branches need the "
                f"stages hold and export; add {' and '.join(missing)} to {path}.run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Run folder, checkpoints, evaluations and logs.

    Attributes:
        dir: Run folder: resolved config, metrics, checkpoints, exports.
        seed: Data order, relaxation noise, and the weights of a model trained from scratch.
        resume: `auto` continues from the newest valid checkpoint in `dir`, `never` refuses a
            folder that already holds one.
        load: Megatron checkpoint whose weights the student starts from, instead of the model's; a
            run folder stands for its newest whole checkpoint. An export is accepted too.
        check_teacher: Refuse to start when the teacher predicts the training data no better than by
            guessing. Switch it off for a teacher with random weights.
        max_skipped_steps: Stop after this many steps in a row whose loss or gradient is not finite.
        save_interval: Steps between checkpoints; 0 saves at the ends of stages only.
        async_save: Write checkpoints in the background while training continues.
        keep_checkpoints: Number of newest checkpoints to keep. Of integer ratios and ends of stages
            the weights are kept, in `exports` or `weights`.
        eval_interval: Steps between evaluations; 0 evaluates at the ends of stages only.
        eval_samples: Validation samples per evaluation; 0 evaluates nothing.
        log_interval: Steps between metric rows.
        dry_run: Print the plan and stop before any process group is made.
    """

    dir: Annotated[str, Matches(r".*\S.*", "the path of a folder")]
    seed: Annotated[int, AtLeast(0), Below(_SEEDS)] = 1234
    resume: Annotated[str, OneOf("auto", "never")] = "auto"
    load: str | None = None
    check_teacher: bool = True
    max_skipped_steps: Annotated[int, AtLeast(1)] = 3
    save_interval: Annotated[int, AtLeast(0)] = 100
    async_save: bool = True
    keep_checkpoints: Annotated[int, AtLeast(1)] = 2
    eval_interval: Annotated[int, AtLeast(0)] = 0
    eval_samples: Annotated[int, AtLeast(0)] = 64
    log_interval: Annotated[int, AtLeast(1)] = 1
    dry_run: bool = False
