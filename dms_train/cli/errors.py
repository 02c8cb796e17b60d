"""Exit codes and error lines of every command: expected failures are one line, bugs a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dms_train.cli import launcher
from dms_train.config.build import ConfigError

REFUSED = 2
INTERRUPTED = 130
_OWN_PACKAGES = ("dms_train", "checkpoints_tools", "data_prep")
# torch.distributed raises these by class with NCCL, and a plain RuntimeError with gloo.
_PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting")


class PeerLost(RuntimeError):
    """Another rank ended or does not answer; why is for that rank to say."""


def lost_peer(error: RuntimeError) -> bool:
    """Whether a failed collective means that another rank is gone."""
    by_class = any(cls.__name__ in _PEER_CLASSES for cls in type(error).__mro__)
    return by_class or any(words in str(error).lower() for words in _PEER_WORDS)


def run_main(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    Expected failures print one line for each problem on stderr and return 2: the project's own
    ValueError classes, missing files and other refusals of the operating system such as a full
    disk, and the loss of another rank. Ctrl-C returns 130. Anything else is a bug and propagates.

    Under a launcher every rank fails alike, so rank 0 speaks for a wrong configuration and one
    rank of each machine for wrong data; only failures of the operating system differ by rank.
    """
    try:
        return command() or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, PeerLost) as error:
        if not is_expected(error):
            raise
        if _speaks(error):
            sys.stderr.write("".join(f"{line}\n" for line in describe(error)))
            sys.stderr.flush()
        return REFUSED


def is_expected(error: BaseException) -> bool:
    """Whether an exception is a refusal with a message for the user rather than a bug."""
    own = type(error).__module__.partition(".")[0] in _OWN_PACKAGES
    return isinstance(error, OSError | PeerLost) or (isinstance(error, ValueError) and own)


def describe(error: BaseException) -> list[str]:
    """The lines that tell the user what went wrong."""
    if isinstance(error, ConfigError):
        return [f"config error: {_one_line(problem)}" for problem in error.problems]
    rank = launcher.rank()
    prefix = f"[rank {rank}] error" if rank and not isinstance(error, PeerLost) else "error"
    return [f"{prefix}: {_one_line(_os_message(error))}"]


def _speaks(error: BaseException) -> bool:
    if isinstance(error, ConfigError):
        return launcher.rank() == 0
    return isinstance(error, OSError | PeerLost) or launcher.local_rank() == 0


def _os_message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())
