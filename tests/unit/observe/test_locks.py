"""One process holds a lock; what a process that is gone has left is taken over."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dms_train.app import launcher
from dms_train.observe import locks, processes
from dms_train.observe.locks import Holder, LockedError, held

WHAT = "run.dir=R"
FORK = multiprocessing.get_context("fork")
ELSEWHERE = Holder(host="node7", pid=12, since="then", process="other-boot pid:[1] 12 34")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "lock"


def _hold(path: Path, pipe: Connection) -> None:
    with held(path, WHAT):
        pipe.send("ready")
        pipe.recv()


@contextmanager
def holder(path: Path) -> Iterator[BaseProcess]:
    """Another process that holds the lock."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(path, theirs))
    process.start()
    assert ours.recv() == "ready"
    try:
        yield process
    finally:
        ours.send("done")
        process.join(60)


def write(path: Path, left: Holder, age: float = 0.0) -> None:
    """Write the file that a holder left, not touched for so many seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(left)))
    os.utime(path, (time.time() - age,) * 2)


def refused(path: Path) -> str:
    with pytest.raises(LockedError) as error, held(path, WHAT):
        pass
    return str(error.value)


def test_a_second_process_is_refused_until_the_first_ends(path: Path) -> None:
    with holder(path) as process:
        line = refused(path)
        assert line.startswith(
            f"{WHAT}: already in use by process {process.pid} on {socket.gethostname()}, since 20"
        )
        assert line.endswith("wait until it ends, stop it, or choose another folder")
    with held(path, WHAT):
        assert Holder.read(path.read_text()).pid == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_an_error_releases_the_lock(path: Path) -> None:
    with pytest.raises(RuntimeError), held(path, WHAT):
        raise RuntimeError
    with held(path, WHAT):
        pass


def test_the_lock_of_a_killed_process_is_taken_over_at_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(path) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        with held(path, WHAT):
            assert Holder.read(path.read_text()).pid == os.getpid()
    assert f"process {process.pid} on" in caplog.text
    assert "taken over" in caplog.text


def test_a_process_with_the_number_of_the_one_that_ended_is_another_one(path: Path) -> None:
    machine, pid, start = processes.mark().rsplit(" ", 2)
    write(path, replace(Holder.this(), process=f"{machine} {pid} {int(start) - 1}"))
    with held(path, WHAT):
        pass


def test_a_process_that_runs_keeps_its_lock_however_old_it_is(path: Path) -> None:
    """A stopped process does not touch its lock, and goes on later."""
    with holder(path) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.utime(path, (time.time() - 10_000,) * 2)
        assert f"process {process.pid}" in refused(path)
        os.kill(process.pid, signal.SIGCONT)


def test_another_machine_keeps_its_lock_while_it_touches_it(path: Path) -> None:
    write(path, ELSEWHERE, age=170)
    line = refused(path)
    assert f"{WHAT}: already in use by process 12 on node7, since then" in line
    assert f"start again after 3 min ({path})" in line
    write(path, ELSEWHERE, age=190)
    with held(path, WHAT):
        pass


@pytest.mark.parametrize(
    ("left", "now", "taken"),
    [
        ("7.0", "7.1", True),
        ("7.9", "7.10", True),
        ("7.1", "7.1", False),
        ("7.1", "7.0", False),
        ("7.0", "8.1", False),
        ("", "7.1", False),
        ("7.0", "", False),
    ],
)
def test_a_job_that_slurm_starts_again_takes_the_lock_of_its_earlier_start(
    path: Path, left: str, now: str, taken: bool
) -> None:
    write(path, replace(ELSEWHERE, job=left))
    if taken:
        with held(path, WHAT, now):
            assert Holder.read(path.read_text()).job == now
    else:
        with pytest.raises(LockedError), held(path, WHAT, now):
            pass


def test_the_job_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launcher.job() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launcher.job() == "7.0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert launcher.job() == "7.2"


def test_a_lock_without_a_description_is_respected_while_it_is_new(path: Path) -> None:
    """Its process is about to write it, or found a full disk."""
    path.parent.mkdir()
    path.touch()
    assert "process 0 on an unknown machine" in refused(path)
    os.utime(path, (time.time() - 1000,) * 2)
    with held(path, WHAT):
        pass


def test_the_holder_touches_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_EVERY_SECONDS", 0.01)
    with held(path, WHAT):
        os.utime(path, (1, 1))
        end = time.monotonic() + 60
        while path.stat().st_mtime == 1:
            assert time.monotonic() < end
            time.sleep(0.01)


def _compete(path: Path, start: Any, inside: Any, counts: Any) -> None:
    start.wait()
    try:
        with held(path, WHAT):
            with inside.get_lock():
                inside.value += 1
                counts.append(inside.value)
            time.sleep(0.05)
            with inside.get_lock():
                inside.value -= 1
    except LockedError:
        pass


def test_of_processes_that_find_a_stale_lock_one_at_a_time_holds_it(path: Path) -> None:
    with FORK.Manager() as manager:
        inside, counts = FORK.Value("i", 0), manager.list()
        for _ in range(5):
            write(path, ELSEWHERE, age=1000)
            start = FORK.Event()
            arguments = (path, start, inside, counts)
            racing = [FORK.Process(target=_compete, args=arguments) for _ in range(6)]
            for process in racing:
                process.start()
            start.set()
            for process in racing:
                process.join(60)
        assert len(counts) >= 5
        assert set(counts) == {1}


def test_a_process_that_was_slow_leaves_the_lock_of_a_faster_one_in_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it moved for a moment only, a third process could create a lock of its own."""
    write(path, ELSEWHERE, age=1000)
    is_stale, rename, faster = locks._is_stale, Path.rename, ExitStack()
    this = os.getpid()

    def slow(left: Holder, age: float, own: Holder) -> bool:
        stale = is_stale(left, age, own)
        if left == ELSEWHERE and os.getpid() == this:
            faster.enter_context(holder(path))
        return stale

    def watched(source: Path, target: Path) -> Path:
        assert os.getpid() != this or source != path, "the lock of the faster process was moved"
        return rename(source, target)

    monkeypatch.setattr(locks, "_is_stale", slow)
    monkeypatch.setattr(Path, "rename", watched)
    with faster:
        assert "already in use by process" in refused(path)
        assert Holder.read(path.read_text()).pid != os.getpid()
    assert list(path.parent.iterdir()) == []
