"""Two ranks, the second of which gets errors from the disk for some files of the checkpoints.

torchrun ... -m tests.support.agreement_worker OUT_FOLDER
"""

from __future__ import annotations

import errno
import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    """Where this rank continues, or why it refuses."""
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


def main() -> None:
    out = Path(sys.argv[1])
    view = groups.start(ParallelOptions(distributed_timeout_minutes=0.5), seed=1)
    outcomes = {}
    for case in CASES:
        run = out / case
        if view.rank == 0:
            write(run)
        groups.value_of_rank_0(None)
        outcomes[case] = resumed(run, view, case)
    (out / f"{view.rank}.json").write_text(json.dumps(outcomes))
    groups.stop()


if __name__ == "__main__":
    main()
