"""Training of retention gates on a frozen base, and its export in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.hf.formats import default_format, read_spec
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels.errors import KernelError
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny


@pytest.fixture(scope="module")
def trained(view, tmp_path_factory) -> tuple[dict, dict, list, Path]:
    """Weights before and after 8 steps, their results, and an export."""
    a, method = tiny.architecture("llama", num_layers=2), PRESETS["trim_kv"]
    options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=3e-3), seed=7)
    source = tiny.SmallEvictionChannels(a, 1, method.channel)
    engine = McoreEngine(a, method, view, options, source)
    engine.attach_teacher(None)
    engine.reset_eviction_channel()
    rate = {"max_lr": 3e-3, "min_lr": 3e-3, "steps": 8, "warmup_steps": 0, "style": "constant"}
    engine.begin_stage(LearningRate(**rate))
    before, results = dict(engine.hf_tensors()), []
    for step in range(8):
        plan = StepPlan(
            step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0
        )
        results.append(engine.train_step(plan, [tiny.batch(0, 2)]))
    after = dict(engine.hf_tensors())
    directory = tmp_path_factory.mktemp("trim_kv") / "export"
    write_export(
        directory,
        architecture=a,
        spec=method.spec,
        cr_factor=None,
        target_cr=4.0,
        dtype=torch.float32,
        export_format=default_format(method.spec),
        weights=after.items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    return before, after, results, directory


def test_only_the_gates_are_trained_and_the_capacity_loss_falls(trained):
    before, after, results, _ = trained
    size, groups_of = tiny.architecture("llama").kv_channels, 4
    for name, tensor in before.items():
        moved = (tensor != after[name]).nonzero()[:, 0].unique().tolist()
        if name.endswith("q_proj.weight"):
            per_group = len(tensor) // groups_of
            assert per_group == 2 * size
            assert moved == [group * per_group for group in range(groups_of)]
        else:
            assert moved == []
    losses = [result.aux_loss for result in results]
    assert losses[-1] < 0.9 * losses[0]
    assert results[-1].cr_factor > results[0].cr_factor


def test_the_export_decodes_within_its_budget(trained):
    *_, directory = trained
    assert read_spec(directory) == PRESETS["trim_kv"].spec
    prompt = tiny.batch(0, 1).tokens[0, :20].tolist()
    how = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = LLM(directory, policy_options={"budget": 5}, policy="trim_kv").generate(prompt, how)[0]
    assert found.kv.live_tokens == 5
    whole = LLM(directory).generate(prompt, how)[0]  # the model's own budget, 512
    assert (
        whole.outputs[0].token_ids
        == LLM(directory, policy="keep_all").generate(prompt, how)[0].outputs[0].token_ids
    )
    assert whole.kv.live_tokens == 27


def test_what_cannot_run_is_refused(trained):
    *_, directory = trained
    with pytest.raises(InferenceError, match="not trained for it"):
        build_policy("trim_kv", {}, PRESETS["dms"].spec)
    with pytest.raises(InferenceError, match="the kernels do not pass on"):
        InferenceEngine(directory, EngineOptions(kernels="triton"))
    triton = pytest.importorskip("dms_train.kernels.train_attention.triton_attention")
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(KernelError, match="grows with distance"):
        triton.dms_attention(q, q, q, None, None, 1.0)
