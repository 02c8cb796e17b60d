"""Write the checkpoints of a run, delete old ones and handle failed writes.

A checkpoint is required at the end of a stage and when the run stops: a failed write ends the run.
The others limit the loss of a crash, so training continues after a failed write.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dms_train.observe.log import logger
from dms_train.training.engine import TrainEngine
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.state import TrainState

# On slow storage, deleting a checkpoint takes longer than other ranks wait for rank 0.
_REMOVAL_PATIENCE_SECONDS = 30.0


@dataclass(slots=True, kw_only=True)
class Saver:
    """Writes the run's checkpoints; every rank calls every method.

    Attributes:
        folder: Folder of the run's checkpoints.
        is_main_rank: Whether this process removes old checkpoints.
        provenance: JSON values that are stored with every checkpoint.
    """

    engine: TrainEngine
    reporter: Reporter
    options: RunOptions
    folder: Path
    is_main_rank: bool
    provenance: dict[str, Any]
    _failures: int = field(default=0, init=False)
    _held_up: float = field(default=0.0, init=False)  # seconds that training waited for the save
    _removals: Removals = field(default_factory=lambda: Removals(), init=False)

    def path(self, state: TrainState) -> Path:
        """Return the folder of the checkpoint of this position."""
        return self.step_path(state.step)

    def step_path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.folder / f"step_{step:08d}"

    def save(self, state: TrainState, *, required: bool, wait: bool = False) -> None:
        """Save the position of the run, after finishing a pending save.

        First wait up to 30 seconds for checkpoints that are being deleted, because they take space.

        Args:
            state: The position.
            required: Raise when it cannot be written, and wait for it.
            wait: Return when it is complete.

        Raises:
            ValueError: From the engine: a required checkpoint cannot be written.
        """
        self.finish_pending_save(_row(state))
        if self.is_main_rank:
            remove_unfinished(self.folder, self._removals)
            self._removals.wait(_REMOVAL_PATIENCE_SECONDS)
        described = {**state.to_dict(), "permanent": False, **self.provenance}
        waits = wait or required or not self.options.async_save
        try:
            self._held_up = self.reporter.timed(
                lambda: self.engine.save(self.path(state), described, wait=waits)
            )
        except ValueError as error:
            if required:
                raise
            self._failed(_row(state), error)
        else:
            if waits:
                self._saved(_row(state), self.path(state))

    def save_weights(self, state: TrainState, name: str) -> None:
        """Write the weights alone to `weights/NAME`.

        If that fails, the checkpoint of this position is made permanent, and training continues.
        No checkpoint may be in the process of being written.
        """
        path = self.folder.with_name("weights") / name
        try:
            self.engine.save_weights(path, {**state.to_dict(), **self.provenance})
        except ValueError as error:
            self._failed(_row(state), error, f"; {self.path(state)} becomes permanent instead")
            self.annotate(state, {"permanent": True})

    def remove_branch(self, state: TrainState) -> None:
        """Queue the checkpoints of a finished branch, which left at this position, for deletion."""
        if not self.is_main_rank:
            return
        start = self.path(state).name
        for path in sorted(self.folder.glob("step_????????")):
            if path.name > start and _temporary_state(path) is not None:
                _queue_removal(path, self._removals)

    def annotate(self, state: TrainState, values: dict[str, Any]) -> None:
        """Record later actions in the checkpoint of this position.

        A run that resumes from a checkpoint without the record does it again.
        """
        path = self.path(state)
        try:
            self.engine.annotate(path, values)
        except (OSError, ValueError) as error:
            logger().warning("%s: cannot be updated (%s)", path, error)

    def remove_old(self, state: TrainState) -> None:
        """Queue the checkpoints that are no longer needed at this position for deletion."""
        if self.is_main_rank:
            remove_old(self.path(state), self.options.keep_checkpoints, self._removals)

    def poll(self, step: int) -> None:
        """Report, after step `step`, a checkpoint that has become complete."""
        self._finish(step, wait=False)

    def finish_pending_save(self, step: int) -> None:
        """Wait for a checkpoint that is still being written."""
        self._finish(step, wait=True)

    def _finish(self, step: int, *, wait: bool) -> None:
        finished: list[Path | None] = []
        try:
            seconds = self.reporter.timed(
                lambda: finished.append(self.engine.finish_save(wait=wait))
            )
        except ValueError as error:
            self._failed(step, error)
            return
        path = finished[0]
        if path is not None:
            self._held_up += seconds
            self._saved(step, path)

    def _saved(self, step: int, path: Path) -> None:
        self.reporter.saved(step, path, self._held_up)
        if self.is_main_rank:
            remove_old(path, self.options.keep_checkpoints, self._removals)

    def _failed(self, step: int, error: ValueError, remedy: str = "") -> None:
        self._failures += 1
        if self.is_main_rank:
            reason = str(error).rpartition(": ")[0]
            self.reporter.save_failed(step, self._failures, reason + remedy)


class Removals:
    """Deletes folders one after another in a background thread.

    The process ends after the last deletion. The next run treats a partly deleted folder as an
    unfinished save.
    """

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="removal")
        self._pending: set[futures.Future[None]] = set()

    def add(self, folder: Path) -> None:
        """Queue a folder for deletion; files that cannot be deleted stay."""
        self._pending.add(self._thread.submit(shutil.rmtree, folder, ignore_errors=True))

    def wait(self, seconds: float) -> None:
        """Wait until all folders are deleted, for `seconds` at most."""
        self._pending = futures.wait(self._pending, seconds).not_done


def _row(state: TrainState) -> int:
    """Return the step under which metrics report a save: for a branch, the step of its start."""
    return state.step if state.branch_start is None else state.branch_start


def _temporary_state(path: Path) -> dict[str, Any] | None:
    """Return the stored position of a checkpoint that may be deleted; an unreadable one may not."""
    try:
        stored: dict[str, Any] = json.loads((path / "run_state.json").read_text())
        return None if stored["permanent"] else stored
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_old(saved: Path, keep: int, removals: Removals) -> list[Path]:
    """Queue old checkpoints for deletion, and return them.

    The newest `keep` temporary checkpoints stay, and every checkpoint that one of these may return
    to (`TrainState.kept_step` and `branch_start`). A folder that cannot be renamed is logged and
    left.

    Folders of later steps than `saved` do not count. Otherwise a run that resumed before a damaged
    checkpoint would delete its own checkpoints in favour of the damaged one.
    """
    paths = [path for path in saved.parent.glob("step_????????") if path.name <= saved.name]
    states = [(path, _temporary_state(path)) for path in sorted(paths, reverse=True)]
    temporary = [(path, state) for path, state in states if state is not None]
    needed = {s.get(key) for _, s in temporary[:keep] for key in ("kept_step", "branch_start")}
    old = [path for path, state in temporary[keep:] if state.get("step") not in needed]
    for path in old:
        _queue_removal(path, removals)
    return old


def _queue_removal(path: Path, removals: Removals) -> None:
    """Rename a checkpoint, so that no reader sees half of it, and queue it for deletion."""
    left = path.with_name(f"{path.name}.removed.partial")
    try:
        path.rename(left)
    except OSError as error:
        logger().warning("%s: cannot be deleted (%s)", path, error.strerror)
    removals.add(left)


def remove_unfinished(folder: Path, removals: Removals) -> None:
    """Delete the remains of interrupted saves, except a checkpoint that was not replaced yet."""
    for path in folder.glob("step_*.partial"):
        whole = path.with_name(path.name.partition(".")[0])
        if path.name.endswith(".old.partial") and not whole.exists():
            with contextlib.suppress(OSError):
                path.rename(whole)
            continue
        removals.add(path)
