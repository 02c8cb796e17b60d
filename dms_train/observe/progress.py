"""Progress of a stage on the terminal: a live bar, plain lines at intervals, or nothing.

A step's values are shown if their names are listed below. The sinks record the other
values.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from dms_train.observe.metrics import duration

SHOWN = {
    "loss": ("loss", ".4f"),
    "kl": ("KL", ".4f"),
    "target_cr": ("CR target", ".2f"),
    "cr": ("CR", ".2f"),
    "tokens_per_second": ("tok/s", ",.0f"),
}
_LINE_SECONDS = 10.0

Warn = Callable[[str], None]


class Progress(Protocol):
    """Display of one stage at a time."""

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Start a stage of `total` steps, `done` of them finished earlier."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Show that `done` steps of the stage are finished."""

    def close(self) -> None:
        """Restore the terminal, also after an exception."""


def open_progress(enabled: bool, stream: TextIO | None = None) -> Progress:
    """Choose the richest display that `stream` (None: stderr) and the packages allow."""
    stream = stream or sys.stderr
    if not enabled:
        return NoProgress()
    if stream.isatty():
        try:
            return BarProgress()
        except ImportError:
            pass  # rich is optional
    return LineProgress(stream)


def describe(values: Mapping[str, float]) -> str:
    """Format the shown values as one short text."""
    parts = (
        f"{label} {values[name]:{form}}"
        for name, (label, form) in SHOWN.items()
        if values.get(name) is not None
    )
    return "  ".join(parts)


class NoProgress:
    """Display that shows nothing, for every rank except one."""

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Do nothing."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class LineProgress:
    """One line every few seconds and one at the end of a stage; for log files and pipes."""

    def __init__(
        self,
        stream: TextIO,
        every_seconds: float = _LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every = every_seconds
        self._clock = clock
        self._stage, self._total, self._done_before = "", 0, 0
        self._started = self._shown = clock()

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Announce the stage."""
        self._stage, self._total, self._done_before = stage, total, done
        self._started = self._shown = self._clock()
        self._write(f"{stage}: {total - done} steps")

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Write a line when the last one is old enough or the stage is finished."""
        now = self._clock()
        if now - self._shown < self._every and done < self._total:
            return
        self._shown = now
        per_step = (now - self._started) / max(1, done - self._done_before)
        left = duration(per_step * (self._total - done))
        self._write(f"{self._stage} {done}/{self._total}  {describe(values)}  {left} left")

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class BarProgress:
    """A live bar on stderr; log lines written meanwhile stay above it."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[values]}"),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Add a bar below those of finished stages."""
        self._bar.start()
        self._task = self._bar.add_task(stage, total=total, completed=done, values="")

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, values=describe(values))

    def close(self) -> None:
        """Stop drawing and give the cursor back."""
        self._bar.stop()
