"""The lab: a teacher from nothing, its retrofits, and accuracy against the cost of the cache.

    python -m benchmarks.lab s --seconds 570

makes Countdown data, pretrains the teacher `experiment=lab_teacher_s`, retrofits it to CR 4, 8 and
16 one after the other, evaluates all of them with `dms-eval` (every length with every number of
chains), evaluates the teacher with cache policies that get as many tokens as the retrofitted
models hold, and writes `dms-eval report`. Every step is a command of this project, in a process of
its own; its output goes to FOLDER/logs.

A finished step leaves a mark in FOLDER/state and is skipped by the next call. When `--seconds` are
over, the running commands are told to stop, which keeps what they have done, and the exit code is
3: the same command continues.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.lab.scales import SCALES
from benchmarks.lab.steps import VARIANTS, Settings, Step, as_text, lines, phases
from dms_train.cli.errors import run_main
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError

UNFINISHED = 3
_GRACE = 25.0  # seconds that a command has to save and leave
_POLL = 0.1


class Lab:
    """Runs steps within a time limit.

    Args:
        root: Where marks and logs go.
        jobs: Steps of a phase at the same time.
        seconds: Until running commands are told to stop; None sets no limit.
    """

    def __init__(self, root: Path, jobs: int, seconds: float | None) -> None:
        self._root, self._jobs = root, jobs
        self._end = None if seconds is None else time.monotonic() + seconds
        for name in ("logs", "state"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def run(self, steps: list[Step]) -> bool:
        """Finish the steps of a phase; false when the time is over before.

        Raises:
            EvaluationError: A command failed, or was finished with other settings.
        """
        waiting = [(step, words) for step in steps if (words := self._missing(step)) is not None]
        running: dict[str, _Running] = {}
        try:
            while waiting or running:
                if self._is_over():
                    return False
                while waiting and len(running) < self._jobs:
                    step, words = waiting.pop(0)
                    running[step.name] = _Running(words, self._root / "logs" / f"{step.name}.log")
                    print(f"{step.name}: started", flush=True)
                time.sleep(_POLL)
                for name in [name for name, each in running.items() if each.ended()]:
                    self._finish(name, running.pop(name))
        finally:
            for each in running.values():
                each.stop()
        return True

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def _mark(self, name: str) -> Path:
        return self._root / "state" / f"{name}.done"

    def _missing(self, step: Step) -> list[str] | None:
        """The command of a step; None when it has finished."""
        words, mark = step.words(), self._mark(step.name)
        if not mark.is_file():
            return words
        if mark.read_text("utf-8").strip() != as_text(words):
            raise EvaluationError(
                f"{mark}: {step.name} was finished with other settings; take another --folder, "
                "or delete this file to run the step again"
            )
        return None

    def _finish(self, name: str, process: _Running) -> None:
        if process.code != 0:
            raise EvaluationError(f"{name}: exit code {process.code}; {process.last_line()}")
        partial = self._mark(name).with_suffix(".partial")
        partial.write_text(as_text(process.words) + "\n", encoding="utf-8")
        partial.replace(self._mark(name))
        print(f"{name}: {process.seconds:.1f} s", flush=True)


class _Running:
    """A command that was started."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.words, self._log, self._since = words, log, time.monotonic()
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *words], stdout=stream, stderr=subprocess.STDOUT
            )

    @property
    def code(self) -> int | None:
        return self._process.returncode

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ask it to save and leave, and end it when it does not."""
        self._process.terminate()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_line(self) -> str:
        told = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return f"{self._log}: {told[-1] if told else 'empty'}"


def _settings(args: argparse.Namespace) -> Settings:
    scale = SCALES[args.scale]
    if args.problems is not None:
        scale = replace(scale, problems=args.problems)
    if args.widths is not None:
        scale = replace(scale, widths=args.widths)
    if args.policies is not None:
        scale = replace(scale, policies=args.policies)
    return Settings(
        scale=scale,
        root=args.folder or Path("outputs/lab") / args.scale,
        seeds=args.seeds,
        also=args.also,
        device=resolve_device(args.device),
        rows=args.rows,
        workers=args.workers,
    )


def _run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    on_gpu = settings.device != "cpu"
    lab = Lab(settings.root, args.jobs or (4 if on_gpu else 1), args.seconds)
    for steps in phases(settings):
        if not lab.run(steps):
            print("the time is over; the same command continues", flush=True)
            return UNFINISHED
    for line in lines(settings):
        print(line)
    print(settings.root / "report.html")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _variants(text: str) -> tuple[str, ...]:
    for name in _names(text):
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(VARIANTS)}")
    return _names(text)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 2 with one line, or 3 when the time was over."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("scale", choices=SCALES, help="of the teacher; toy runs on a CPU and learns nothing")
    add("--folder", type=Path, help="default outputs/lab/SCALE")
    add("--seconds", type=float, help="stop then; the same command continues")
    add("--seeds", type=_numbers, default=(1234,), help="of the retrofits (1234)")
    add("--also", type=_variants, default=(), help=f"more retrofits: {','.join(VARIANTS)}")
    add("--problems", type=int, help="of every evaluation")
    add("--widths", type=_numbers, help="chains of a problem, such as 1,2,4")
    add("--policies", type=_names, help="that the teacher is evaluated with, such as tova,quest")
    add("--device", default="auto", help="of the evaluations: auto, cpu or cuda")
    add("--rows", type=int, default=256, help="chains in the cache together (%(default)s)")
    add("--jobs", type=int, help="evaluations at the same time (4 on a GPU, 1 on a CPU)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="that make data (%(default)s)")
    return run_main(lambda: _run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
