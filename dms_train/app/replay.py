"""Recomputation of a skipped step, one microbatch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.app import run_folder
from dms_train.app.channel_choice import choose_channel
from dms_train.app.engine import build_engine
from dms_train.app.preparation import Prepared, prepare
from dms_train.app.samples import batch_source, datasets
from dms_train.config.build import ConfigError
from dms_train.config.frozen import CONFIG_FILE, read_frozen
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.method.plan import StepPlan


class Line(NamedTuple):
    """Loss and gradient norm of consecutive samples."""

    first: int
    last: int
    loss: float
    grad_norm: float


def replay(file: Path) -> Iterator[Line]:
    """Return the loss and gradient norm of every microbatch of a skipped step.

    All ranks of the run's layout must call and exhaust it; each gets the same lines.

    Args:
        file: `skipped/step_*.json` of a run folder.

    Raises:
        ConfigError: The file is not a record of a skipped step, or no earlier checkpoint is left.
    """
    described = _read(file)
    prepared = _before(file, int(described["step"]))
    view = groups.start(prepared.config.parallel, prepared.config.run.seed)
    start = run_folder.verified(prepared.config, prepared.start, view)
    yield from _lines(replace(prepared, start=start), view, described)
    groups.stop()


def _read(file: Path) -> dict[str, Any]:
    try:
        described = json.loads(file.read_text())
        return {
            "step": described["step"],
            "samples": described["samples"],
            "plan": described["plan"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not the record of a skipped step; name another file") from error


def _before(file: Path, step: int) -> Prepared:
    """Return the run at the newest checkpoint before the step."""
    folder = file.resolve().parents[1]
    config = read_frozen(folder / CONFIG_FILE)
    # the recorded path may be relative to the folder where the run was started
    run = replace(config.run, dir=str(folder), resume="auto")
    # without CUDA graphs every microbatch is computed in the same way, on any machine
    parallel = replace(config.parallel, cuda_graph="never")
    prepared = prepare(replace(config, run=run, parallel=parallel))
    if not prepared.start.resumes:
        return prepared
    start = run_folder.resume_point(prepared.config, prepared.start, before=f"step_{step:08d}")
    if start is None:
        raise ConfigError(f"{file}: no checkpoint before step {step} is left to compute with")
    return replace(prepared, start=start)


def _lines(prepared: Prepared, view: ParallelView, described: dict[str, Any]) -> Iterator[Line]:
    engine = build_engine(prepared, view)
    train, _ = datasets(prepared, view)
    source = batch_source(prepared.config, view, train)
    choose_channel(prepared, view, engine, source)
    first = int(described["samples"][0])
    batches = source.microbatches(first)
    # the interleaved schedule needs as many microbatches as stages
    together = view.pp_size if view.vp_size else 1
    size = prepared.config.data.micro_batch_size * view.dp_size * together
    plan = StepPlan.from_dict(described["plan"])
    for number in range(0, len(batches), together):
        loss, norm = engine.gradients(plan, batches[number : number + together])
        start = first + number // together * size
        yield Line(start, start + size - 1, loss, norm)
