"""Expected failures, and the one line that reports each."""

from __future__ import annotations

import sys
from pathlib import Path

from dms_train.app import launcher
from dms_train.config.build import ConfigError

REFUSED = 2  # the exit code of every expected failure
# torch.distributed raises these by class with NCCL, and a plain RuntimeError with gloo.
_PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting")
# Optional packages: name of the import, name of the distribution, extras that install it.
_OPTIONAL = {
    "accelerate": ("accelerate", "eval"),
    "datasets": ("datasets", "data", "eval"),
    "gguf": ("gguf", "gguf"),
    "hydra": ("hydra-core", "train", "eval"),
    "jinja2": ("jinja2", "serve", "eval", "data"),
    "lm_eval": ("lm-eval", "eval"),
    "math_verify": ("math-verify", "data", "eval"),
    "matplotlib": ("matplotlib", "eval"),
    "megatron": ("megatron-core", "train"),
    "omegaconf": ("hydra-core", "train", "eval"),
    "prometheus_client": ("prometheus_client", "serve"),
    "psutil": ("psutil", "train", "data", "eval"),
    "pyarrow": ("pyarrow", "data", "eval"),
    "pydantic": ("pydantic", "serve"),
    "starlette": ("starlette", "serve"),
    "transformers": ("transformers", "train", "serve", "eval", "data"),
    "uvicorn": ("uvicorn", "serve"),
}


class PeerLost(RuntimeError):
    """Another rank ended or does not answer; that rank reports the cause."""


class RankHangs(PeerLost):
    """Some ranks have stalled; the message describes them."""


def lost_peer(error: RuntimeError) -> bool:
    """Return whether a failed collective means that another rank is gone."""
    by_class = any(cls.__name__ in _PEER_CLASSES for cls in type(error).__mro__)
    return by_class or any(words in str(error).lower() for words in _PEER_WORDS)


def is_expected(error: BaseException) -> bool:
    """Return whether an exception is an expected failure with a message for the user, not a bug."""
    own = type(error).__module__.partition(".")[0] == "dms_train"
    absent = isinstance(error, ModuleNotFoundError) and _top_name(error) in _OPTIONAL
    return (
        absent or isinstance(error, OSError | PeerLost) or (isinstance(error, ValueError) and own)
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether the request, not the state of the machine, caused an expected failure."""
    return isinstance(error, ValueError) and is_expected(error)


def describe(error: BaseException) -> list[str]:
    """Return the lines that report a failure to the user."""
    rank = launcher.rank()
    prefix = f"[rank {rank}] " if rank and not isinstance(error, PeerLost) else ""
    if isinstance(error, ConfigError):
        return [f"{prefix}config error: {_one_line(problem)}" for problem in error.problems]
    if isinstance(error, ModuleNotFoundError):
        return [f"{prefix}{_command()} {message(error)}"]
    return [f"{prefix}error: {message(error)}"]


def message(error: BaseException) -> str:
    """Return the message of an exception, on one line and without error numbers."""
    if isinstance(error, ModuleNotFoundError) and _top_name(error) in _OPTIONAL:
        package, *extras = _OPTIONAL[_top_name(error)]
        own = _command().removeprefix("dms-")
        extra = own if own in extras else extras[0]
        return f'needs {package}: pip install "dms-train[{extra}]"'
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _one_line(f"{where}{error.strerror}")
    return _one_line(str(error)) or type(error).__name__


def _top_name(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _command() -> str:
    name = Path(sys.argv[0]).name
    return name if name.startswith("dms-") else "dms-train"


def _one_line(text: str) -> str:
    return " ".join(text.split())
