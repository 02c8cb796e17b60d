"""Weight gradients that a product adds to the fp32 buffer equal those that autograd returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dms_train.families import FAMILIES
from dms_train.mcore import compat, groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTH = 128  # one tile of keys, so that no order of additions is left to chance
# Returned by autograd, a bf16 gradient is rounded once for every microbatch: half of 2^-8 at most.
BARS = {"bf16": 2.0**-8, "fp32": 1e-6}
Outcome = tuple[float, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


def one_step(
    view: ParallelView,
    family: str,
    parallel: ParallelOptions,
    loss: str = "distill",
    microbatches: int = 2,
) -> Outcome:
    """Loss and gradients by name; head size 64, so that the kernels of this GPU run."""
    architecture = tiny.architecture(
        family,
        num_layers=2,
        hidden_size=256,
        ffn_hidden_size=384,
        kv_channels=64,
        max_position_embeddings=LENGTH,
    )
    spec = PRESETS["dms"].override(window=8, alpha_offset=0.5)
    options = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7)
    student = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.002, std=0.05)
    engine = McoreEngine(architecture, spec, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, 0.05))
    plan = StepPlan(step=3, loss=loss, eviction="soft", channel_scale=0.0, target_cr=8.0)
    batches = tiny.microbatches(0, 1, groups=microbatches, length=LENGTH)
    totals = engine.forward_backward(plan, batches)
    return totals.token_loss + totals.aux_loss, engine.hf_gradients()


def both(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch, *arguments, **options
) -> tuple[Outcome, Outcome]:
    """Added in place, and returned by autograd."""
    in_place = one_step(view, *arguments, **options)
    monkeypatch.setattr(compat, "accumulate_in_place", lambda _: False)
    return in_place, one_step(view, *arguments, **options)


@pytest.mark.parametrize("loss", ["distill", "lm"])
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_of_two_microbatches_is_the_same(
    view, monkeypatch, family, dtype, recompute, loss
) -> None:
    parallel = ParallelOptions(params_dtype=dtype, recompute_granularity=recompute, layers="local")
    (found_loss, found), (expected_loss, expected) = both(view, monkeypatch, family, parallel, loss)
    assert found_loss == expected_loss
    assert found.keys() == expected.keys()
    apart = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()}
    worst = max(apart, key=apart.__getitem__)
    print(f"{family} {dtype} {recompute} {loss}: {apart[worst]:.1e} ({worst})")
    assert apart[worst] <= BARS[dtype]
    # nothing else may depend on it
    assert max(apart[n] for n, g in expected.items() if g.dim() == 1) <= 1e-6


@pytest.mark.parametrize("loss", ["distill", "lm"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gradients_of_matrices_are_not_rounded(view, monkeypatch, family, loss) -> None:
    parallel = ParallelOptions(params_dtype="bf16", layers="local")
    (_, found), (_, expected) = both(view, monkeypatch, family, parallel, loss, microbatches=1)
    assert all(torch.equal(g, g.bfloat16().float()) for g in expected.values())
    finer = {name for name, g in found.items() if not torch.equal(g, g.bfloat16().float())}
    matrices = {name for name, g in found.items() if g.dim() == 2}
    if family == "qwen2":  # a table of its own, whose gradient is no product
        matrices.remove("model.embed_tokens.weight")
    assert finer == matrices
