"""The CPU stand-ins for torch.cuda are installed and removed completely."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from dms_train.mcore import groups, runtime
from dms_train.mcore.options import ParallelOptions
from tests.support import launch

NAMES: list[tuple[Any, str]] = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda.random, "get_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (torch.distributed.distributed_c10d, "ProcessGroupGloo"),
]


def found() -> list[Any]:
    return [getattr(owner, name) for owner, name in NAMES]


@pytest.fixture
def cpu() -> Any:
    """The runtime as `start` leaves it."""
    yield runtime.start()
    runtime.stop()


def test_start_replaces_and_stop_restores_every_name() -> None:
    before = found()
    filters = list(logging.getLogger(megatron_random.__name__).filters)
    assert runtime.start() == torch.device("cpu")
    assert all(now is not then for now, then in zip(found(), before, strict=True))
    runtime.stop()
    assert all(now is then for now, then in zip(found(), before, strict=True))
    assert logging.getLogger(megatron_random.__name__).filters == filters
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_starting_twice_is_starting_once() -> None:
    before = found()
    runtime.start()
    once = found()
    runtime.start()
    assert found() == once
    runtime.stop()
    runtime.stop()
    assert found() == before


def test_cuda_means_cpu_in_between(cpu: torch.device) -> None:
    made = [
        torch.zeros(1, device="cuda"),
        torch.zeros(1, device=torch.device("cuda", 0)),
        torch.zeros(1, device=torch.cuda.current_device()),
        torch.zeros(1).cuda(),
        torch.zeros(1).to(device="cuda"),
    ]
    assert {tensor.device for tensor in made} == {cpu}
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"


def test_with_a_gpu_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    before = found()
    assert runtime.start() == torch.device("cuda", 3)
    assert found() == before
    runtime.stop()
    assert found() == before


def test_forked_draws_are_a_stream_of_their_own() -> None:
    groups.start(ParallelOptions(), seed=0)
    try:
        outside = torch.Generator().manual_seed(0)
        inside = torch.Generator().manual_seed(2718)  # megatron's offset, tensor-parallel rank 0
        torch.manual_seed(0)
        for _ in range(3):
            assert torch.equal(torch.rand(2), torch.rand(2, generator=outside))
            with get_cuda_rng_tracker().fork():
                assert torch.equal(torch.rand(2), torch.rand(2, generator=inside))
    finally:
        groups.stop()
        runtime.stop()


def test_groups_can_be_laid_out_again_after_stop() -> None:
    for _ in range(2):
        view = groups.start(ParallelOptions(), seed=1)
        assert (view.world_size, view.tp_size, view.pp_size, view.dp_size) == (1, 1, 1, 1)
        assert view.is_last_stage
        assert view.reports
        groups.stop()
    assert not torch.distributed.is_initialized()
    runtime.stop()


def test_groups_on_a_cpu_share_one_device_and_keep_their_own_timeouts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import datetime, pathlib
import torch, torch.distributed as dist
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions

view = groups.start(ParallelOptions(distributed_timeout_minutes=3.0), seed=0)
own = dist.new_group(timeout=datetime.timedelta(seconds=50))
for group in (view.tp_group, own):
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]
for group, seconds in ((dist.group.WORLD, 180), (own, 50)):
    timeout = group._get_backend(view.device).options._timeout
    assert timeout.total_seconds() == seconds
tasks = pathlib.Path("/proc/self/task").iterdir()
names = [(task / "comm").read_text().strip() for task in tasks]
assert names.count("gloo_tcp_loop") == 1, names
""")
    launch.checked(launch.module("tests.support.run_file", str(script)))
