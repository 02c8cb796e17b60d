"""One-line messages on stderr: rank 0 logs progress, other ranks log warnings and errors only.

A record of an exception ends its line with the exception; the traceback follows.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from typing import TextIO

_NAME = "dms_train"
_REPEAT_SECONDS = 10.0  # between equal messages of another library


def configure(rank: int = 0, stream: TextIO | None = None) -> logging.Logger:
    """Set up and return the project's logger; calling again replaces the set-up.

    Args:
        rank: Rank of this process; ranks other than 0 print warnings and errors only.
        stream: Destination of the lines. None looks up stderr for each line, so that a progress bar
            that replaces stderr can keep lines above itself.
    """
    logger = logging.getLogger(_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(stream) if stream is not None else _StderrHandler()
    handler.setFormatter(_OneLine(rank))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.disabled = False  # Hydra disables the loggers it finds when it sets up its own
    logger.propagate = False
    return logger


def logger() -> logging.Logger:
    """Return the project's logger."""
    return logging.getLogger(_NAME)


def adopt(library: str) -> None:
    """Let a library's logger write here, at most one equal message in ten seconds.

    Args:
        library: Name of its logger.
    """
    other = logging.getLogger(library)
    other.handlers, other.filters, other.propagate = [*logger().handlers], [_Seldom()], False


class _Seldom(logging.Filter):
    """Filter that drops records whose first line was shown shortly before."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = str(record.msg).partition("\n")[0], time.monotonic()
        if now - self._shown.get(text, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            return False
        self._shown[text] = now
        return True


class _StderrHandler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _OneLine(logging.Formatter):
    """Format `12:30:59 [rank 3] warning: text`; line breaks in the text become spaces."""

    def __init__(self, rank: int) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        parts = [self.formatTime(record, self.datefmt)]
        if self._rank:
            parts.append(f"[rank {self._rank}]")
        if record.levelno >= logging.WARNING:
            parts.append(f"{record.levelname.lower()}:")
        parts += record.getMessage().split()
        if not record.exc_info or record.exc_info[1] is None:
            return " ".join(parts)
        cause = "".join(traceback.format_exception_only(record.exc_info[1])).split()
        traced = self.formatException(record.exc_info)
        return f"{' '.join([*parts, '-', *cause])}\n{traced}"
