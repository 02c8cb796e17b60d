"""Waiting ranks: time limits, warnings and shared refusals."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dms_train.app.memory_check import check_memory
from dms_train.cli import errors
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError
from dms_train.mcore import groups
from dms_train.mcore.footprint import own_memory
from dms_train.mcore.options import ParallelOptions
from dms_train.method.plan import StepPlan
from tests.support import configs, launch, stalls, tiny
from tests.support.meeting import meet
from tests.support.ranks import run_ranks, values_of_ranks
from tests.support.resume_runs import build

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
TIMEOUT_SECONDS = 4.0
FAILURES = {"refusal": ConfigError, "bug": TypeError}
EXTRA_BYTES = 2**28


def wait_for_rank_0(seconds: float) -> None:
    """Rank 0 works for longer than the process group waits."""
    meet()
    view = groups.start(ParallelOptions(distributed_timeout_minutes=TIMEOUT_SECONDS / 60), 0)
    begin = time.monotonic()

    def work() -> dict[str, float]:
        time.sleep(seconds)
        return {"rank": float(view.rank)}

    found = groups.of_rank_0(work)
    assert found == {"rank": 0.0}
    assert time.monotonic() - begin >= seconds
    assert groups.value_of_rank_0(view.rank) == 0  # the training's group is as it was
    groups.stop()


def end_while_rank_0_fails(failure: str) -> None:
    """Rank 0 ends with a failure while a collective of its is in flight."""
    errors.run_process(partial(fail_on_rank_0, FAILURES[failure]))


def fail_on_rank_0(failure: type[Exception]) -> None:
    """Rank 1 never joins the collective of rank 0."""
    view = groups.start(ParallelOptions(distributed_timeout_minutes=60), 0)
    dist.barrier()
    if view.rank == 0:
        dist.all_reduce(torch.ones(1000), async_op=True)
        raise failure("rank 0 has a reason")
    while True:  # until the launcher, which has lost rank 0, ends this one
        time.sleep(1)


def check_unequal_gpus(gib: float) -> int:
    """Rank 1 has a smaller GPU, of `gib` GiB, as its driver would report."""
    view = groups.start(ParallelOptions(distributed_timeout_minutes=0.5), seed=1)
    name, size = {0: ("NVIDIA H200", 139.0), 1: ("NVIDIA A100", gib)}[view.rank]
    found = SimpleNamespace(name=name, total_memory=int(size * 2**30))
    torch.cuda.get_device_properties = lambda _device: found  # type: ignore[assignment, return-value]
    config = configs.config(parallel__params_dtype="bf16", data__seq_length=8192)

    def check() -> None:
        try:
            on_gpu = replace(view, device=torch.device("cuda"))
            check_memory(config, configs.KNOWN["qwen_r1_1_5b"], on_gpu, validates=False)
            groups.value_of_rank_0(None)  # a rank that continues needs the other
        finally:
            groups.stop()

    return run_main(check)


def measure_memory() -> None:
    """Rank 1 holds more memory than rank 0."""
    view = groups.start(ParallelOptions(tensor_model_parallel_size=2), seed=1)
    engine = build("tp2", "fp32", view, 1)
    extra = torch.ones(view.rank * EXTRA_BYTES // 4)
    before = torch.tensor([own_memory(view.device), 0.0, 0.0], dtype=torch.float64)
    plan = StepPlan(step=0, stage_step=0, eviction="soft", channel_scale=0.0, target_cr=4.0)
    result = engine.train_step(plan, [tiny.batch(0)])
    found = [torch.empty(3, dtype=torch.float64) for _ in range(2)]
    before[1:] = torch.tensor([own_memory(view.device), result.memory_bytes])
    dist.all_gather(found, before)
    least, most = found[1][:2].tolist()
    assert least > found[0][1].item(), "the extra memory is not counted"
    assert found[0][2] == found[1][2], "the ranks report different values"
    assert least <= result.memory_bytes <= 1.1 * most
    assert len(extra) == view.rank * EXTRA_BYTES // 4  # held until here
    groups.stop()


def test_a_wait_for_rank_0_may_exceed_the_timeout_of_the_process_group() -> None:
    values_of_ranks(wait_for_rank_0, 2, 3 * TIMEOUT_SECONDS)


def test_a_slow_rank_is_not_a_stalled_rank(tmp_path: Path) -> None:
    result = run_ranks(stalls.patient, 2, tmp_path)
    launch.checked(result)
    (message,) = re.findall("warning: rank 1 has waited .*$", result.stderr, re.MULTILINE)
    assert re.search(r"; rank 0 \(\S+, after step 0\) is at \S+:\d+ in ", message)


def test_ranks_that_wait_for_each_other_report_where(tmp_path: Path) -> None:
    result = run_ranks(stalls.deadlock, 2, tmp_path)
    assert result.returncode != 0
    message = re.findall("^error: .*$", result.stderr, re.MULTILINE)
    assert re.search(
        r"all ranks wait for each other, or for their GPUs, for more than 6 s: ranks 0-1 at "
        r"torch/distributed/distributed_c10d.py:\d+ in barrier; stacks in ",
        message[0],
    )


@pytest.mark.parametrize(
    ("failure", "code", "message"), [("refusal", 2, "config error"), ("bug", 1, "TypeError")]
)
def test_a_rank_that_fails_waits_for_no_collective(failure: str, code: int, message: str) -> None:
    result = run_ranks(end_while_rank_0_fails, 2, failure, timeout=120)
    assert result.returncode == code
    assert f"{message}: rank 0 has a reason" in result.stderr


def test_all_ranks_refuse_a_run_that_does_not_fit_one_gpu() -> None:
    result = run_ranks(check_unequal_gpus, 2, 20.0)
    assert result.returncode != 0
    # rank 1 prints it as well where the launcher takes long to end it
    message, *_ = re.findall("^.*error: .*$", result.stderr, re.MULTILINE)
    assert message.startswith("config error: rank 1 has a NVIDIA A100 with 20.0 GiB: parallel: ")
    assert "more than the 20.0 GiB of a NVIDIA A100" in message


def test_different_gpus_that_fit_the_run_are_accepted() -> None:
    values_of_ranks(check_unequal_gpus, 2, 79.0)


def test_the_memory_of_a_step_is_that_of_the_fullest_rank() -> None:
    values_of_ranks(measure_memory, 2)
