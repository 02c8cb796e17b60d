"""The rows of `metrics.jsonl` as TensorBoard event files, under the same names.

A view like Weights & Biases: a failure is one warning and never stops training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from dms_train.observe import heatmap

FOLDER = "tensorboard"

Warn = Callable[[str], None]


class TensorBoardSink:
    """Sink of event files in `RUN/tensorboard`; after a resume, a new file replaces later rows."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], *, resume_step: int, warn: Warn
    ) -> None:
        self._warn = warn
        self._writer: Any = None
        self._attempt(lambda: self._open(run_dir, config, resume_step))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers as scalars, tables by head as a picture and a histogram."""
        if self._writer is not None:
            self._attempt(lambda: self._write(step, values))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Do nothing: event files have no summary, and the rows hold every value."""

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._attempt(self._writer.close)
            self._writer = None

    def _open(self, run_dir: Path, config: Mapping[str, Any], resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(run_dir / FOLDER), purge_step=purge)
        shown = json.dumps(config, indent=2).replace("\n", "\n    ")
        self._writer.add_text("config", f"    {shown}", resume_step)
        self._writer.flush()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if heatmap.is_by_head(value):
                self._writer.add_image(name, heatmap.pixels(value), step, dataformats="HW")
                self._writer.add_histogram(f"{name}_histogram", numpy.ravel(value), step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _attempt(self, action: Callable[[], object]) -> None:
        """Suppress any error inside the block, because training continues without a sink."""
        try:
            action()
        except Exception as error:
            self._writer = None
            text = " ".join(str(error).split())[:200]
            self._warn(f"tensorboard: {type(error).__name__}: {text}; no longer recorded there")
