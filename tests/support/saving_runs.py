"""Runs of `saving_cases` and what they have to show, on any device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support import launch
from tests.support import saving_cases as worker
from tests.support.ranks import Ranks, run_ranks

_PATIENCE = 120.0
# Products on a GPU are the same from run to run with this setting of its library.
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(what: str, processes: int, cases: list[dict[str, Any]], out: Path) -> None:
    """All cases in one launch."""
    launch.checked(run_ranks(worker.work, processes, what, cases, out, timeout=500, **_REPEATABLE))


def read(out: Path, case: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """One outcome for each rank."""
    return json.loads((out / case["name"] / f"{what}.json").read_text())


def assert_checkpoints_are_of_their_step(outcomes: list[dict[str, Any]]) -> None:
    """A checkpoint written during later steps is the one of its own step, and continues the run."""
    for found in outcomes:
        rows = found["rows"]
        assert len({row["loss"] for row in rows}) == worker.STEPS
        assert all(0.02 < row["alpha"] < 0.98 for row in rows)
        assert found["moved"] > 0.8 * found["tensors"]  # what a late copy would show
        assert found["connections"] == []
        for name in ("waited", "background"):
            assert found[f"{name}: not as saved"] == []
            assert found[f"{name}: rows"] == rows[worker.HALF :]
            assert found[f"{name}: not as continued"] == []
    assert sum(found["writers"] for found in outcomes) > 0


def largest_difference(found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """Return the largest relative difference of the loss at a step."""
    return max(
        abs(mine["loss"] - other["loss"]) / abs(other["loss"])
        for mine, other in zip(found, expected, strict=True)
    )


def _gone(pid: int) -> bool:
    try:
        return worker.status(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait(what: str, done: Any, running: Any = lambda: True) -> None:
    end = time.monotonic() + _PATIENCE
    while not done():
        assert running(), f"ended before: {what}"
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


def kill_during_save(case: dict[str, Any], processes: int, rank: int, out: Path) -> None:
    """SIGKILL to one rank whose writers are at work: they end with it, and the checkpoint before
    continues the run with the same losses."""
    folder, log = out / case["name"], out / "killed"
    started = Ranks.start(worker.work, processes, "killed", [case], out, log=log, **_REPEATABLE)
    listed = [folder / f"writing-{number}.json" for number in range(processes)]
    ranks: list[dict[str, Any]] = []
    try:
        _wait("writers", lambda: all(file.is_file() for file in listed), started.running)
        ranks = [json.loads(file.read_text()) for file in listed]
        assert len(ranks[rank]["writers"]) > 1
        os.kill(ranks[rank]["rank"], signal.SIGKILL)
        _wait("end of the writers", lambda: all(map(_gone, ranks[rank]["writers"])))
        started.clear()
        assert started.codes[rank] != 0
    finally:
        for pid in (pid for found in ranks for pid in (found["rank"], *found["writers"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.kill()
    first, second = (f"step_{step:08d}" for step in (worker.HALF, worker.HALF + 1))
    assert [path.name for path in folder.glob("step_????????")] == [first]
    assert list(folder.glob(f"{second}.*.partial"))
    run("resumed", processes, [case], out)
    for found in read(out, case, "resumed"):
        assert found["newest"] == first
        assert found["passed"] == []
        assert found["rows"] == found["whole"][worker.HALF :]
