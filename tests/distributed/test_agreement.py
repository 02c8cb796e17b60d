"""All ranks continue from one checkpoint, also when one of them cannot read the newest."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from dms_train.app import run_folder
from dms_train.app.start_point import StartPoint
from dms_train.config.build import ConfigError
from dms_train.mcore import groups
from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints import state as checkpoint_state
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import ParallelOptions
from dms_train.training.state import TrainState
from tests.support import configs
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROCESSES = 2
STEPS = (3, 5, 6)
# (file of which step, found out while it looks for the newest or only while it compares checksums)
CASES = {
    "content": ([(6, "b.distcp")], False),
    "state": ([(6, "run_state.json")], False),
    "from_the_beginning": ([(6, "run_state.json"), (5, "common.pt")], True),
    "another_folder": ([], False),  # in which rank 1 sees no checkpoints
    "no_older_one": ([(6, "b.distcp"), (5, ".metadata"), (3, "common.pt")], False),
}


def write(run: Path) -> None:
    """Whole checkpoints that hold no weights."""
    for step in STEPS:
        path = run / "checkpoints" / f"step_{step:08d}"
        path.mkdir(parents=True)
        (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
        torch.save({}, path / "common.pt")
        for name, size in (("a.distcp", 9000), ("b.distcp", 8000)):  # rank 1 reads the smaller
            (path / name).write_bytes(bytes(size))
        state = {
            **TrainState(step=step).to_dict(),
            "architecture": asdict(configs.architecture()),
            "spec": configs.config().method.to_dict(),
            "permanent": False,
        }
        checkpoint_state.seal(path, state, checksums.records(path.iterdir()))


@contextmanager
def failing(files: set[Path]) -> Iterator[None]:
    """Opening one of these files fails as on a broken disk."""
    real = Path.open

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        if path in files:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **options)

    Path.open = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.open = real  # type: ignore[method-assign]


def resumed(run: Path, view: ParallelView, case: str) -> str:
    """Return where this rank continues, or why it refuses."""
    config = configs.config(run__dir=str(run))
    original = StartPoint(
        architecture=configs.architecture(), model_dir=None, tokenizer_dir=None, state=TrainState()
    )
    unreadable, early = CASES[case]
    files = {run / "checkpoints" / f"step_{step:08d}" / name for step, name in unreadable}
    files = files if view.rank == 1 else set()
    with failing(files if early else set()):
        start = run_folder.resume_point(config, original)
    if case == "another_folder" and view.rank == 1:
        start = original
    assert start is not None
    with failing(files):
        try:
            start = run_folder.verified(config, start, view)
        except ConfigError as error:
            return str(error)
    assert start.student is not None
    run_folder.set_aside(start, is_main_rank=view.rank == 0)
    return f"{start.student.name}, step {start.state.step}"


def work(out: Path) -> dict[str, str]:
    view = groups.start(ParallelOptions(distributed_timeout_minutes=0.5), seed=1)
    outcomes = {}
    for case in CASES:
        run = out / case
        if view.rank == 0:
            write(run)
        groups.value_of_rank_0(None)
        outcomes[case] = resumed(run, view, case)
    groups.stop()
    return outcomes


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


@pytest.fixture(scope="module")
def outcomes(out: Path) -> list[dict[str, str]]:
    """Return for each rank where it continued, in every case."""
    return values_of_ranks(work, PROCESSES, out)


@pytest.mark.parametrize(
    ("case", "where"),
    [
        ("content", "step_00000005, step 5"),
        ("state", "step_00000005, step 5"),
        ("from_the_beginning", "step_00000003, step 3"),
    ],
)
def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(
    outcomes: list[dict[str, str]], case: str, where: str
) -> None:
    assert [ranks[case] for ranks in outcomes] == [where] * PROCESSES


def test_checkpoints_that_were_passed_over_are_renamed_and_refused_ones_stay(out: Path) -> None:
    left = {case: {path.name for path in (out / case / "checkpoints").iterdir()} for case in CASES}
    whole = [f"step_{step:08d}" for step in STEPS]
    aside = [f"{name}.damaged" for name in whole]
    assert left["content"] == left["state"] == {whole[0], whole[1], aside[2]}
    assert left["from_the_beginning"] == {whole[0], aside[1], aside[2]}
    assert left["no_older_one"] == left["another_folder"] == set(whole)


def test_all_ranks_refuse_when_one_sees_another_folder(outcomes: list[dict[str, str]]) -> None:
    (reason,) = {ranks["another_folder"] for ranks in outcomes}
    assert "rank 1: sees None as the place to start from" in reason


def test_all_ranks_refuse_when_one_has_no_checkpoint_left(outcomes: list[dict[str, str]]) -> None:
    (reason,) = {ranks["no_older_one"] for ranks in outcomes}
    assert "none of its 2 checkpoint(s) can be used" in reason
    assert "cannot be read (Input/output error)" in reason
