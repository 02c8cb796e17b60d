"""A decoder layer keeps as many bytes on a GPU as `dms-plan` counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dms_train.families import FAMILIES
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.planning.activations import Microbatch, layer
from tests.support import configs
from tests.support.live_memory import saved_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTH = 640


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("recompute", [None, "selective"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_kept_by_a_layer(view, family, dtype, recompute, samples):
    a = configs.architecture(
        family=family,
        num_layers=1,
        hidden_size=512,
        ffn_hidden_size=1280,
        num_attention_heads=8,
        kv_channels=64,
        max_position_embeddings=1024,
    )
    parallel = ParallelOptions(params_dtype=dtype, recompute_granularity=recompute)
    spec = PRESETS["dms"]
    options = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=1)
    engine = McoreEngine(a, spec, view, options, RandomWeights(a, 1, 0.02))
    engine._method.set_plan(StepPlan(eviction="soft", channel_scale=0.0, target_cr=2.0))
    model = engine._models[0].train()
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    hidden = torch.randn(
        LENGTH, samples, 512, device=view.device, dtype=dtypes[dtype], requires_grad=True
    )
    keys = torch.arange(samples, device=view.device)
    eviction_stats = torch.zeros(samples, EVICTION_STATS, device=view.device)
    rope = model.method.rope(model.rotary_pos_emb.get_emb(LENGTH))  # of all layers
    run = model._layers(0, 1)
    run(hidden, eviction_stats, keys, rope)  # compiled and tuned
    counted = layer(
        Microbatch(
            architecture=a,
            method=spec,
            parallel=parallel,
            samples=samples,
            length=LENGTH,
            distills=False,
        ),
        recompute,
    )
    kept = saved_bytes(lambda: run(hidden, eviction_stats, keys, rope), [*model.parameters(), rope])
    assert kept == pytest.approx(counted, rel=0.01)
