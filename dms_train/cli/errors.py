"""Exit codes and error lines of every command: expected failures are one line, bugs a traceback."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from dms_train.cli import launcher
from dms_train.config.build import ConfigError

REFUSED = 2
INTERRUPTED = 130
_PATIENCE_SECONDS = 5.0
_OWN_PACKAGES = ("dms_train", "checkpoints_tools", "data_prep", "launch")
# torch.distributed raises these by class with NCCL, and a plain RuntimeError with gloo.
_PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting")


class PeerLost(RuntimeError):
    """Another rank ended or does not answer; why is for that rank to say."""


class RankHangs(PeerLost):
    """Some rank does not go on, and this is what is known of it."""


def lost_peer(error: RuntimeError) -> bool:
    """Whether a failed collective means that another rank is gone."""
    by_class = any(cls.__name__ in _PEER_CLASSES for cls in type(error).__mro__)
    return by_class or any(words in str(error).lower() for words in _PEER_WORDS)


def run_main(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    Expected failures print one line for each problem on stderr and return 2: the project's own
    ValueError classes, missing files and other refusals of the operating system such as a full
    disk, and the loss of another rank. Ctrl-C returns 130. Anything else is a bug and propagates.

    Most failures hit all ranks alike, so ranks other than 0 wait before they speak: a launcher
    that has seen rank 0 fail ends them meanwhile, and rank 0 is never ended before it has spoken.
    """
    try:
        return command() or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, PeerLost) as error:
        if not is_expected(error):
            raise
        if _may_repeat_others(error):
            time.sleep(_PATIENCE_SECONDS)
        sys.stderr.write("".join(f"{line}\n" for line in describe(error)))
        sys.stderr.flush()
        return REFUSED


def run_process(command: Callable[[], int | None]) -> NoReturn:
    """`run_main`, then the end of this process.

    One of several ranks that failed after they met ends at once: shutting the interpreter down
    waits for the collectives under way, which the others may never join, and may crash in the
    threads of gloo that hold their tensors (https://github.com/pytorch/pytorch/pull/179291).
    """
    try:
        code = run_main(command)
    except Exception:
        if launcher.world_size() == 1:
            raise
        traceback.print_exc()
        code = 1
    if code and launcher.world_size() > 1 and _has_met_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_met_others() -> bool:
    distributed = sys.modules.get("torch.distributed")  # refusals of light commands load no torch
    return distributed is not None and distributed.is_initialized()


def is_expected(error: BaseException) -> bool:
    """Whether an exception is a refusal with a message for the user rather than a bug."""
    own = type(error).__module__.partition(".")[0] in _OWN_PACKAGES
    return isinstance(error, OSError | PeerLost) or (isinstance(error, ValueError) and own)


def is_refusal(error: BaseException) -> bool:
    """Whether an expected failure lies in what was asked for, not in the machine of the moment."""
    return isinstance(error, ValueError) and is_expected(error)


def describe(error: BaseException) -> list[str]:
    """The lines that tell the user what went wrong."""
    rank = launcher.rank()
    prefix = f"[rank {rank}] " if rank and not isinstance(error, PeerLost) else ""
    if isinstance(error, ConfigError):
        return [f"{prefix}config error: {_one_line(problem)}" for problem in error.problems]
    return [f"{prefix}error: {message(error)}"]


def _may_repeat_others(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return False  # a full disk or a missing mount belongs to one machine
    return isinstance(error, PeerLost) or launcher.rank() != 0


def message(error: BaseException) -> str:
    """What an exception says, on one line and without error numbers."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _one_line(f"{where}{error.strerror}")
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())
