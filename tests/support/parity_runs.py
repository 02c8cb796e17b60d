"""One training step of many cases in a layout: losses, every gradient, and their comparison."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.schedule.graph import Passes
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.token_losses import TOKEN_LOSSES, LossOptions, TokenLoss
from tests.support import launch, tiny
from tests.support.ranks import run_ranks


class _OneByOne:
    """Runs the passes of each microbatch by itself, as a `PassGraph` does, and captures nothing."""

    stream = staticmethod(contextlib.nullcontext)

    def begin_step(self, *_: Any) -> None:
        pass

    def run(self, passes: Passes, batch: Batch, scale: Tensor) -> Any:
        return passes(batch, scale)


class _OneByOneEngine(McoreEngine):
    def _choose_graph(self, *, fused: bool) -> Any:
        return _OneByOne()


def one_step(
    case: dict[str, Any], view: ParallelView
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Totals on every rank and Hugging Face named gradients on rank 0."""
    architecture = tiny.architecture(case["family"], **case.get("architecture", {}))
    # offset near 0, so that about half of the small eviction channels' decisions evict
    base = PRESETS[case["preset"]]
    window = {"window": 4} if base.kind == "dms" else {}
    spec = base.override(**{**window, "alpha_offset": 0.5, **case.get("spec", {})})
    parallel = ParallelOptions(**case["layout"])
    options = TrainEngineOptions(
        parallel=parallel,
        optim=OptimOptions(lr=1e-3),
        seed=7,
        loss=LossOptions(**case.get("loss", {})),
        offloads_teacher=case.get("offload", False) and bool(case["layout"]),
    )
    std = case.get("std", 0.2)
    source = tiny.small_channels(spec.kind)
    student = source(architecture, 1, spec.channel, factor=0.002, std=std)
    one_by_one = case.get("one_by_one") and view.world_size > 1
    kind = _OneByOneEngine if one_by_one else McoreEngine
    engine = kind(architecture, spec, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, std))
    plan = StepPlan(**{"step": 3, "eviction": "soft", "channel_scale": 0.0, **case["plan"]})
    length = case.get("length", tiny.LENGTH)
    groups = case.get("microbatches", 4)
    batches = tiny.microbatches(view.dp_rank, view.dp_size, groups, length=length)
    if case.get("packed"):
        batches = [tiny.packed(batch, _lengths(batch)) for batch in batches]
    if one_by_one:  # a replay runs no hook that starts a reduction
        assert not engine._chunks[0].ddp_config.overlap_grad_reduce
    totals = engine.forward_backward(plan, batches)
    loss = {"token_loss": totals.token_loss, "aux_loss": totals.aux_loss, **totals.terms}
    means = {"alpha": totals.alpha / totals.samples, "live": totals.live}
    return {**loss, **means}, engine.hf_gradients()


def _lengths(batch: Batch) -> list[list[int]]:
    """Documents of each sample; some samples end in padding."""
    length = batch.tokens.shape[1]
    return [[length // 3, 1, length // 3 + int(n) % 5, 3] for n in batch.samples]


def _groups_of(case: dict[str, Any]) -> list[int | None]:
    """Return the sizes that decide a layout's process groups, which take long to make on GPUs."""
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "context")
    return [case["layout"].get(f"{kind}_parallel_size") for kind in kinds]


MIXED = TokenLoss(
    needs_teacher=True,
    terms=("kl", "next_token"),
    per_token=lambda losses, o: (
        losses.divergence(o.kl_direction, o.kl_temperature),
        0.25 * losses.cross_entropy(),
    ),
)


def work(cases: list[dict[str, Any]], out: Path) -> None:
    """All cases, those of a layout one after the other; `mixed` is a loss of two terms."""
    TOKEN_LOSSES["mixed"] = MIXED
    for _, alike in itertools.groupby(sorted(cases, key=lambda c: str(_groups_of(c))), _groups_of):
        first, *rest = alike
        view = groups.start(ParallelOptions(**first["layout"]), seed=1)
        for case in (first, *rest):
            totals, gradients = one_step(case, view)
            if gradients:
                metadata = {"totals": json.dumps(totals)}
                save_file(gradients, out / f"{case['name']}.safetensors", metadata=metadata)
        groups.stop(keep_process_group=True)
    groups.stop()


class Outcome(NamedTuple):
    """Totals and gradients, by Hugging Face name, of one step."""

    totals: dict[str, float]
    gradients: dict[str, Tensor]

    @property
    def loss(self) -> float:
        return self.totals["token_loss"] + self.totals["aux_loss"]


def run(processes: int, cases: list[dict[str, Any]], folder: Path, timeout: float) -> None:
    """All cases in one launch."""
    launch.checked(run_ranks(work, processes, cases, folder, timeout=timeout))


def read(folder: Path, name: str) -> Outcome:
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Outcome(json.loads(file.metadata()["totals"]), tensors)


def loss_difference(found: Outcome, expected: Outcome) -> float:
    """Relative."""
    return abs(found.loss - expected.loss) / abs(expected.loss)


def largest_difference(found: Outcome, expected: Outcome) -> float:
    """Return the largest difference of an element, relative to the largest of its gradient."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(
        ((found.gradients[name] - g).abs().max() / g.abs().max().clamp_min(1e-30)).item()
        for name, g in expected.gradients.items()
        if g.abs().max() > 0 or found.gradients[name].abs().max() > 0
    )


def largest_distance(found: Outcome, expected: Outcome) -> float:
    """Return the largest distance of a gradient, relative to its norm."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(
        ((found.gradients[name] - g).norm() / g.norm().clamp_min(1e-30)).item()
        for name, g in expected.gradients.items()
    )
