"""Whether this process's main thread goes on, and where it stands when it does not.

Seen from another thread, at intervals. The main thread stands still when it is in the very same
calls of functions as before, at the same instructions, has reached nothing meanwhile and has not
computed; who writes one file after the other is often at the same instruction, but in other calls.
Whether it then waits for others, its innermost Python function tells: what happens below that (a
collective, a synchronisation with the GPU, a read of a disk) is not visible from Python. Standard
library only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any, Literal, NamedTuple

Kind = Literal["works", "waits", "stands"]
_PROJECT = "dms_train"
# Modules whose functions compute and communicate. One that does not return waits for other ranks,
# or for the GPU, which may wait for them.
_COMPUTES = (
    *("torch", "megatron", "transformer_engine", "apex", "triton"),
    *(f"{_PROJECT}.{room}" for room in ("mcore", "kernels", "method")),
)
# Those among them that read and write files.
_FILES = (
    *("torch.utils.data", "torch.serialization", "torch.storage", "torch.distributed.checkpoint"),
    *("megatron.core.datasets", "megatron.core.dist_checkpointing", "triton.runtime.cache"),
    *("dms_train.mcore.checkpoint", "dms_train.mcore.checkpoint_state"),
    *("dms_train.mcore.checkpoint_saving", "dms_train.mcore.checksums"),
)
# Whoever stands below these waits for a process that it has started, such as one that writes a
# checkpoint or compiles; how long that takes is not for us to say.
_PROCESSES = ("subprocess", "multiprocessing", "torch._inductor")
# Of the time between two looks; who waits for a disk or a lock needs none.
_COMPUTING_SHARE = 0.02


class Stand(NamedTuple):
    """What the main thread does, for how many seconds it has been at one place, and at which."""

    kind: Kind
    seconds: float
    place: str


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _mark(_frame: FrameType, _event: str, _argument: Any) -> None:
    """Of a call that was seen; as `f_trace`, a frame's only attribute that can be set."""


def _seen_before(frame: FrameType) -> bool:
    """Whether this is no new call of its function; where a debugger traces, nobody can tell."""
    if frame.f_trace is not None:
        return True
    frame.f_trace = _mark
    return False


def _kind(stack: list[FrameType]) -> Kind:
    """What a thread does that has not left the innermost function of this stack for long."""
    innermost = _module(stack[0])
    if _within(innermost, _COMPUTES) and not _within(innermost, _FILES):
        return "waits"
    return "works" if any(_within(_module(f), _PROCESSES) for f in stack) else "stands"


def _place(stack: list[FrameType]) -> str:
    """The innermost function, and the innermost one of this project."""
    own = next((f for f in stack if _within(_module(f), [_PROJECT])), stack[0])
    place = _line(own)
    return place if own is stack[0] else f"{_line(stack[0])}, called from {place}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    package = _module(frame).partition(".")[0]
    _, inside, file = code.co_filename.rpartition(f"/{package}/")
    file = f"{package}/{file}" if inside else code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {code.co_name}"


class MainThread:
    """Looked at from another thread, more than once."""

    def __init__(self) -> None:
        self._seen: object = None
        self._seconds = 0.0
        self._looked = self._computed = 0.0

    def look(self, reached: object, at_most: float) -> Stand:
        """What the main thread does now.

        Args:
            reached: Differs from that of the last look when the main thread got anywhere.
            at_most: Seconds that the time since the last look counts for; after a pause of the
                whole process it is longer than anybody waited.
        """
        thread = threading.main_thread().ident
        assert thread is not None
        stack = _stack(sys._current_frames().get(thread))
        if not stack:
            return Stand("works", 0.0, "")
        seen = (reached, [(frame.f_code, frame.f_lasti) for frame in stack])
        kind, place, again = _kind(stack), _place(stack), _seen_before(stack[0])
        del stack  # what the functions hold must not live longer for it
        passed, computed = self._since_last(thread)
        computes = kind == "stands" and computed > _COMPUTING_SHARE * passed
        if not again or seen != self._seen or kind == "works" or computes:
            self._seen, self._seconds = seen, 0.0
            return Stand("works", 0.0, place)
        self._seconds += min(passed, at_most)
        return Stand(kind, self._seconds, place)

    def _since_last(self, thread: int) -> tuple[float, float]:
        """Seconds since the last look, and those in which the main thread computed."""
        now, used = time.monotonic(), time.clock_gettime(time.pthread_getcpuclockid(thread))
        passed, computed = now - self._looked, used - self._computed
        self._looked, self._computed = now, used
        return passed, computed
