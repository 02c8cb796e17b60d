"""Faults in a real run of four ranks (TP 2 x PP 2, CPU), and their effect on its loss curve.

    python -m tests.faults.campaign OUT --kills 20 --in-save 6 --seed 1

Every scenario is a run of 60 steps through both training stages and the exports; `--stage-steps`
shortens the one with kills. What is done is kept in OUT, so that a campaign which was stopped
continues; the table is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tests.faults.faulty_ranks import Prepare, hang_rank_2, inject_nan, train
from tests.support import metrics_file, refusals
from tests.support.disks import CannotArrange, small_disk
from tests.support.ranks import Ranks

WORLD, STAGE_STEPS, STOP = 4, 20, 30
STAGES = 3  # zero_neuron, and retrofit to 2 and to 3
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
BAR = 1e-5
_PATIENCE = 400.0  # seconds that one start may take on a busy machine


def log(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Inputs:
    """A random teacher and exam sheets, made once."""

    folder: Path
    lr: float
    stage_steps: int

    @cached_property
    def words(self) -> list[str]:
        """The run without its folder and layout."""
        data, model = self.folder / "data", self.folder / "model"
        if not model.exists():
            made = refusals.run_here(["data", "exam-sheets", "--out", str(data), "--sheets", "60"])
            assert made.code == 0, made.stderr
            refusals.write_model(model, data / "tokenizer")
        return [
            f"model.path={model}",
            f"data.paths=[{data / 'train'}]",
            f"data.cache_dir={self.folder / 'cache'}",
            "data.seq_length=32",
            "data.micro_batch_size=1",
            "data.global_batch_size=4",
            "method.window=4",
            f"optim.lr={self.lr}",
            f"stage.zero_neuron.steps={self.stage_steps}",
            "stage.retrofit.target_cr=3",
            f"stage.retrofit.steps_per_cr={self.stage_steps}",
            "run.save_interval=3",
            "run.check_teacher=false",  # random weights
            "run.eval_samples=4",
            "observe=quiet",
            "observe.progress=false",
        ]


@dataclass(frozen=True)
class Run:
    """One run folder and the command that fills it."""

    inputs: Inputs
    folder: Path

    def start(self, prepare: Prepare | None = None, **layout: float) -> Ranks:
        words = [f"parallel.{name}={size}" for name, size in (layout or LAYOUT).items()]
        words = [*self.inputs.words, *words, f"run.dir={self.folder}"]
        log = self.folder.with_suffix(".log")
        return Ranks.start(train, WORLD, prepare, *words, log=log)

    def finish(self, prepare: Prepare | None = None, **layout: float) -> None:
        """Start, and expect the run to come to its end."""
        ranks = self.start(prepare, **layout)
        ended = ranks.wait(_PATIENCE)
        ranks.clear()
        assert ended, f"{self.folder}: still running"
        assert set(ranks.codes.values()) == {0}, self.log(0)[-3000:]
        assert (self.folder / "state" / "DONE").is_file()

    def stop_at(self, step: int) -> None:
        """Start, and signal one rank to stop after some step."""
        ranks = self.start()
        while self.step() < step:
            assert ranks.running(), self.log(0)[-3000:]
            time.sleep(0.01)
        ranks.signal(2, signal.SIGUSR1)
        assert ranks.wait(_PATIENCE)
        assert set(ranks.codes.values()) == {0}, self.log(0)[-3000:]

    def rows(self) -> list[dict[str, Any]]:
        return metrics_file.rows(self.folder)

    def losses(self) -> dict[int, float]:
        return metrics_file.losses(self.folder)

    def step(self) -> int:
        return max((row["step"] for row in self.rows() if "train/lr" in row), default=0)

    def log(self, rank: int) -> str:
        return self.folder.with_suffix(f".{rank}.err").read_text()

    def checkpoints(self) -> list[Path]:
        found = (self.folder / "checkpoints").glob("step_????????")
        return sorted(path for path in found if (path / "run_state.json").is_file())

    def partial(self) -> list[Path]:
        """Return checkpoints that are being written, without those that are being deleted."""
        found = (self.folder / "checkpoints").glob("step_*.partial")
        return [
            path for path in found if not path.name.endswith((".removed.partial", ".old.partial"))
        ]

    def drop_state_of(self, step: int) -> None:
        """Remove what an earlier start left behind `step`, so that what is seen is of the next."""
        for folder in self.partial():
            shutil.rmtree(folder)
        file = self.folder / "metrics.jsonl"
        kept = [row for row in self.rows() if row["step"] <= step]
        if file.is_file():
            file.write_text("".join(f"{json.dumps(row)}\n" for row in kept))

    def copy_to(self, folder: Path) -> Run:
        """The same run in another folder, to be damaged."""
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(self.folder, folder, symlinks=True)
        return Run(self.inputs, folder)


def difference(run: Run, reference: dict[int, float]) -> float:
    """Largest relative difference of the loss at any step; all steps must be there."""
    losses = run.losses()
    assert losses.keys() == reference.keys(), sorted(reference.keys() - losses.keys())
    return max(abs(losses[step] - value) / abs(value) for step, value in reference.items())


@dataclass(frozen=True)
class Campaign:
    """A folder of runs; `results.json` says which scenarios are done."""

    out: Path
    kills: int
    in_save: int
    seed: int
    lr: float
    stage_steps: int

    @property
    def steps(self) -> int:
        return STAGES * self.stage_steps

    @cached_property
    def inputs(self) -> Inputs:
        folder = self.out / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        return Inputs(folder, self.lr, self.stage_steps)

    @cached_property
    def reference(self) -> dict[int, float]:
        """Losses of the undisturbed run."""
        run = Run(self.inputs, self.out / "reference")
        if not (run.folder / "state" / "DONE").is_file():
            shutil.rmtree(run.folder, ignore_errors=True)
            run.finish()
        losses = run.losses()
        assert sorted(losses) == list(range(1, self.steps + 1))
        assert len(set(losses.values())) == self.steps
        return losses

    @cached_property
    def half(self) -> Run:
        """A run that was stopped in the middle."""
        run = Run(self.inputs, self.out / "half")
        if not (run.folder / "state" / "STOPPED").is_file():
            shutil.rmtree(run.folder, ignore_errors=True)
            run.stop_at(STOP)
        return run

    def result(self, name: str, scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a scenario, from this call or an earlier one."""
        file = self.out / "results.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        if name not in known:
            begin = time.monotonic()
            known[name] = {**scenario(), "seconds": round(time.monotonic() - begin, 1)}
            file.write_text(json.dumps(known, indent=1) + "\n")
            log(f"{name}: {json.dumps(known[name])}")
        return known[name]  # type: ignore[no-any-return]

    def killed(self) -> dict[str, Any]:
        """Random ranks, killed at random moments spread over the run."""
        run, journal = Run(self.inputs, self.out / "killed"), self.out / "kills.jsonl"
        done = journal.read_text().splitlines() if journal.is_file() else []
        for number in range(len(done), self.kills):
            entry = self._kill(run, number)
            with journal.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            log(f"kill {number + 1}: {json.dumps(entry)}")
        run.finish()
        entries = [json.loads(line) for line in journal.read_text().splitlines()]
        return {
            "faults": sum(entry["killed"] for entry in entries),
            "during_a_save": sum(entry["killed"] and entry["left_partial"] for entry in entries),
            "seed": self.seed,
            "ranks": sorted({entry["rank"] for entry in entries}),
            "steps_taken_again": sum(entry["step"] - entry["newest"] for entry in entries),
            "difference": difference(run, self.reference),
        }

    def _kill(self, run: Run, number: int) -> dict[str, Any]:
        """One start of the run that ends with a kill."""
        draw = random.Random(f"{self.seed}-{number}")
        rank = draw.randrange(WORLD)
        within = number % max(1, self.kills // max(1, self.in_save)) == 0
        resumed = max((int(path.name[5:]) for path in run.checkpoints()), default=0)
        run.drop_state_of(resumed)
        # moments spread over the run, and always before its end
        moment = round((number + draw.random()) * self.steps / self.kills)
        aim = min(self.steps - 2, max(resumed, moment))
        delay = draw.random() * (0.05 if within else 0.5)
        ranks = run.start()
        end = time.monotonic() + _PATIENCE
        while run.step() < aim or (within and not run.partial()):
            if not ranks.running() or time.monotonic() > end:
                raise AssertionError(run.log(0)[-3000:])
            time.sleep(0.003)
        time.sleep(delay)
        ranks.signal(rank, signal.SIGKILL)
        left = bool(run.partial())
        ranks.wait(0.3)
        ranks.clear()
        return {
            "rank": rank,
            "step": run.step(),
            "resumed_from": resumed,
            "newest": max((int(path.name[5:]) for path in run.checkpoints()), default=0),
            "aimed_at_a_save": within,
            "killed": ranks.codes.get(rank) == -signal.SIGKILL,
            "left_partial": left and bool(run.partial()),
        }

    def damaged(self, how: str, damage: Callable[[Path], None]) -> dict[str, Any]:
        """The newest checkpoint's largest file is damaged, then the run continues."""
        run = self.half.copy_to(self.out / how)
        newest = run.checkpoints()[-1]
        damage(max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size))
        run.finish()
        warned = f"skipped: checkpoint {newest}" in run.log(0)
        return {"faults": 1, "warned": warned, "difference": difference(run, self.reference)}

    def layout(self, name: str, **sizes: int) -> dict[str, Any]:
        """The second half in another layout."""
        run = self.half.copy_to(self.out / name)
        run.finish(**sizes)
        return {"faults": 1, "difference": difference(run, self.reference)}

    def disk(self) -> dict[str, Any]:
        """No room for a second checkpoint until shortly before the end of a stage."""
        run = Run(self.inputs, self.out / "disk")
        shutil.rmtree(run.folder, ignore_errors=True)
        size = sum(file.stat().st_size for file in self.half.checkpoints()[-1].iterdir())
        run.folder.mkdir()
        place = run.folder / "checkpoints"
        with small_disk(place, int(1.5 * size / 1024) + 64):
            ranks = run.start()
            while run.step() < 16:
                assert ranks.running(), run.log(0)[-3000:]
                time.sleep(0.01)
            kept = [path.name for path in run.checkpoints()]
            workspace = ["mount", "-o", "remount,size=64m", str(place)]
            subprocess.run(workspace, check=True)
            assert ranks.wait(_PATIENCE), run.log(0)[-3000:]
            failures = [row.get("train/failed_checkpoints", 0) for row in run.rows()]
            return {
                "faults": max(failures),
                "kept": kept,
                "finished": set(ranks.codes.values()) == {0},
                "difference": difference(run, self.reference),
            }

    def standing(self) -> dict[str, Any]:
        """Rank 2 waits for a disk that does not answer; the run ends and is resumed."""
        step, short = 33, {**LAYOUT, "distributed_timeout_minutes": 0.2}
        run = Run(self.inputs, self.out / "standing")
        shutil.rmtree(run.folder, ignore_errors=True)
        ranks = run.start(partial(hang_rank_2, 4 * step), **short)
        end = time.monotonic() + _PATIENCE
        while ranks.running() and time.monotonic() < end:
            time.sleep(0.05)
        ranks.clear()
        found = re.search(r"(rank \d) \(\S+, (after step \d+)\) has stalled", run.log(1))
        run.finish(**short)
        return {
            "faults": 1,
            "named": found and ", ".join(found.groups()),
            "difference": difference(run, self.reference),
        }

    def not_finite(self) -> dict[str, Any]:
        """Rank 3 computes NaN gradients in two steps; a second run is killed between them."""
        bad = (24, 31)
        whole, cut = Run(self.inputs, self.out / "nan"), Run(self.inputs, self.out / "nan_killed")
        for run in (whole, cut):
            shutil.rmtree(run.folder, ignore_errors=True)
        whole.finish(partial(inject_nan, steps=bad))
        ranks = cut.start(partial(inject_nan, steps=bad))
        while cut.step() < 28:
            assert ranks.running(), cut.log(0)[-3000:]
            time.sleep(0.01)
        ranks.signal(1, signal.SIGKILL)
        ranks.clear()
        cut.finish(partial(inject_nan, steps=bad))
        skipped = [
            row["step"] for row in whole.rows() if "train/lr" in row and "train/loss" not in row
        ]
        before = {step: loss for step, loss in self.reference.items() if step < bad[0]}
        assert difference(whole, {**whole.losses(), **before}) == 0  # the same until then
        return {
            "faults": len(skipped),
            "skipped": skipped,
            "difference": difference(cut, whole.losses()),
        }


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def scenarios(campaign: Campaign) -> dict[str, Callable[[], dict[str, Any]]]:
    """All of them, by what the table calls them."""
    return {
        "ranks killed": campaign.killed,
        "newest checkpoint cut off": lambda: campaign.damaged("cut", truncate),
        "newest checkpoint, one bit flipped": lambda: campaign.damaged("flipped", flip),
        "disk full for 15 steps": campaign.disk,
        "NaN gradients on one rank, and a kill": campaign.not_finite,
        "a rank whose disk does not answer": campaign.standing,
        "resumed as TP 2 x DP 2": lambda: campaign.layout("tp2", tensor_model_parallel_size=2),
        "resumed as PP 2 x DP 2": lambda: campaign.layout("pp2", pipeline_model_parallel_size=2),
        "resumed as DP 4": lambda: campaign.layout("dp4", tensor_model_parallel_size=1),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table that docs/guides/reliability.md quotes."""
    lines = ["| fault | faults | largest relative difference of the loss | |", "|---|---|---|---|"]
    for name, result in results.items():
        if "refused" in result:
            lines.append(f"| {name} | - | - | {result['refused']} |")
            continue
        rest = {k: v for k, v in result.items() if k not in ("faults", "difference", "seconds")}
        notes = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in rest.items())
        lines.append(f"| {name} | {result['faults']} | {result['difference']:.1e} | {notes} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Run what is not done yet and print the table; return 1 if a difference exceeds the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-save", type=int, default=6, help="kills aimed at a save")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--stage-steps", type=int, default=STAGE_STEPS, help="for `ranks killed`")
    parser.add_argument("--only", help="one scenario")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    campaign = Campaign(
        args.out.absolute(), args.kills, args.in_save, args.seed, args.lr, args.stage_steps
    )
    chosen = {n: s for n, s in scenarios(campaign).items() if args.only in (None, n)}
    results = {}
    for name, scenario in chosen.items():
        try:
            results[name] = campaign.result(name, scenario)
        except CannotArrange as reason:
            results[name] = {"refused": str(reason)}
    log(table(results))
    bars = [result.get("difference", 0.0) <= BAR for result in results.values()]
    return 0 if all(bars) else 1


if __name__ == "__main__":
    sys.exit(main())
