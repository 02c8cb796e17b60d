"""DMC through the caches and through the code of exports, against loops in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.export.writer import write_export
from dms_train.hf.formats import read_format, read_spec
from dms_train.inference.cache.paged_merging import MergingPagedCache
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.kernels import dispatch
from dms_train.method.dmc.spec import DMCSpec
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import plain_dmc
from tests.unit.inference.conftest import random_ids, tiny_architecture, varied_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HARD = StepPlan(eviction="hard", channel_scale=0.0)
CASES = {
    "llama": ("llama", {"preset": "dmc"}),
    "qwen2": ("qwen2", {"preset": "dmc", "channel": 0, "importance": "uniform"}),
    "qwen3": ("qwen3", {"preset": "dmc_c", "merge_window": 3}),
    "hardc": ("llama", {"preset": "dmc_hardc"}),
    "long": ("llama", {"preset": "dmc", "alpha_offset": -40.0}),  # slots of more than 12 tokens
}

Export = tuple[Path, Callable[[list[int]], tuple[Tensor, Tensor]]]


@pytest.fixture(scope="module", params=CASES)
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A directory, and its logits [t, vocabulary] and hard decisions [layers, t, g] by loops."""
    family, constants = CASES[request.param]
    constants = {"alpha_offset": 0.0, **constants}
    spec = PRESETS[constants.pop("preset")].override(**constants)
    assert isinstance(spec, DMCSpec)
    a, directory = tiny_architecture(family), tmp_path_factory.mktemp("dmc") / "export"
    weights = varied_weights(a, 0)
    write_export(
        directory,
        architecture=a,
        spec=spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dmc",
        weights=weights.items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    exact = {name: tensor.double() for name, tensor in weights.items()}

    def forward(ids: list[int]) -> tuple[Tensor, Tensor]:
        noise = torch.zeros(a.num_layers, 1, len(ids), a.num_query_groups)
        found = plain_dmc.forward(a, spec, HARD, exact, torch.tensor([ids]), noise)
        return found[0][0], found[3][:, 0]

    return directory, forward


def test_an_export_says_how_it_was_trained(export: Export) -> None:
    assert read_format(export[0]) == "dmc"
    assert isinstance(read_spec(export[0]), DMCSpec)


def loaded(directory: Path, kernels: str, **how: Any) -> LLM:
    """With torch operations on the CPU, or with the decode kernels."""
    spec = read_spec(directory)
    assert isinstance(spec, DMCSpec)
    if kernels == "triton":
        if not dispatch.is_supported(DEVICE):
            pytest.skip("needs triton")
        if spec.heads == "shared":
            pytest.skip("the kernels decide for each KV head")
        how |= {"device": DEVICE.type}
    llm = LLM(directory, page_slots=4, slab_pages=8, kernels=kernels, **how)
    cache = llm.engine._runner.cache
    assert isinstance(cache, MergingPagedCache) == (kernels == "triton")
    if isinstance(cache, MergingPagedCache):  # what an earlier request has left must not matter
        cache._newest_keys.fill_(torch.nan)
        cache._newest_values.fill_(torch.nan)
    return llm


TORCH = [(cache, "reference", chunk) for cache in ("compact", "dense") for chunk in (1, 7, 64)]
KERNELS = [("compact", "triton", 13)]


@pytest.mark.parametrize(("cache", "kernels", "chunk"), [*TORCH, *KERNELS])
def test_logits_and_slots_are_those_of_the_formulas(
    export: Export, cache: str, kernels: str, chunk: int
) -> None:
    directory, forward = export
    ids = random_ids(40, seed=3)  # of which the last one decodes with chunks of 13
    expected, decisions = forward(ids)
    assert 0.25 < decisions.double().mean() < 0.95
    llm = loaded(directory, kernels, prefill_chunk=chunk, cache=cache)
    torch.testing.assert_close(llm.logits(ids).double().cpu(), expected, rtol=2e-4, atol=2e-4)
    held = (1 - decisions.double()).sum(1).mean()
    assert llm.kv.cr_factor == pytest.approx(len(ids) / held.item())


@pytest.mark.parametrize("how", [{"cache_dtype": "fp8"}, {"kernels": "triton"}], ids=str)
def test_one_head_for_all_has_no_kernel(folder: Callable[..., Path], how: dict[str, str]) -> None:
    if not dispatch.is_supported(DEVICE):
        pytest.skip("needs triton")
    with pytest.raises(InferenceError, match="heads=shared"):
        LLM(folder("llama", PRESETS["dmc_hardc"]), device=DEVICE.type, **how)


def test_a_batch_decodes_what_each_request_decodes_alone(export: Export) -> None:
    directory, forward = export
    prompts = [random_ids(length, seed=length) for length in (1, 13, 30)]
    llm = loaded(directory, "reference", max_num_seqs=2, prefill_chunk=7)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0))
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0].token_ids
        logits, decisions = forward(prompt + made[:-1])
        best = logits[len(prompt) - 1 :].topk(2)
        for step, token in enumerate(made):
            gap = best.values[step, 0] - best.values[step, 1]
            assert token == best.indices[step, 0] or gap < 1e-3
        slots = (1 - decisions.double()).sum(1).mean().item()
        assert output.kv.live_tokens == pytest.approx(slots)
        assert output.kv.peak_live_tokens <= slots + 1
    assert llm.kv.live_bytes == llm.engine._runner.cache.used_pages == 0


@pytest.mark.parametrize(
    ("export", "kernels"),
    [*((name, "reference") for name in CASES), ("qwen3", "triton"), ("long", "triton")],
    indirect=["export"],
)
def test_chains_go_on_from_a_shared_prompt(export: Export, kernels: str) -> None:
    """Their slots and newest tokens are their own; more of them than rows."""
    directory, forward = export
    llm = loaded(directory, kernels, max_num_seqs=2, prefill_chunk=7)
    prompt = random_ids(17, seed=2)
    params = SamplingParams(n=3, seed=4, max_tokens=5, temperature=1.0)
    chains = llm.generate([prompt], params)[0].outputs
    assert len({tuple(chain.token_ids) for chain in chains}) > 1
    for chain in chains:
        _, decisions = forward(prompt + chain.token_ids[:-1])
        slots = (1 - decisions.double()).sum(1).mean().item()
        assert chain.kv.live_tokens == pytest.approx(slots)


def test_transformers_computes_the_same_with_and_without_a_cache(export: Export) -> None:
    from transformers import AutoModelForCausalLM

    directory, forward = export
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    ids = random_ids(30, seed=5)
    expected, decisions = forward(ids)
    with torch.no_grad():
        whole = model(torch.tensor([ids]), use_cache=False).logits[0]
        first = model(torch.tensor([ids[:17]]), use_cache=True)
        parts, past = [first.logits[0]], first.past_key_values
        for token in ids[17:]:
            done = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            parts.append(done.logits[0])
            past = done.past_key_values
    torch.testing.assert_close(whole.double(), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=2e-4, atol=2e-4)
    decided = model.dmc_decision_logits(torch.tensor([ids]))[:, 0] > 0
    assert torch.equal(decided[..., 1:], decisions.transpose(1, 2)[..., 1:])


def test_transformers_generates_with_padding_what_the_engine_generates(export: Export) -> None:
    from transformers import AutoModelForCausalLM

    directory, _ = export
    prompts = [random_ids(length, seed=length) for length in (9, 20)]
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    padded = torch.tensor([[0] * (20 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (20 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = model.generate(padded, attention_mask=mask, **how)[:, 20:].tolist()
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    ours = LLM(directory).generate(prompts, greedy)
    assert [output.outputs[0].token_ids for output in ours] == found


def test_transformers_generates_the_same_with_an_assistant(export: Export) -> None:
    from transformers import AutoModelForCausalLM

    directory, _ = export
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
        for _ in range(2)
    )
    ids = torch.tensor([random_ids(8, seed=2) * 3])
    how = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(ids, **how)
    assert alone.shape == (1, 40)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **how), alone)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **how), alone)


def test_a_policy_of_another_method_is_refused(export: Export) -> None:
    with pytest.raises(InferenceError, match="was trained for dmc"):
        LLM(export[0], policy="dms")
