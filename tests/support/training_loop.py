"""The training loop on components that record their calls, and runs of it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import NoProgress
from dms_train.training import loop
from dms_train.training.loop import TrainerComponents
from dms_train.training.options import (
    ExportOptions,
    HoldOptions,
    PretrainOptions,
    RetrofitOptions,
    RunOptions,
    StageOptions,
    ZeroNeuronOptions,
)
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.stages import build_stages
from dms_train.training.state import TrainState

BATCH = 16
RESULT = StepResult(
    loss=1.0,
    terms={"kl": 0.75},
    aux_loss=0.25,
    alpha=0.5,
    cr_factor=1.5,
    kv_reads=10.0,
    memory_bytes=2.0**31,
    kept=((0.5, 1.0),),
    kept_layers=(3,),
)
SKIPPED = replace(RESULT, loss=math.nan, terms={"kl": math.nan}, grad_norm=math.nan, skipped=True)


def _measured(plan: StepPlan) -> StepResult:
    """`RESULT` with the terms of the plan's loss."""
    return replace(RESULT, terms=dict.fromkeys(plan.token_loss.terms, 0.75))


ALL = ("pretrain", "zero_neuron", "retrofit", "hold", "export")
# pretrain 2, zero_neuron 3, retrofit (4 - 1) * 2 = 6, hold 3
OPTIONS = StageOptions(
    run=ALL,
    pretrain=PretrainOptions(steps=2, lr=1e-4),
    zero_neuron=ZeroNeuronOptions(steps=3, lr=5e-5),
    retrofit=RetrofitOptions(target_cr=4.0, steps_per_cr=2, lr=1e-4),
    hold=HoldOptions(steps=3, lr=1e-4),
    export=ExportOptions(),
)
STEPS = 14


class Interrupted(Exception):
    """The process was interrupted."""


class FakeParts:
    """Engine, data source, exporter, validator, watch and sink that record their calls."""

    def __init__(self, fails_at: int | str | None = None, stops_at: int | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.ahead: list[int] = []  # first samples of what was read ahead
        self.skips: set[int] = set()  # steps, counted from 0, that are not finite
        self.stops_at = stops_at  # the step after which a stop is requested
        self.fails_at = fails_at  # a step, the name of an export or "validate"

    def end_training(self) -> None:
        self.events.append(("end_training",))

    def begin_stage(self, rate: LearningRate) -> None:
        self.events.append(("begin", rate))

    def train_step(
        self, plan: StepPlan, batches: list[Any], meanwhile: Callable[[], None]
    ) -> StepResult:
        self._maybe_fail(plan.step)
        self.events.append(("train", plan, batches))
        meanwhile()
        return SKIPPED if plan.step in self.skips else _measured(plan)

    def evaluate(self, plan: StepPlan, batches: list[Any]) -> StepResult:
        self.events.append(("evaluate", plan, batches))
        result = _measured(plan)
        return replace(result, terms={name: self.kl(plan) for name in result.terms})

    def kl(self, plan: StepPlan) -> float:
        """Return the token loss of an evaluation."""
        return RESULT.terms["kl"]

    def reset_eviction_channel(self) -> None:
        self.events.append(("reset_channel",))

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "run_state.json").write_text(json.dumps(state))
        self.events.append(("save", path.name, state["permanent"]))

    def save_weights(self, path: Path, state: dict[str, Any]) -> None:
        self.events.append(("weights", path.name, state["step"], state["eviction_enabled"]))

    def load(self, path: Path, *, with_optimizer: bool) -> dict[str, Any]:
        assert with_optimizer
        self.events.append(("load", path.name))
        return json.loads((path / "run_state.json").read_text())

    def finish_save(self, *, wait: bool) -> Path | None:
        return None

    def annotate(self, path: Path, state: dict[str, Any]) -> None:
        file = path / "run_state.json"
        if path.is_dir():
            file.write_text(json.dumps({**json.loads(file.read_text()), **state}))

    def read_ahead(self, first_sample: int) -> None:
        self.ahead.append(first_sample)

    def microbatches(self, first_sample: int) -> list[Any]:
        return [first_sample]

    def export(self, name: str, state: dict[str, Any]) -> Path:
        self._maybe_fail(name)
        self.events.append(("export", name, state["step"], state["target_cr"]))
        return Path(name)

    def alias(self, name: str, target: str) -> None:
        self._maybe_fail(name)
        self.events.append(("alias", name, target))

    def validate(self) -> dict[str, float]:
        self._maybe_fail("validate")
        self.events.append(("validate",))
        return {"cr_factor": 2.5}

    def store(self, watch: Any) -> bool:
        self.events.append(("store",))
        return self.stops_at is None

    def evaluate_tasks(self) -> dict[str, float]:
        self._maybe_fail("tasks")
        self.events.append(("tasks",))
        return {"exam_sheets.0.25-1-4.accuracy": 0.5}

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def beat(self, step: int) -> None:
        self.events.append(("beat", step))

    def must_stop(self) -> bool:
        return self.stops_at is not None and len(self.of("train")) >= self.stops_at

    def stopped(self, step: int) -> None:
        self.events.append(("stopped", step))

    def done(self, stage: str, step: int) -> None:
        self.events.append(("done", stage, step))

    def _maybe_fail(self, where: int | str) -> None:
        if where == self.fails_at:
            raise Interrupted

    def log(self, step: int, values: dict[str, float]) -> None:
        self.events.append(("log", step, values))

    def summary(self, values: dict[str, float]) -> None:
        self.events.append(("summary", values))

    def close(self) -> None:
        self.events.append(("close",))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.of("train")]


def components(fakes: FakeParts, folder: Path, **options: Any) -> TrainerComponents:
    """The components of a loop; options are those of `RunOptions`, and of `TrainerComponents`."""
    every = options.pop("every_integer_cr", True)
    evaluates = options.pop("evaluates", True)
    is_main_rank = options.pop("is_main_rank", True)
    defaults = {"dir": str(folder), "save_interval": 0, "keep_checkpoints": 2}
    reporter = Reporter(
        sinks=[fakes],
        progress=NoProgress(),
        tokens_per_step=128,
        log_interval=options.get("log_interval", 1),
        throughput=Throughput(),
        means=Means(),
        compute=Compute(forward_flops=10.0, student_flops=30.0, devices=2),
    )
    run_options = RunOptions(**{**defaults, **options})
    return TrainerComponents(
        engine=fakes,
        source=fakes,
        exporter=fakes,
        validator=fakes,
        evaluator=fakes,
        teacher_pass=fakes,
        reporter=reporter,
        watch=fakes,
        saver=Saver(
            engine=fakes,
            reporter=reporter,
            options=run_options,
            folder=folder / "checkpoints",
            is_main_rank=is_main_rank,
            provenance={"architecture": {"family": "llama"}},
        ),
        skips=SkipRecord(
            folder=folder / "skipped",
            max_consecutive=run_options.max_skipped_steps,
            is_main_rank=is_main_rank,
        ),
        options=run_options,
        global_batch_size=BATCH,
        eval_batches=["valid"] if evaluates else [],
        every_integer_cr=every,
    )


def run(
    folder: Path,
    stages: StageOptions = OPTIONS,
    state: TrainState | None = None,
    fails_at: int | str | None = None,
    stops_at: int | None = None,
    skips: set[int] | None = None,
    fakes: FakeParts | None = None,
    **options: Any,
) -> FakeParts:
    """Run stages; the recorded calls end with `interrupted` if the run failed at `fails_at`."""
    fakes = fakes or FakeParts(fails_at, stops_at)
    fakes.skips = skips or set()
    built = build_stages(stages, 0)
    try:
        loop.run(built, state or TrainState(), components(fakes, folder, **options))
    except Interrupted:
        fakes.events.append(("interrupted",))
    return fakes


def only(*names: str, **changes: Any) -> StageOptions:
    """`OPTIONS` with these stages."""
    return replace(OPTIONS, run=names, **changes)


def timeline(fakes: FakeParts) -> list[tuple[Any, ...]]:
    """Events that change weights or write exports, without saves and progress."""
    kinds = {"train", "evaluate", "reset_channel", "export", "alias", "validate", "tasks"}
    return [event for event in fakes.events if event[0] in kinds]


def restored(folder: Path, step: int) -> TrainState:
    """The position in the checkpoint after a step."""
    text = (folder / "checkpoints" / f"step_{step:08d}" / "run_state.json").read_text()
    return TrainState.from_dict(json.loads(text))
