"""One case of the benchmark `train_step` in this process, or in this rank of torchrun.

    python -m benchmarks.train_step.case CASE.json RESULT.json

Every case has its own process, so that its peak memory does not include another case.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import timing
from benchmarks.train_step import kernel_times
from benchmarks.train_step.shapes import METHODS, SHAPES, Case
from dms_train.app import launcher
from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import WeightSource
from dms_train.mcore.options import OptimOptions, ParallelOptions, Trainable
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS

Step = Callable[[], float]
_STD = 0.02
_PACKAGES = ("megatron-core", "transformer-engine", "apex")


class DeviceWeights(WeightSource):
    """Random weights drawn on the model's device, seconds faster per billion than on the CPU."""

    def __init__(self, architecture: Architecture, seed: int, device: torch.device) -> None:
        self._shapes = expected_shapes(architecture)
        self._seed, self._device = seed, device

    def get(self, name: str) -> Tensor:
        """Draw the tensor with this Hugging Face name, the same on every rank."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(
            self._seed + zlib.crc32(name.encode())
        )
        return torch.randn(shape, generator=generator, device=self._device).mul_(_STD)


def parallel_options(case: Case, device: torch.device) -> ParallelOptions:
    """Return the trainer's options for a case."""
    layout, mlp = case.layout, case.recompute == "mlp"
    return ParallelOptions(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vp,
        num_layers_in_last_pipeline_stage=layout.last,
        sequence_parallel=layout.sp,
        tp_comm_overlap=layout.overlap,
        fp8=case.fp8,
        params_dtype="bf16" if device.type == "cuda" else "fp32",
        recompute_granularity="selective" if mlp else case.recompute,
        recompute_modules=("mlp" if mlp else "core_attn",),
        cuda_graph=case.cuda_graph,
        layers=case.layers,
    )


def random_batches(case: Case, rank: int) -> list[Batch]:
    """Draw a data-parallel rank's microbatches of one step, on the host as from the data loader."""
    architecture, length, size = SHAPES[case.shape]
    generator = torch.Generator().manual_seed(rank)
    shape = (size, length + 1)
    batches = []
    for number in range(case.microbatches):
        tokens = torch.randint(0, architecture.vocab_size, shape, generator=generator)
        first = (rank * case.microbatches + number) * size
        batches.append(
            Batch(
                tokens=tokens[:, :-1].contiguous(),
                labels=tokens[:, 1:].contiguous(),
                loss_mask=torch.ones(size, length),
                samples=torch.arange(first, first + size),
            )
        )
    return batches


def step_of_ours(case: Case, view: ParallelView, parallel: ParallelOptions) -> Step:
    """Build the engine's own training step."""
    architecture = SHAPES[case.shape][0]
    spec = PRESETS[case.kind if case.kind in METHODS else "dms"]
    if case.shape == "tiny" and spec.window:
        spec = spec.override(window=16)
    trainable = Trainable(weights=case.trains)
    options = TrainEngineOptions(
        parallel=parallel,
        optim=OptimOptions(lr=1e-5, offload=case.offloads_optimizer, state_dtype=case.state_dtype),
        seed=1,
        trainable=trainable,
        offloads_teacher=case.offloads,
    )
    engine = McoreEngine(
        architecture, spec, view, options, DeviceWeights(architecture, 1, view.device)
    )
    if case.kind != "lm":
        # frozen weights are shared with the teacher
        own = DeviceWeights(architecture, 2, view.device) if case.trains == "all" else None
        engine.attach_teacher(own)
    if case.kind in METHODS:
        engine.reset_eviction_channel()
    rate = LearningRate(max_lr=1e-5, min_lr=1e-5, steps=1000, warmup_steps=0, style="constant")
    engine.begin_stage(rate)
    settings: dict[str, Any] = {"loss": "lm" if case.kind == "lm" else "distill"}
    if case.kind in METHODS:
        settings |= {"eviction": "soft", "channel_scale": 0.0, "target_cr": 4.0}
    batches, taken = random_batches(case, view.dp_rank), iter(range(1000))

    def step() -> float:
        number = next(taken)
        plan = StepPlan(step=number, stage_step=number, **settings)
        return engine.train_step(plan, batches).loss

    return step


def _build(case: Case, view: ParallelView, parallel: ParallelOptions) -> Step:
    if case.subject == "ours":
        return step_of_ours(case, view, parallel)
    from benchmarks.train_step import peer as train_step_peer

    batches = random_batches(case, view.dp_rank)
    return train_step_peer.step_of_peer(case, view, parallel, batches)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(step: Step, device: torch.device) -> float:
    _synchronize(device)
    since = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - since


def measure(case: Case) -> dict[str, Any]:
    """Measure times, memory and the loss before and after, the same on every rank."""
    parallel = parallel_options(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    view = groups.start(parallel, seed=1)
    since = time.perf_counter()
    step = _build(case, view, parallel)
    losses = [step() for _ in range(case.warmup)]
    ready = time.perf_counter() - since
    times = sorted(_seconds(step, view.device) for _ in range(case.steps))
    losses.append(step())
    row = {
        "step_s": statistics.median(times),
        "low_s": times[len(times) // 5],
        "high_s": times[-1 - len(times) // 5],
        "times_s": times,
        "ready_s": ready,
        "max_memory_allocated": _most_allocated(view),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "device": timing.device_name(view.device),
        "versions": {**timing.versions(view.device), **_packages()},
    }
    if case.profile:
        row["profile"] = kernel_times.profile_step(step, view.device)
    groups.stop()
    return row


def _most_allocated(view: ParallelView) -> int:
    """Return the peak bytes on the fullest GPU since the process began; 0 on a CPU."""
    own = torch.cuda.max_memory_allocated(view.device) if view.device.type == "cuda" else 0
    most = torch.tensor(float(own), dtype=torch.float64, device=view.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.item())


def _packages() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def main() -> None:
    """Read the case, measure it, and write the result on rank 0."""
    case = Case.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    target = Path(sys.argv[2])
    row = measure(case)
    if launcher.rank() == 0:
        target.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
