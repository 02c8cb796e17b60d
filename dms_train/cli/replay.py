"""Compute the batch of a skipped step again, piece by piece, and say where it is not finite.

    python -m dms_train.cli.replay RUN/skipped/step_00000024.json

Takes the configuration of the run folder and the newest checkpoint before that step, changes
nothing, and prints loss and gradient norm of every microbatch. Under torchrun with the layout of
the run a line is for one microbatch of every data rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.cli import launcher, run_folder
from dms_train.cli.errors import run_main
from dms_train.cli.preparation import Prepared, prepare
from dms_train.cli.session import batch_source, build_engine, datasets
from dms_train.config.build import ConfigError
from dms_train.config.frozen import CONFIG_FILE, read_frozen
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.method.plan import StepPlan
from dms_train.observe import log


class Line(NamedTuple):
    """Loss and gradient norm of consecutive samples."""

    first: int
    last: int
    loss: float
    grad_norm: float


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="skipped/step_*.json of a run folder")
    args = parser.parse_args(arguments)
    return run_main(lambda: _replay(args.file))


def _replay(file: Path) -> None:
    log.configure(launcher.rank())
    described = _read(file)
    prepared = _before(file, int(described["step"]))
    view = groups.start(prepared.config.parallel, prepared.config.run.seed)
    start = run_folder.verified(prepared.config, prepared.start, view)
    for line in _lines(replace(prepared, start=start), view, described):
        if view.rank == 0:
            numbers = f"{line.first}" if line.first == line.last else f"{line.first}-{line.last}"
            sys.stdout.write(
                f"samples {numbers}: loss {line.loss:.6g}, gradient norm {line.grad_norm:.6g}\n"
            )
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
    """The run as it stood before the step."""
    folder = file.resolve().parents[1]
    config = read_frozen(folder / CONFIG_FILE)
    # as written it may be relative to where the run was started
    run = replace(config.run, dir=str(folder), resume="auto")
    prepared = prepare(replace(config, run=run))
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
    first = int(described["samples"][0])
    batches = source.microbatches(first)
    # the interleaved schedule wants as many microbatches as stages
    together = view.pp_size if view.vp_size else 1
    size = prepared.config.data.micro_batch_size * view.dp_size * together
    plan = StepPlan(**described["plan"])
    for number in range(0, len(batches), together):
        loss, norm = engine.gradients(plan, batches[number : number + together])
        start = first + number // together * size
        yield Line(start, start + size - 1, loss, norm)


if __name__ == "__main__":
    sys.exit(main())
