"""Training of eviction channels on a frozen base, and their exports in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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
from dms_train.mcore.model.recording import Recording
from dms_train.mcore.options import OptimOptions, ParallelOptions, Trainable
from dms_train.method.base import MethodOptions
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny


class Trained(NamedTuple):
    """Weights before and after some steps, their results, a recording, and an export."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    results: list[StepResult]
    recording: Recording
    directory: Path


def train(view, method: MethodOptions, directory: Path, *, lr: float, steps: int) -> Trained:
    a = tiny.architecture("llama", num_layers=2)
    options = TrainEngineOptions(
        parallel=ParallelOptions(),
        optim=OptimOptions(lr=lr),
        seed=7,
        trainable=Trainable(weights=method.train),
    )
    source = tiny.SmallEvictionChannels(a, 1, method.spec.channel)
    engine = McoreEngine(a, method, view, options, source)
    engine.attach_teacher(None)
    engine.reset_eviction_channel()
    rate = {"max_lr": lr, "min_lr": lr, "steps": steps, "warmup_steps": 0, "style": "constant"}
    engine.begin_stage(LearningRate(**rate))
    before, results = dict(engine.hf_tensors()), []
    for step in range(steps):
        plan = StepPlan(
            step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0
        )
        results.append(engine.train_step(plan, [tiny.batch(0, 2)]))
    after = dict(engine.hf_tensors())
    plan = StepPlan(channel_scale=0.0, eviction="hard")
    recording = engine.record(plan, tiny.batch(0, 1).tokens[0])
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
    return Trained(before, after, results, recording, directory)


@pytest.fixture(scope="module")
def trim_kv(view, tmp_path_factory) -> Trained:
    directory = tmp_path_factory.mktemp("trim_kv") / "export"
    return train(view, PRESETS["trim_kv"], directory, lr=3e-3, steps=8)


@pytest.fixture(scope="module")
def kvzap(view, tmp_path_factory) -> Trained:
    method = PRESETS["kvzap"].override(window=4, alpha_offset=2.0)
    return train(view, method, tmp_path_factory.mktemp("kvzap") / "export", lr=1e-2, steps=25)


@pytest.mark.parametrize("name", ["trim_kv", "kvzap"])
def test_only_the_eviction_channels_are_trained(name, request):
    trained = request.getfixturevalue(name)
    size, kv_heads = tiny.architecture("llama").kv_channels, 4
    for key, tensor in trained.before.items():
        moved = (tensor != trained.after[key]).nonzero()[:, 0].unique().tolist()
        if key.endswith("q_proj.weight"):
            per_head = len(tensor) // kv_heads
            assert per_head == 2 * size
            assert moved == [head * per_head for head in range(kv_heads)]
        else:
            assert moved == []


def test_the_capacity_loss_falls(trim_kv):
    results = trim_kv.results
    assert results[-1].aux_loss < 0.9 * results[0].aux_loss
    assert results[-1].cr_factor > results[0].cr_factor


def test_the_error_of_the_predicted_importance_falls_and_nothing_else_is_lost(kvzap):
    """A constant prediction cannot be this good; the model itself stays the teacher."""
    results = kvzap.results
    assert results[-1].aux_loss < 0.5 * results[0].aux_loss
    assert max(abs(result.token_loss) for result in results) == pytest.approx(
        results[0].token_loss, abs=1e-5
    )


def test_the_engine_evicts_what_the_threshold_marks(kvzap):
    logits = kvzap.recording.decision_logits
    assert 0.1 < (logits > 0).double().mean().item() < 0.9
    assert read_spec(kvzap.directory).kind == "kvzap"
    prompt = kvzap.recording.input_ids.tolist()
    engine = InferenceEngine(kvzap.directory, EngineOptions())
    request = engine.add_request(prompt, SamplingParams(max_tokens=2, temperature=0.0))
    engine.step()
    newest = len(prompt) - 1
    positions = engine.live_positions(request)
    for layer, heads in enumerate(positions):
        for head, held in enumerate(heads):
            marked = logits[layer, head] > 0
            late = newest - torch.arange(len(prompt)) > 4
            assert held.tolist() == (~(late & marked)).nonzero()[:, 0].tolist()
    first = LLM(kvzap.directory).generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))[0]
    assert first.outputs[0].token_ids[0] == kvzap.recording.logits[-1].argmax().item()


def test_retention_exports_decode_within_their_budget(trim_kv):
    directory = trim_kv.directory
    assert read_spec(directory) == PRESETS["trim_kv"].spec
    prompt = tiny.batch(0, 1).tokens[0, :20].tolist()
    how = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = LLM(directory, policy_options={"budget": 5}, policy="trim_kv").generate(prompt, how)[0]
    assert found.kv.live_tokens == 5
    whole = LLM(directory).generate(prompt, how)[0]  # the model's own budget, 512
    dense = LLM(directory, policy="keep_all").generate(prompt, how)[0]
    assert whole.outputs[0].token_ids == dense.outputs[0].token_ids
    assert whole.kv.live_tokens == 27


def test_what_cannot_run_is_refused(trim_kv):
    with pytest.raises(InferenceError, match="not trained for it"):
        build_policy("trim_kv", {}, PRESETS["dms"].spec)
    with pytest.raises(InferenceError, match="needs interval=1"):
        InferenceEngine(
            trim_kv.directory,
            EngineOptions(kernels="triton", policy="trim_kv", policy_options={"interval": 2}),
        )
    triton = pytest.importorskip("dms_train.kernels.train_attention.triton_attention")
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(KernelError, match="grows with distance"):
        triton.dms_attention(q, q, q, None, None, 1.0)
