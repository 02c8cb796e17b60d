"""Writer of distributed checkpoints with Megatron's writers, in the background if configured.

A rank copies what it saves to host memory (on the CPU, a fork keeps it). Processes of the rank then
write files and compute checksums while training continues. When all ranks have finished, the folder
is sealed and renamed. Until then its name ends in `.partial` and it does not count as a checkpoint.
A failure is raised on every rank, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import logging
import os
import pickle
import queue
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from dms_train.hf import durable
from dms_train.mcore import compat, groups
from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints.reading import COMMON_FILE, sharded_state
from dms_train.mcore.checkpoints.state import seal
from dms_train.mcore.errors import SaveError

_PARTIAL = ".partial"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STDERR = 2  # standard streams may be sockets too
_THREADS = 8  # that prepare host memory for a copy
# Prefix of the reason when one of megatron's writers failed.
_WRAPPING = re.compile(r"^Worker failure: (\[Errno \d+\] )?")
# Message of torch.save when a file cannot be written; its remainder gives file offsets.
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")
_NOTHING_HEARD = "results_queue should not be empty"
_CONNECTIONS = ("socket:", "anon_inode:[eventpoll]")
# Megatron's writers also raise what they log here.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)


class _Mailbox:
    """Transport of one value from a forked process to its parent, readable after its end.

    Megatron's own queue is a server process that outlives a killed run; a pipe would block the
    writer until it is read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this

    def put(self, value: Any) -> None:
        self._file.seek(0)
        self._file.write(pickle.dumps(value))
        self._file.flush()

    def get_nowait(self) -> Any:
        """Take the value out; queue.Empty when there is none."""
        self._file.seek(0)
        content = self._file.read()
        self._file.seek(0)
        self._file.truncate()
        if not content:
            raise queue.Empty
        return pickle.loads(content)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy; rank 0 keeps a failed index until all ranks can be informed."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.failure: Exception | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, *planned: Any) -> AsyncRequest:
        finish = writer.finish

        def kept(*arguments: Any) -> None:
            try:
                finish(*arguments)
            except (OSError, RuntimeError) as error:
                self.failure = error

        writer.finish = kept
        return super()._get_save_and_finalize_callbacks(writer, *planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save in progress."""

    path: Path
    partial: Path
    state: dict[str, Any]
    common: dict[str, Any]
    strategy: _Strategy
    records: _Mailbox


class CheckpointSaver:
    """Writer of checkpoints, one after the other; every rank calls every method."""

    def __init__(self, *, is_main_rank: bool) -> None:
        """Set up; with `is_main_rank` this rank makes, seals and renames the folder."""
        self._is_main_rank = is_main_rank
        self._queue = AsyncCallsQueue()
        self._save: _Save | None = None
        compat.use_results_queue(_Mailbox())

    def begin(self, path: Path, chunks: list[Any], optimizer: Any, state: dict[str, Any]) -> None:
        """Copy model, optimizer (unless None) and JSON state, and start to write them to `path`.

        Raises:
            SaveError: The folder cannot be written; no partial files remain.
        """
        if self._save is not None:
            raise RuntimeError(f"{self._save.path}: still being written")
        token = groups.value_of_rank_0(f"{time.time_ns():x}")
        folder = path.with_name(f"{path.name}.{token}{_PARTIAL}")
        self._on_leader(path, lambda: _make(folder, path))
        tensors, common = save_preprocess(sharded_state(chunks, optimizer, loading=False))
        save = _Save(
            path=path,
            partial=folder,
            state=state,
            common=common,
            strategy=_Strategy(),
            records=_Mailbox(),
        )
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(save.strategy, group)
        request = compat.plan_save(strategy, tensors, folder)
        if request.async_fn is not None:
            request = request._replace(
                async_fn=partial(_write, request.async_fn, save.records, os.getpid()),
                preload_fn=partial(_host_copy, request.async_fn_args[1]),
            )
        request.add_finalize_fn(lambda: self._publish(save))
        self._save = save
        self._queue.schedule_async_request(request)

    def finish(self, *, wait: bool) -> Path | None:
        """Return the checkpoint that was begun if it is complete or `wait` is set; else None.

        Raises:
            SaveError: The checkpoint could not be written; no partial files remain.
        """
        save = self._save
        if save is None:
            return None
        try:
            if not self._queue.maybe_finalize_async_calls(blocking=wait, no_dist=False):
                return None
        except (CheckpointException, CheckpointingException) as error:
            self._save = None
            self._discard(save, error)
        except SaveError:
            self._save = None
            raise
        self._save = None
        return save.path

    def _publish(self, save: _Save) -> None:
        """Seal the folder and give it its name."""
        try:
            mine = save.records.get_nowait()
        except queue.Empty:  # this rank had nothing to write
            mine = {}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, gathered if self._is_main_rank else None)
        self._on_leader(save.path, lambda: _seal(save, gathered), save.partial)

    def _discard(self, save: _Save, error: BaseException) -> NoReturn:
        """Remove the written files; send a failure of rank 0 alone to all ranks."""

        def fail() -> None:
            raise error

        self._on_leader(save.path, fail, save.partial)
        raise error

    def _on_leader(
        self, path: Path, action: Callable[[], object], folder: Path | None = None
    ) -> None:
        """Let rank 0 act. If that fails, remove `folder` and raise SaveError on every rank."""
        reason = None
        if self._is_main_rank:
            try:
                action()
            except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
                reason = _why_not_written(error)
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                if reason is None:
                    raise
        reason = groups.value_of_rank_0(reason)
        if reason is not None:
            raise SaveError(
                f"checkpoint {path}: cannot be written ({reason}); older checkpoints are "
                "untouched: free disk space and start the same command again"
            )


def _make(folder: Path, path: Path) -> None:
    """Make a folder for the files of `path`; remove leftovers of interrupted saves."""
    old = _replaced(path)
    if old.is_dir() and not path.exists():
        old.rename(path)  # the save ended between its two renames
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def _replaced(path: Path) -> Path:
    """Return the path that holds the replaced checkpoint until the new one has its name."""
    return path.with_name(f"{path.name}.old{_PARTIAL}")


def _host_copy(buckets: list[Any]) -> list[Any]:
    """Copy tensors to pageable memory for the writing process.

    Megatron copies to pinned pages, and a fork shares pinned pages with its parent. Torch gives
    freed pages to the next batch, so the writing process would write tokens among the weights.
    The first write to a new page takes longer than a copy to a page that exists, so several
    threads do it before.
    """
    tensors = [tensor for *_, (_, data) in buckets for _, tensor in data if not tensor.is_cpu]
    with ThreadPoolExecutor(_THREADS) as threads:
        memory = threads.map(_pages, tensors)
        return [
            (file, key, (raw, [(item, _on_host(tensor, memory)) for item, tensor in data]))
            for file, key, (raw, data) in buckets
        ]


def _pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a tensor; every page has been written to."""
    return torch.empty_like(tensor, device="cpu").zero_()


def _on_host(tensor: torch.Tensor, memory: Iterator[torch.Tensor]) -> torch.Tensor:
    return tensor if tensor.is_cpu else next(memory).copy_(tensor)


def _write(
    write: Callable[..., None], records: _Mailbox, rank: int, *arguments: Any, **options: Any
) -> None:
    """Write with Megatron, then compute checksums; in a process forked by process `rank`."""
    if os.getpid() != rank:
        _leave(rank)
    write(*arguments, **options)
    buckets = arguments[1]  # (rank, write buckets, results queue)
    written = [Path(file) for file, *_ in buckets]
    if all(file.is_file() for file in written):
        records.put(checksums.records(written))


def _leave(rank: int) -> None:
    """Tie a forked process to its rank, and close the connections that it inherited.

    Other ranks notice the end of a rank when the last process with its sockets has ended. A fork
    has the rank's GPU handles too, so it must end with the rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides what Ctrl-C means
    signal.signal(signal.SIGCHLD, _end_after_a_kill)
    _end_with(rank)
    os.register_at_fork(after_in_child=partial(_end_with, os.getpid()))
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself is closed by now
            if int(name) > _STDERR and os.readlink(f"/proc/self/fd/{name}").startswith(
                _CONNECTIONS
            ):
                os.dup2(nothing, int(name))  # so that no written file gets the number


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; forks do not inherit the setting."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call


def _end_after_a_kill(_number: int, _frame: FrameType | None) -> None:
    """End this process when one of its forks was killed, for example for lack of memory.

    Megatron would wait for the result of that fork.
    """
    with contextlib.suppress(ChildProcessError):  # another caller has collected its end
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code != os.CLD_EXITED:
            os._exit(1)


def _seal(save: _Save, gathered: list[dict[str, checksums.FileRecord]]) -> None:
    """Write the last files on rank 0, and rename the folder."""
    if save.strategy.failure is not None:
        raise save.strategy.failure
    folder = save.partial
    torch.save(save.common, folder / COMMON_FILE)
    save_config(CheckpointingConfig(save.strategy.backend, save.strategy.version), str(folder))
    known = {name: record for records in gathered for name, record in records.items()}
    rest = [file for file in folder.iterdir() if file.name not in known]
    for file in rest:  # the writers have synchronised their own files
        durable.sync_file(file)
    seal(folder, save.state, known | checksums.records(rest))
    old = _replaced(save.path)
    if save.path.exists():
        shutil.rmtree(old, ignore_errors=True)
        save.path.rename(old)
    durable.publish(folder, save.path)
    shutil.rmtree(old, ignore_errors=True)


def _why_not_written(error: BaseException) -> str | None:
    """Return the storage's reason; None if the error is about something else."""
    text = str(error)
    if isinstance(error, CheckpointException):
        # only rank 0 knows the cause
        failures = [failure for failure, _ in error.failures.values()]
        text = _WRAPPING.sub("", str(failures[0])) if failures else "see rank 0"
    if text == _NOTHING_HEARD:
        return "a process that writes was killed; does the host lack memory?"
    if any(name in text for name in _TORCH_WRITER):
        return "a file could not be written whole; is the disk full?"
    if isinstance(error, OSError):
        return error.strerror or text
    return text if isinstance(error, CheckpointException | CheckpointingException) else None
