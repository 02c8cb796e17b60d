"""Which failures are expected, and the one line in which each is reported."""

from __future__ import annotations

from dms_train.app import launcher
from dms_train.config.build import ConfigError

REFUSED = 2  # the exit code of every expected failure
# torch.distributed raises these by class with NCCL, and a plain RuntimeError with gloo.
_PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting")


class PeerLost(RuntimeError):
    """Another rank ended or does not answer; that rank reports the cause."""


class RankHangs(PeerLost):
    """Ranks have stalled; the message describes them."""


def lost_peer(error: RuntimeError) -> bool:
    """Whether a failed collective means that another rank is gone."""
    by_class = any(cls.__name__ in _PEER_CLASSES for cls in type(error).__mro__)
    return by_class or any(words in str(error).lower() for words in _PEER_WORDS)


def is_expected(error: BaseException) -> bool:
    """Whether an exception is an expected failure with a message for the user, not a bug."""
    own = type(error).__module__.partition(".")[0] == "dms_train"
    return isinstance(error, OSError | PeerLost) or (isinstance(error, ValueError) and own)


def is_refusal(error: BaseException) -> bool:
    """Whether an expected failure is caused by the request, not by the state of the machine."""
    return isinstance(error, ValueError) and is_expected(error)


def describe(error: BaseException) -> list[str]:
    """The lines that report a failure to the user."""
    rank = launcher.rank()
    prefix = f"[rank {rank}] " if rank and not isinstance(error, PeerLost) else ""
    if isinstance(error, ConfigError):
        return [f"{prefix}config error: {_one_line(problem)}" for problem in error.problems]
    return [f"{prefix}error: {message(error)}"]


def message(error: BaseException) -> str:
    """The message of an exception, on one line and without error numbers."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _one_line(f"{where}{error.strerror}")
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())
