"""Pretrain a teacher, retrofit it, and measure accuracy against the cost of the cache.

    python -m research lab s --seconds 570

makes data of Countdown (`--tasks` makes a mixture), pretrains the teacher
`experiment=lab_teacher_s`, and retrofits it to CR 4, 8, 16 and 32 one after the other. It evaluates
all of them with `dms-eval`, every length with every number of chains. It evaluates the teacher with
cache policies at the token budgets of the retrofitted models, and writes `dms-eval report`. Every
step is a command of this project, in a process of its own; its output goes to FOLDER/logs.

`recall` has a teacher of the same size that learns three tasks of short answers (needles, variables
and equations). It is retrofitted to CR 2, 3 and 4 with DMS and with DMC. `python -m research
lab-ratios FOLDER` prints the table of its methods.

A finished step leaves a mark in FOLDER/state, and the next call skips it. After `--seconds` the
running commands are told to stop. They keep their progress, and the exit code is 3; the same
command continues. SIGTERM stops them too, and they end with the lab.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from dms_train.cli.errors import run_main
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.policies.registry import AUTO, policy_names
from dms_train.observe.processes import end_with_parent
from research.lab.arguments import choice, count, duration, list_of, seed
from research.lab.scales import SCALES, VARIANTS
from research.lab.step import Step, as_text
from research.lab.steps import Settings, check_policies, lines, long_steps, steps
from research.lab.tasks import TASKS

UNFINISHED = 3
_GRACE = 40.0  # seconds that commands have to save and leave; torchrun gives its ranks 30
_POLL = 0.1
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Lab:
    """Runner of steps within a time limit.

    Args:
        root: Folder of marks and logs.
        jobs: Number of concurrent steps, on each GPU if there are any.
        gpus: Name of each GPU in `CUDA_VISIBLE_DEVICES`; none on a CPU.
        seconds: Time until running commands are told to stop; None sets no limit.
    """

    def __init__(
        self, root: Path, jobs: int, gpus: tuple[str, ...] = (), seconds: float | None = None
    ) -> None:
        self._root = root
        cores = os.cpu_count() or 1
        self._threads = 1 if gpus else max(1, cores // jobs)
        self._free = [gpu for _ in range(jobs) for gpu in gpus or (None,)]
        self._end = None if seconds is None else time.monotonic() + seconds
        self._told: int | None = None
        for name in ("logs", "state"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def run(self, steps: list[Step]) -> bool:
        """Run the steps; return False if the time is over before they finish.

        Raises:
            EvaluationError: A command failed, or was finished with other settings.
            SystemExit: `leave` was called.
        """
        waiting, finished = list(steps), set[str]()
        running: dict[str, _Running] = {}
        try:
            while waiting or running:
                if self._told is not None:
                    raise SystemExit(128 + self._told)
                if self._is_over():
                    return False
                self._start(waiting, finished, running)
                time.sleep(_POLL)
                for name in [name for name, each in running.items() if each.ended()]:
                    self._finish(name, running.pop(name))
                    finished.add(name)
        finally:
            _stop(running.values())
        return True

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: `run` stops its commands and raises.

        Nothing is raised here: Python ignores exceptions of a handler while a process starts.
        """
        self._told = number

    def _start(self, waiting: list[Step], finished: set[str], running: dict[str, _Running]) -> None:
        """Start the first steps whose needs have finished, up to the limit of concurrent steps."""
        for step in [step for step in waiting if finished.issuperset(step.needs)]:
            if not self._free:
                return
            waiting.remove(step)
            words = self._missing(step)
            if words is None:
                finished.add(step.name)
                continue
            gpu = max(self._free, key=self._free.count)  # the GPU with the fewest commands
            self._free.remove(gpu)
            log = self._root / "logs" / f"{step.name}.log"
            running[step.name] = _Running(words, log, gpu, step.ranks, self._threads)
            print(f"{step.name}: started", flush=True)

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def _mark(self, name: str) -> Path:
        return self._root / "state" / f"{name}.done"

    def _missing(self, step: Step) -> list[str] | None:
        """Return the command of a step; None if the step has finished."""
        words, mark = step.words(), self._mark(step.name)
        if step.repeats or not mark.is_file():
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
        self._free.append(process.gpu)
        partial = self._mark(name).with_suffix(".partial")
        partial.write_text(as_text(process.words) + "\n", encoding="utf-8")
        partial.replace(self._mark(name))
        print(f"{name}: {process.seconds:.1f} s", flush=True)


class _Running:
    """Running command.

    Args:
        words: Arguments of python.
        log: File of its output.
        gpu: Name of its GPU; None on a CPU.
        ranks: Number of its processes; several processes see all GPUs.
        threads: CPU threads of torch in each process, unless `OMP_NUM_THREADS` is set.
    """

    def __init__(
        self,
        words: list[str],
        log: Path,
        gpu: str | None = None,
        ranks: int = 1,
        threads: int = 1,
    ) -> None:
        self.words, self.gpu, self._log, self._since = words, gpu, log, time.monotonic()
        several = [] if ranks == 1 else [*_TORCHRUN, str(ranks)]
        visible = {} if several else {"CUDA_VISIBLE_DEVICES": gpu or ""}
        # torchrun must be asked, so that it ends its ranks, which are in sessions of their own
        end = partial(end_with_parent, signal.SIGTERM) if several else end_with_parent
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *several, *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **visible},
                preexec_fn=end,
            )

    @property
    def code(self) -> int | None:
        return self._process.returncode

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask_to_leave(self) -> None:
        """Ask the command to save and leave."""
        self._process.terminate()

    def end(self, seconds: float) -> None:
        """Wait for the command, and kill it after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_line(self) -> str:
        told = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return f"{self._log}: {told[-1] if told else 'empty'}"


def _stop(running: Iterable[_Running]) -> None:
    """Ask all commands to save and leave; kill the rest at a common deadline."""
    for each in running:
        each.ask_to_leave()
    deadline = time.monotonic() + _GRACE
    for each in running:
        each.end(max(0.0, deadline - time.monotonic()))


@contextmanager
def sigterm_ends(lab: Lab) -> Iterator[None]:
    """End a lab and its commands on SIGTERM inside the block."""
    before = signal.signal(signal.SIGTERM, lab.leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_steps(
    root: Path, made: list[Step], *, jobs: int, device: str, minutes: float | None
) -> bool:
    """Run steps on one GPU, or on the CPU; return False if the time is over before they finish.

    Raises:
        EvaluationError, SystemExit: As in `Lab.run`.
    """
    gpus = visible_gpus()[:1] if device != "cpu" else ()
    lab = Lab(root, jobs=jobs, gpus=gpus, seconds=None if minutes is None else 60 * minutes)
    with sigterm_ends(lab):
        return lab.run(made)


def _settings(args: argparse.Namespace) -> Settings:
    scale = SCALES[args.scale]
    if args.problems is not None:
        scale = replace(scale, problems=args.problems)
    if args.widths is not None:
        scale = replace(scale, widths=args.widths)
    if args.policies is not None:
        scale = replace(scale, policies=args.policies)
    if twice := set(args.also) & set(scale.methods):
        raise EvaluationError(
            f"--also {','.join(sorted(twice))}: {args.scale} retrofits with it anyway"
        )
    return Settings(
        scale=scale,
        root=args.folder or Path("outputs/lab") / args.scale,
        tasks=args.tasks or scale.tasks,
        seeds=args.seeds,
        also=args.also,
        device=resolve_device(args.device),
        gpus=len(visible_gpus()) if resolve_device(args.device) != "cpu" else 0,
        rows=args.rows,
        workers=args.workers,
    )


def visible_gpus() -> tuple[str, ...]:
    """Return the names in `CUDA_VISIBLE_DEVICES` of the GPUs that this process sees."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return tuple(name.strip() for name in named.split(","))[:count]


def _run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    check_policies(settings.scale)
    gpus = visible_gpus()[: settings.gpus]
    jobs = args.jobs or (settings.scale.jobs if gpus else 1)
    wanted = {settings.root: steps(settings)}
    if args.long:
        wanted[settings.root / "long"] = long_steps(settings)
    labs = {root: Lab(root, jobs, gpus, args.seconds) for root in wanted}
    for root, lab in labs.items():
        with sigterm_ends(lab):
            finished = lab.run(wanted[root])
        if not finished:
            print("the time is over; the same command continues", flush=True)
            return UNFINISHED
    for line in (line for root in labs for line in lines(root)):
        print(line)
    print(settings.root / "report.html")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sizes = "s, m, l: of the teacher; recall: short answers with DMS and DMC; toy: on a CPU"
    add("scale", choices=SCALES, help=sizes)
    add("--folder", type=Path, help="default outputs/lab/SCALE")
    add("--seconds", type=duration, help="stop then; the same command continues")
    add(
        "--tasks",
        type=list_of(choice(TASKS)),
        help=f"of the teacher, instead of those of the scale: {','.join(TASKS)}",
    )
    policies = tuple(name for name in policy_names() if name != AUTO)
    add("--seeds", type=list_of(seed), default=(1234,), help="of the retrofits (1234)")
    variants = list_of(choice(VARIANTS))
    add("--also", type=variants, default=(), help=f"of the first seed: {','.join(VARIANTS)}")
    add("--long", action="store_true", help="then 4 times the context, in FOLDER/long")
    add("--problems", type=count, help="of every evaluation")
    add("--widths", type=list_of(count), help="chains of a problem, such as 1,2,4")
    add(
        "--policies",
        type=list_of(choice(policies)),
        help="that the teacher is evaluated with, such as tova,quest",
    )
    kinds = ("auto", "cpu", "cuda")
    add("--device", choices=kinds, default="auto", help="auto takes all visible GPUs")
    add("--rows", type=count, default=256, help="chains in the cache together (%(default)s)")
    add(
        "--jobs",
        type=count,
        help="commands on each GPU (4, for l 2), or on the CPU (1)",
    )
    add("--workers", type=count, default=os.cpu_count() or 1, help="that make data (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 with one line, or 3 if the time is over."""
    return run_main(lambda: _run(_parser().parse_args(arguments)))
