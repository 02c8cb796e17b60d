"""A lock file that names its process, so that one process at a time writes a folder.

The file is created exclusively, which local, NFS and parallel file systems do atomically. A kernel
lock (flock) is not used: on some of these file systems it is refused, or holds on one machine only.
The holder touches the file every 20 seconds. A lock is stale, and is taken over, in these cases:

- its process has ended, which process number and start time show on the same machine;
- an earlier start of the same SLURM job made it, and SLURM ends a job before it restarts it;
- it was not touched for three minutes, and its process is not known to run.

Ages are differences between modification times on one file system, so that clocks of machines need
not agree. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from dms_train.observe import processes
from dms_train.observe.log import logger

_EVERY_SECONDS = 20.0
# NFS may show a file as it was up to a minute ago.
_SILENT_SECONDS = 180.0


class LockedError(ValueError):
    """Another process holds the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Process that holds a lock.

    Attributes:
        host: Machine of the process.
        pid: Process number on that machine.
        since: Time at which it took the lock.
        process: Identity (`processes.mark`); empty where the system hides it.
        job: `SLURM_JOB_ID.SLURM_RESTART_COUNT`; empty outside of SLURM.
    """

    host: str = "an unknown machine"
    pid: int = 0
    since: str = "an unknown time"
    process: str = ""
    job: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def this(cls, job: str = "") -> Holder:
        """Describe this process and its job."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            process=processes.mark(),
            job=job,
        )

    @classmethod
    def read(cls, text: str) -> Holder:
        """Parse the holder that a lock file describes; unknown while the file is being written."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls()

    def was_restarted_as(self, other: Holder) -> bool:
        """Return whether `other` is a later start of the same SLURM job."""
        ours, _, before = self.job.partition(".")
        theirs, _, now = other.job.partition(".")
        return bool(ours) and ours == theirs and int(before) < int(now)


@contextmanager
def held(path: Path, what: str, job: str = "") -> Iterator[None]:
    """Hold the lock file `path` inside the block.

    Args:
        path: The lock file; its folder is created if absent.
        what: Name of the protected folder in messages, such as `run.dir=outputs/cr4`.
        job: `Holder.job` of this process.

    Raises:
        LockedError: Another process holds it; one line with process, machine, time and a remedy.
        OSError: The file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Holder.this(job)
    text = json.dumps(asdict(holder))
    _take(path, holder, what)
    ends = threading.Event()
    thread = threading.Thread(target=_touch, args=(path, text, ends), name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(_EVERY_SECONDS)  # with a limit, because the file system may hang
        with suppress(OSError):
            if path.read_text() in (text, ""):  # empty: the disk was full
                path.unlink()


def _create(path: Path, text: str) -> bool:
    """Create the file; return False if it exists."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with (
        suppress(OSError),
        os.fdopen(descriptor, "w") as stream,
    ):  # on a full disk the lock names no holder
        stream.write(text)
    return True


def _take(path: Path, own: Holder, what: str) -> None:
    """Create the lock, or replace one whose holder is gone; raise LockedError if it is in use.

    A claim, itself a lock, is named after the content that it replaces. Its owner alone may replace
    that content, which happens in one step: the lock is absent at no time.
    """
    while not _create(path, json.dumps(asdict(own))):
        left = _stale(path, own, what)
        if left is None:
            continue
        claim = path.with_name(f"{path.name}.{sha256(left.encode()).hexdigest()[:16]}")
        _take(claim, own, what)
        try:
            if _stale(path, own, what) == left:
                claim.rename(path)
                logger().warning(
                    "%s: %s did not release its lock; taken over", what, Holder.read(left)
                )
                return
        finally:
            claim.unlink(missing_ok=True)


def _stale(path: Path, own: Holder, what: str) -> str | None:
    """Return what a lock whose holder is gone contains; None if it was released meanwhile."""
    try:
        text, age = path.read_text(), _age(path)
    except FileNotFoundError:
        return None
    holder = Holder.read(text)
    if not _is_stale(holder, age, own):
        raise LockedError(f"{what}: already in use by {holder}; {_advice(path, holder, own)}")
    return text


def _is_stale(holder: Holder, age: float, own: Holder) -> bool:
    if processes.has_ended(holder.process) or holder.was_restarted_as(own):
        return True
    return age > _SILENT_SECONDS and not processes.is_here(holder.process)


def _advice(path: Path, holder: Holder, own: Holder) -> str:
    wait = "wait until it ends, stop it, or choose another folder"
    if holder.host == own.host:
        return wait
    minutes = round(_SILENT_SECONDS / 60)
    return f"{wait}; if it was lost with its machine, start again after {minutes} min ({path})"


def _age(path: Path) -> float:
    """Return the seconds since the lock was touched, by the clock of the file system."""
    now = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.now")
    now.touch()
    try:
        return now.stat().st_mtime - path.stat().st_mtime
    finally:
        now.unlink(missing_ok=True)


def _touch(path: Path, text: str, ends: threading.Event) -> None:
    """Touch the lock every 20 seconds; end this process if another one has taken the lock."""
    while not ends.wait(_EVERY_SECONDS):
        with suppress(OSError):  # a file system may fail for a moment
            if path.read_text() not in (text, ""):
                logger().error("%s: another process has taken this lock; this one ends", path)
                os._exit(1)  # at once: anything it wrote now would damage the other run
            os.utime(path)
