"""Small files in the run folder that report the state of a run to other programs.

torchrun and srun rewrite exit codes, so a launcher decides by these files. Standard library only,
because `dms-submit` reads them on machines without torch.

    state/lock            the process that writes the folder (`locks`)
    state/heartbeat       touched by rank 0 after every step
    state/ranks/N         heartbeat of rank N (`heartbeats`)
    state/ranks/reported  a rank has reported why all of them end
    state/STOPPED         the run saved and ended on request; removed by the next start
    state/REFUSED         the run was refused; the same start would be refused again
    state/STAGE.done      a stage is finished and its results are stored
    state/DONE            all stages are finished
    errors/ATTEMPT-rankN.json   cause of a rank's end; written under the launch scripts only
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMER_STAGES = {"validate": "validate_export", "evaluate": "run_tasks"}


def current_stage(name: str) -> str:
    """Return the current name of a stage; an earlier version may have stored another name."""
    return _FORMER_STAGES.get(name, name)


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The state files of one run folder."""

    folder: Path

    @property
    def state(self) -> Path:
        """Folder of all state files except the errors."""
        return self.folder / "state"

    @property
    def errors(self) -> Path:
        """Folder of one file for every rank that failed."""
        return self.folder / "errors"

    @property
    def lock(self) -> Path:
        """Lock file of the process that writes the folder."""
        return self.state / "lock"

    def begin(self) -> None:
        """Record that a run starts or continues."""
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "STOPPED").unlink(missing_ok=True)
        self.beat()

    def beat(self) -> None:
        """Touch the heartbeat."""
        (self.state / "heartbeat").touch()

    def stopped(self, step: int) -> None:
        """Record that the run was asked to stop and saved after `step` steps."""
        self._write(self.state / "STOPPED", f"step {step}\n")

    def refused(self, lines: list[str]) -> None:
        """Record that every start would be refused; `lines` say what must be done first."""
        self.state.mkdir(parents=True, exist_ok=True)
        self._write(self.state / "REFUSED", "\n".join(lines) + "\n")

    def done(self, stage: str, step: int) -> None:
        """Record that a stage is finished after `step` steps of the run; written once."""
        if not self.is_done(stage):
            self.state.mkdir(parents=True, exist_ok=True)
            self._write(self.state / f"{stage}.done", f"step {step}\n")

    def all_done(self) -> None:
        """Record that every stage of the configuration is finished."""
        self._write(self.state / "DONE", "all stages\n")

    def is_done(self, stage: str) -> bool:
        """Return whether a stage, by its name in this or an earlier version, is finished."""
        marks = {current_stage(file.stem) for file in self.state.glob("*.done")}
        return current_stage(stage) in marks

    def failed(self, rank: int, attempt: str, error: BaseException, lines: list[str]) -> None:
        """Record the cause of a rank's end.

        Args:
            rank: The rank that ends.
            attempt: Number of this start of the run; part of the file's name.
            error: Exception that ended it.
            lines: The message to the user.
        """
        self.errors.mkdir(parents=True, exist_ok=True)
        described = {
            "rank": rank,
            "time": time.time(),
            "error": type(error).__name__,
            "message": " ".join(lines),
            "traceback": traceback.format_exception(error),
        }
        self._write(self.errors / f"{attempt}-rank{rank}.json", json.dumps(described, indent=1))

    def root_cause(self) -> dict[str, Any] | None:
        """Return the first error of the newest attempt; errors of a lost peer come last."""
        newest: dict[str, list[dict[str, Any]]] = {}
        for file in self.errors.glob("*-rank*.json"):
            described = json.loads(file.read_text())
            newest.setdefault(file.name.rpartition("-rank")[0], []).append(described)
        if not newest:
            return None
        last = max(newest.values(), key=lambda errors: max(e["time"] for e in errors))
        return min(last, key=lambda e: (e["error"] == "PeerLost", e["time"]))

    def _write(self, path: Path, text: str) -> None:
        scratch = path.with_name(f"{path.name}.partial")
        scratch.write_text(text)
        scratch.replace(path)
