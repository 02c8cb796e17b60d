"""Who stands still is told from who goes on, and who waits for others from who does not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dms_train.observe.main_thread import MainThread, Stand

_LOOKS = 4
_EVERY = 0.2


class Watcher(threading.Thread):
    """Looks a few times at the main thread, which does something until the last look."""

    def __init__(self, reached: Callable[[int], object] = lambda look: 0) -> None:
        super().__init__()
        self.seen: list[Stand] = []
        self.done = threading.Event()
        self.reading, self.writing = os.pipe()
        self._reached = reached
        self._standing = threading.Event()

    def run(self) -> None:
        self._standing.wait()
        time.sleep(_EVERY)
        main = MainThread()
        for look in range(_LOOKS):
            self.seen.append(main.look(self._reached(look), 10.0))
            time.sleep(_EVERY)
        self.done.set()
        os.write(self.writing, b"x")

    def watch(self, action: Callable[[Watcher], Any]) -> list[Stand]:
        self.start()
        self._standing.set()
        action(self)
        self.join()
        os.close(self.reading)
        os.close(self.writing)
        return self.seen


def read_a_disk_that_does_not_answer(watcher: Watcher) -> None:
    os.read(watcher.reading, 1)


def wait_for_a_lock(watcher: Watcher) -> None:
    watcher.done.wait()


def compute(watcher: Watcher) -> None:
    while not watcher.done.is_set():
        pass


def multiply(watcher: Watcher) -> None:
    a = torch.ones(1200, 1200)
    while not watcher.done.is_set():
        torch.mm(a, a)  # one instruction, at which the thread nearly always is


def wait_for_a_process(watcher: Watcher) -> None:
    subprocess.run(["head", "-c1"], stdin=watcher.reading, capture_output=True, check=True)


@pytest.mark.parametrize(
    ("action", "place"),
    [
        (read_a_disk_that_does_not_answer, "in read_a_disk_that_does_not_answer"),
        (wait_for_a_lock, "threading.py"),
    ],
)
def test_who_waits_for_a_disk_or_a_lock_stands(action: Any, place: str) -> None:
    seen = Watcher().watch(action)
    assert seen[0].kind == "works"  # nobody knows yet
    assert seen[-1].kind == "stands"
    assert 0 < seen[-2].seconds < seen[-1].seconds
    assert place in seen[-1].place


@pytest.mark.parametrize("action", [compute, multiply, wait_for_a_process])
def test_who_computes_or_waits_for_its_own_process_works(action: Any) -> None:
    assert {stand.kind for stand in Watcher().watch(action)} == {"works"}


def test_who_reached_something_between_two_looks_went_on() -> None:
    seen = Watcher(reached=lambda look: look).watch(read_a_disk_that_does_not_answer)
    assert {stand.kind for stand in seen} == {"works"}


@pytest.mark.parametrize("module", ["dms_train.hf.durable", "torch.nn.functional"])
def test_one_short_call_after_the_other_is_no_long_one(module: str) -> None:
    names = {"__name__": module, "os": os}
    exec("def write(watcher):\n    return os.read(watcher.reading, 1)\n", names)
    end = False

    def write_many(watcher: Watcher) -> None:
        while not end:
            names["write"](watcher)  # type: ignore[operator]

    def next_one(look: int) -> int:
        nonlocal end
        end = look == _LOOKS - 1
        os.write(watcher.writing, b"x")
        time.sleep(_EVERY)
        return 0

    watcher = Watcher(reached=next_one)
    seen = watcher.watch(write_many)
    assert {stand.kind for stand in seen} == {"works"}
    assert all(" in write" in stand.place for stand in seen[:-1])


def test_a_pause_of_the_process_counts_for_little() -> None:
    watcher = Watcher()
    seen: list[Stand] = []

    def run() -> None:
        main = MainThread()
        time.sleep(_EVERY)
        seen.extend(main.look(0, at_most) for at_most in (10.0, 0.0, 1e-9))
        os.write(watcher.writing, b"x")

    thread = threading.Thread(target=run)
    thread.start()
    os.read(watcher.reading, 1)
    thread.join()
    assert seen[-1].seconds <= 1e-9


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("torch.distributed.distributed_c10d", "waits"),
        ("megatron.core.pipeline_parallel.p2p_communication", "waits"),
        ("dms_train.mcore.groups", "waits"),
        ("torch.distributed.checkpoint.filesystem", "stands"),
        ("megatron.core.datasets.indexed_dataset", "stands"),
        ("dms_train.mcore.checkpoint_saving", "stands"),
        ("dms_train.data.tokens", "stands"),
        ("torchvision", "stands"),
        ("multiprocessing.popen_fork", "works"),
    ],
)
def test_the_module_of_the_innermost_function_tells_for_what_it_waits(
    module: str, kind: str
) -> None:
    names = {"__name__": module, "os": os}
    exec("def wait(watcher):\n    os.read(watcher.reading, 1)\n", names)
    assert Watcher().watch(names["wait"])[-1].kind == kind  # type: ignore[arg-type]


def test_the_modules_that_are_named_exist() -> None:
    import importlib.util

    from dms_train.observe import main_thread

    absent = {"transformer_engine", "apex", "triton", "triton.runtime.cache"}  # on a GPU only
    for module in {*main_thread._COMPUTES, *main_thread._FILES} - absent:
        assert importlib.util.find_spec(module) is not None, module
