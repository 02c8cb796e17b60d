"""A checkpoint holds the weights of its own step, or does not exist."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dms_train.mcore import compat
from dms_train.mcore.checkpoints import optimizer_shards
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints import saving as checkpoint_saving
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.errors import DamagedError, SaveError
from dms_train.method.plan import LearningRate, StepPlan
from tests.support import tiny
from tests.support.descriptors import connections
from tests.support.disks import CannotArrange, small_disk

RATE = LearningRate(max_lr=1e-2, min_lr=1e-2, steps=9, warmup_steps=0, style="constant")
Build = Callable[..., McoreEngine]


@pytest.fixture
def engine(build: Build) -> McoreEngine:
    made = build("llama", "dms")
    made.begin_stage(RATE)
    step(made, 0)
    return made


def step(engine: McoreEngine, number: int) -> None:
    engine.train_step(StepPlan(step=number, loss="lm"), [tiny.batch(8 * number)])


def weights(engine: McoreEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def announce(link: Path) -> None:
    """Make a link that names this process, unless another process has made it."""
    with contextlib.suppress(FileExistsError):
        link.symlink_to(str(os.getpid()))


def announced(link: Path) -> int:
    """Wait for the first process that announces itself, and return its number."""
    while not link.is_symlink():
        time.sleep(0.01)
    return int(os.readlink(link))


def test_it_holds_the_weights_at_the_call_of_save(engine: McoreEngine, tmp_path: Path) -> None:
    path, at_save = tmp_path / "step_00000001", weights(engine)
    engine.save(path, {"step": 1}, wait=False)
    step(engine, 1)
    after = weights(engine)
    assert not equal(at_save, after)
    assert engine.finish_save(wait=True) == path
    assert engine.finish_save(wait=True) is None
    assert equal(weights(engine), after)
    assert engine.load(path, with_optimizer=True)["step"] == 1
    assert equal(weights(engine), at_save)
    step(engine, 1)
    assert equal(weights(engine), after)  # so the optimizer's state is of that moment too


def test_the_writing_process_holds_no_connection_and_ignores_ctrl_c(
    engine: McoreEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writing, go = tmp_path / "step_00000001", tmp_path / "writing", tmp_path / "go"

    def slow(_file: int) -> None:
        announce(writing)
        while not go.exists():
            time.sleep(0.01)

    try:
        with socket.socketpair()[0] as held, monkeypatch.context() as patched:
            patched.setattr(os, "fsync", slow)
            engine.save(path, {"step": 1}, wait=False)
            (child,) = multiprocessing.active_children()
            writer = announced(writing)
            own = os.readlink(f"/proc/self/fd/{held.fileno()}")
            assert own in connections(os.getpid())
            assert child.pid is not None
            for pid in (child.pid, writer):
                assert own not in connections(pid)
                os.kill(pid, signal.SIGINT)
    finally:
        go.touch()
    assert engine.finish_save(wait=True) == path


def test_the_writing_process_ends_with_its_rank() -> None:
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        ours = os.getpid()
        if os.fork() == 0:
            checkpoint_saving._leave(ours)
            os.write(write, b"ready")
        while True:
            time.sleep(1)
    os.close(write)
    assert os.read(read, 5) == b"ready"
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert select.select([read], [], [], 30)[0], "a process still holds the pipe"
    assert os.read(read, 1) == b""
    os.close(read)


@pytest.mark.timeout(120)
def test_a_killed_writing_process_fails_this_checkpoint_only(
    engine: McoreEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writing = tmp_path / "step_00000001", tmp_path / "writing"

    def slow(_file: int) -> None:
        announce(writing)
        while True:
            time.sleep(1)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", slow)
        engine.save(path, {"step": 1}, wait=False)
        os.kill(announced(writing), signal.SIGKILL)
    with pytest.raises(SaveError, match="a process that writes was killed"):
        engine.finish_save(wait=True)
    assert list(tmp_path.iterdir()) == [writing]
    engine.save(path, {"step": 1})
    assert engine.load(path, with_optimizer=True)["step"] == 1


def test_it_appears_whole_and_at_once(
    engine: McoreEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go, fsync = tmp_path / "writing", tmp_path / "go", os.fsync

    def slow(file: int) -> None:
        """Delay the call that the writing process makes at its end."""
        writing.touch()
        while not go.exists():
            time.sleep(0.01)
        fsync(file)

    path = tmp_path / "step_00000001"
    try:
        with monkeypatch.context() as patched, socket.socket():
            patched.setattr(os, "fsync", slow)
            engine.save(path, {"step": 1}, wait=False)
        (child,) = multiprocessing.active_children()
        while not writing.exists():
            time.sleep(0.01)
        # a process that writes, and what forked it, have let go before
        writers = [child.pid, *(p.pid for p in psutil.Process(child.pid).children(recursive=True))]
        assert [connections(pid) for pid in writers] == [[] for _ in writers]
        assert engine.finish_save(wait=False) is None
        (partial,) = tmp_path.glob("step_*")
        assert partial.suffix == ".partial"
        assert checkpoint.newest(tmp_path) == (None, [])
        with pytest.raises(DamagedError):
            engine.load(partial, with_optimizer=False)
    finally:
        go.touch()
    assert engine.finish_save(wait=True) == path
    assert list(tmp_path.glob("step_*")) == [path]


def test_the_copy_for_the_writing_process_is_not_pinned(
    engine: McoreEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[bool] = []
    move = torch.Tensor.to

    def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """A copy from a GPU to the host is pinned when it does not block."""
        if arguments[:1] == ("cpu",):
            pinned.append(options.get("non_blocking", False))
        return move(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    engine.save(tmp_path / "step_00000001", {"step": 1})
    assert pinned
    assert not any(pinned)


def test_saving_a_step_again_replaces_it(engine: McoreEngine, tmp_path: Path) -> None:
    path = tmp_path / "step_00000001"
    for turn in range(2):
        engine.save(path, {"turn": turn})
    assert engine.load(path, with_optimizer=True)["turn"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_interrupted_saves_left_is_removed_and_no_whole_checkpoint_lost(
    engine: McoreEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "megatron"
    engine.save_weights(path, {"turn": 0})
    (tmp_path / "megatron.1f.partial").mkdir()
    other = tmp_path / "megatron2.1f.partial"
    other.mkdir()
    path.rename(tmp_path / "megatron.old.partial")  # what a kill between the two renames leaves

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_saving, "save_config", full)
        with pytest.raises(SaveError):
            engine.save_weights(path, {"turn": 1})
    assert engine.load(path, with_optimizer=False)["turn"] == 0
    (tmp_path / "megatron.old.partial" / "sub").mkdir(parents=True)
    engine.save_weights(path, {"turn": 2})
    assert engine.load(path, with_optimizer=False)["turn"] == 2
    assert sorted(tmp_path.iterdir()) == [path, other]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a folder with room for so many kibibytes."""
    mounted = []

    def mount(kibibytes: int) -> Path:
        try:
            mounted.append(small_disk(tmp_path / "disk", kibibytes))
            return mounted[0].__enter__()
        except CannotArrange as reason:
            mounted.clear()
            pytest.skip(str(reason))

    yield mount
    for manager in mounted:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("share", "wait"), [(0.02, True), (0.5, False), (0.97, True), (0.999, False)]
)
def test_a_full_disk_fails_this_checkpoint_only(
    engine: McoreEngine, tmp_path: Path, disk: Callable[[int], Path], share: float, wait: bool
) -> None:
    whole, kept = tmp_path / "step_00000001", weights(engine)
    engine.save(whole, {"step": 1})
    size = sum(-(-file.stat().st_size // 4096) * 4 for file in whole.iterdir())
    folder = disk(int(size * (1 + share)) // 4 * 4)
    first = folder / "step_00000001"
    engine.save(first, {"step": 1})
    step(engine, 1)

    def save() -> None:
        engine.save(folder / "step_00000002", {"step": 2}, wait=wait)
        engine.finish_save(wait=True)

    with pytest.raises(SaveError, match=r"step_00000002: cannot be written \(.*\); older checkpoi"):
        save()
    assert list(folder.iterdir()) == [first]
    step(engine, 2)
    engine.load(first, with_optimizer=True)
    assert equal(weights(engine), kept)
    engine.save(tmp_path / "step_00000003", {"step": 3})  # the next one has workspace
    assert checkpoint.newest(tmp_path)[0] == tmp_path / "step_00000003"


def optimizer_state(engine: McoreEngine) -> list[torch.Tensor]:
    return [
        entry[name].clone()
        for part in compat.optimizer_parts(engine._optimizer)
        for entry in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_in_megatrons_own_form_is_read_alike(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    engines = [build("qwen2", "dms", dtype) for _ in range(3)]
    for engine in engines:
        engine.begin_stage(RATE)
    step(engines[0], 0)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer_shards, "keep_shards", lambda optimizer: None)
        engines[0].save(tmp_path / "megatron", {})
    for part in compat.optimizer_parts(engines[0]._optimizer):
        part.get_parameter_state_dp_zero = None  # what gathers
    engines[0].save(tmp_path / "blocks", {})
    for engine, name in zip(engines[1:], ("megatron", "blocks"), strict=True):
        engine.load(tmp_path / name, with_optimizer=True)
        assert equal(weights(engine), weights(engines[0]))
        found = zip(optimizer_state(engine), optimizer_state(engines[0]), strict=True)
        assert all(torch.equal(one, other) for one, other in found)
