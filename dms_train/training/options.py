"""What the run does and when: the stages, their lengths, and the run folder."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("pretrain", "zero_neuron", "retrofit", "hold", "export", "validate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainOptions:
    """Plain language-model training from scratch; cosine learning rate to `min_lr_ratio`."""

    steps: int
    lr: float | None = None
    min_lr_ratio: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroNeuronOptions:
    """Ramp the borrowed query neuron to zero over `steps` (the paper's n_t).

    With `resets_lane` its weights are zeroed when the lane is handed over, so that every decision
    starts at -offset; without, training starts from decisions of weights made for another purpose.
    """

    steps: int
    resets_lane: bool = True
    loss: str = "distill"
    lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitOptions:
    """Anneal the compression ratio by one unit per `steps_per_cr` steps up to `target_cr`.

    The annealing starts from `start_cr`; None is the ratio of the student that `run.load` names,
    and 1 for the original model.
    """

    target_cr: float
    steps_per_cr: int
    start_cr: float | None = None
    loss: str = "distill"
    lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """Fixed compression ratio, cosine learning rate to `min_lr_ratio`."""

    steps: int
    loss: str = "distill"
    lr: float | None = None
    min_lr_ratio: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What an export writes.

    Attributes:
        format: `dms` (ours), `nvidia` or `fastdms`; None follows the method's preset.
        dtype: `fp32` or `bf16`; None is bf16 for the interop formats and the training precision
            for ours.
        every_integer_cr: Also export whenever the annealed ratio passes an integer.
        paged_attention_block_size: Page size an `nvidia` export asks its consumer for.
    """

    format: str | None = None
    dtype: str | None = None
    every_integer_cr: bool = True
    paged_attention_block_size: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The stages to run, in order, and one block of settings for each."""

    run: tuple[str, ...]
    pretrain: PretrainOptions
    zero_neuron: ZeroNeuronOptions
    retrofit: RetrofitOptions
    hold: HoldOptions
    export: ExportOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The run folder and what happens around the steps.

    Attributes:
        dir: Run folder: resolved config, metrics, checkpoints, exports.
        seed: Data order and relaxation noise.
        resume: `auto` continues from the newest valid checkpoint in `dir`, `never` refuses a
            folder that already holds one.
        load: Megatron checkpoint whose weights the student starts from, instead of the model's.
        max_skipped_steps: Stop after this many steps in a row whose loss or gradient is not finite.
        save_interval: Steps between checkpoints; 0 saves at the ends of stages only.
        async_save: Write them in the background while training goes on; off, training waits.
        keep_checkpoints: Newest checkpoints to keep; those of integer ratios and stage ends stay.
        eval_interval: Steps between evaluations; 0 evaluates at the ends of stages only.
        eval_samples: Validation samples per evaluation; 0 evaluates nothing.
        log_interval: Steps between metric rows.
        dry_run: Print the plan and stop before any process group is made.
    """

    dir: str
    seed: int = 1234
    resume: str = "auto"
    load: str | None = None
    max_skipped_steps: int = 3
    save_interval: int = 100
    async_save: bool = True
    keep_checkpoints: int = 2
    eval_interval: int = 0
    eval_samples: int = 64
    log_interval: int = 1
    dry_run: bool = False
