"""Checkpoints written while training continues, beside those that training waits for.

`moved` continues in another layout what `overlap` saved. `killed` holds the writers of its second
checkpoint and trains until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor

from dms_train.mcore import groups
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints import saving as checkpoint_saving
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.schedule import optimizer as optim
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.descriptors import connections

HALF, STEPS = 2, 4
RATE = LearningRate(max_lr=1e-4, min_lr=1e-5, steps=STEPS, warmup_steps=2, style="cosine")
SPEC = PRESETS["dms"].override(window=8, alpha_offset=0.5)
_PATIENCE = 60.0
Case = dict[str, Any]
Content = dict[tuple[Any, ...], Tensor]


def build(case: Case, view: ParallelView, seed: int) -> McoreEngine:
    architecture = tiny.architecture("qwen2", **case["architecture"])
    options = TrainEngineOptions(
        parallel=ParallelOptions(layers="local", **case["parallel"]),
        optim=OptimOptions(lr=1e-4, weight_decay=0.01),
        seed=7,
    )
    std = 0.8 / architecture.hidden_size**0.5
    student = tiny.SmallEvictionChannels(architecture, seed, SPEC.channel, std=std)
    engine = McoreEngine(architecture, SPEC, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, std))
    engine.begin_stage(RATE)
    return engine


def batches(engine: McoreEngine, case: Case, step: int) -> list[Any]:
    view, vocab = engine.view, engine.architecture.vocab_size
    return [
        tiny.batch(8 * step + 2 * group, length=case["length"], vocab=vocab)
        for group in range(view.dp_rank, 4, view.dp_size)
    ]


def train(
    engine: McoreEngine, case: Case, first: int, last: int, after: Callable[[], None] | None = None
) -> list[dict[str, float]]:
    """Steps first .. last - 1, each on its own samples; `after` is called after every step."""
    rows = []
    for step in range(first, last):
        plan = StepPlan(
            step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0
        )
        result = engine.train_step(plan, batches(engine, case, step))
        assert not result.skipped
        names = ("loss", "token_loss", "aux_loss", "alpha", "grad_norm")
        rows.append({name: getattr(result, name) for name in names})
        if after is not None:
            after()
    return rows


def content(engine: McoreEngine) -> Content:
    """Copies of all that a checkpoint takes from this rank, by name and place."""
    optim.wait_for_param_gather(engine._chunks)
    state = checkpoint.sharded_state(engine._chunks, engine._optimizer, loading=False)
    tensors, _ = save_preprocess(state)
    return {
        (part.key, tuple(part.global_offset)): part.data.detach().cpu().clone()
        for part in nested_values(tensors)
        if isinstance(part, ShardedTensor)
    }


def same(found: Content, expected: Content) -> list[str]:
    """Names of what is not equal bit for bit."""
    assert found.keys() == expected.keys()
    return [str(name) for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def processes_below(pid: int) -> list[int]:
    """All that this process and its children have started."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in listed for child in file.read_text().split()]
    return children + [below for child in children for below in processes_below(child)]


def status(pid: int) -> str:
    """One letter, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextlib.contextmanager
def writers_that_stop() -> Iterator[None]:
    """Forked processes stop when they have left their rank, before they write anything."""
    leave = checkpoint_saving._leave

    def left(rank: int) -> None:
        leave(rank)
        os.kill(os.getpid(), signal.SIGSTOP)

    with mock.patch.object(checkpoint_saving, "_leave", left):
        yield


def overlap(case: Case, view: ParallelView, out: Path) -> dict[str, Any]:
    """Save twice after half of the steps, once with the writers held during the other half."""
    waited, background = out / "waited", out / "background"
    engine = build(case, view, 1)
    rows = train(engine, case, 0, HALF)
    expected = content(engine)
    engine.save(waited, {"step": HALF})
    with writers_that_stop():
        engine.save(background, {"step": HALF}, wait=False)
    writers = [process.pid for process in multiprocessing.active_children()]
    wait_for(lambda: all(status(pid) == "T" for pid in writers))
    held = [name for pid in writers for name in connections(pid)]

    def still_written() -> None:
        assert engine.finish_save(wait=False) is None

    rows += train(engine, case, HALF, STEPS, still_written)
    for pid in writers:
        os.kill(pid, signal.SIGCONT)
    assert engine.finish_save(wait=True) == background
    at_end = content(engine)
    outcome = {
        "rows": rows,
        "tensors": len(expected),
        "bytes": sum(t.numel() * t.element_size() for t in expected.values()),
        "moved": len(same(at_end, expected)),
        "writers": len(writers),
        "connections": held,
    }
    del engine
    for path in (waited, background):
        engine = build(case, view, 55)
        assert engine.load(path, with_optimizer=True)["step"] == HALF
        outcome[f"{path.name}: not as saved"] = same(content(engine), expected)
        outcome[f"{path.name}: rows"] = train(engine, case, HALF, STEPS)
        outcome[f"{path.name}: not as continued"] = same(content(engine), at_end)
    return outcome


def moved(case: Case, view: ParallelView, out: Path) -> dict[str, Any]:
    """The other half of the steps, from the checkpoint of another case."""
    engine = build(case, view, 55)
    engine.load(out.parent / case["source"] / "background", with_optimizer=True)
    return {"rows": train(engine, case, HALF, STEPS)}


def killed(case: Case, view: ParallelView, out: Path) -> None:
    """A checkpoint; then another one, whose writers stop, and training that does not end."""
    engine = build(case, view, 1)
    train(engine, case, 0, HALF)
    engine.save(out / f"step_{HALF:08d}", {"step": HALF})
    train(engine, case, HALF, HALF + 1)

    def stop(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", staticmethod(stop)):
        engine.save(out / f"step_{HALF + 1:08d}", {"step": HALF + 1}, wait=False)
    (first,) = [process.pid for process in multiprocessing.active_children()]
    wait_for(lambda: "T" in [status(pid) for pid in processes_below(first)])
    found = {"rank": os.getpid(), "writers": [first, *processes_below(first)]}
    partial = out / f"writing-{view.rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(out / f"writing-{view.rank}.json")
    while True:
        train(engine, case, HALF + 1, STEPS)


def resumed(case: Case, view: ParallelView, out: Path) -> dict[str, Any]:
    """The newest checkpoint that is whole, continued; beside all steps in one go."""
    engine = build(case, view, 1)
    whole = train(engine, case, 0, STEPS)
    newest, passed = checkpoint.newest(out)
    assert newest is not None
    engine = build(case, view, 55)
    state = engine.load(newest, with_optimizer=True)
    rows = train(engine, case, state["step"], STEPS)
    return {"newest": newest.name, "passed": passed, "whole": whole, "rows": rows}


def work(what: str, cases: list[Case], out: Path) -> None:
    """Run one of the functions above for all cases; rank 0 writes what they return."""
    action = {"overlap": overlap, "moved": moved, "killed": killed, "resumed": resumed}[what]
    for case in cases:
        torch.use_deterministic_algorithms(case["exact"], warn_only=True)
        view = groups.start(ParallelOptions(**case["parallel"]), seed=1)
        folder = out / case["name"]
        if view.rank == 0:
            folder.mkdir(exist_ok=True)
        groups.value_of_rank_0(None)
        gathered = groups.values(action(case, view, folder))
        if view.rank == 0:
            (folder / f"{what}.json").write_text(json.dumps(gathered))
        groups.stop(keep_process_group=True)
    groups.stop()
