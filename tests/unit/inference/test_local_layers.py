"""Models in which some layers have a sliding window: export, `generate` and engine."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO

import pytest
import torch
from transformers import DynamicCache

from dms_train.cli.generate import main
from dms_train.families import LayerAttention
from dms_train.inference.errors import InferenceError
from dms_train.inference.heatmap import draw_heatmap
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.policies.local_layers import with_windows
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels import dispatch
from dms_train.server.generation import _kv_usage
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    random_ids,
    small_spec,
    tiny_architecture,
    varied_weights,
    write_folder,
)

WIDTH = 6  # shorter than the window of the method, so that one cannot stand for the other
FULL, LOCAL = LayerAttention(rotary_base=1e6), LayerAttention(rotary_base=1e6, window=WIDTH)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
reference_forward = hf.reference_forward


@pytest.fixture(scope="module")
def model():
    """(architecture, weights) of three layers, the second one with a window."""
    a = replace(tiny_architecture("qwen3"), num_layers=3, layers=(FULL, LOCAL, FULL))
    return a, varied_weights(a, 0)


@pytest.fixture(scope="module")
def exports(model, tmp_path_factory):
    """Directory of the dense model and of its retrofit."""
    a, weights = model
    made = {}
    for name, spec in {"dense": None, "dms": small_spec("dms_nvidia")}.items():
        made[name] = tmp_path_factory.mktemp(name) / "export"
        write_folder(made[name], a, spec, weights)
    return made


def test_the_export_computes_the_reference(model, exports, oracle, reference_forward):
    a, weights = model
    ids = random_ids(40, seed=2)
    logits, decisions = oracle(exports["dms"], ids)
    spec = small_spec("dms_nvidia")
    expected, decided = reference_forward(weights, a, spec, torch.tensor(ids))
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(decisions, decided > 0)
    assert len(decisions) == 2  # the layer with a window has no decisions
    assert 0.2 < decisions.double().mean() < 0.8


@pytest.mark.parametrize("name", ["dense", "dms"])
@pytest.mark.parametrize("cache", ["compact", "dense"])
def test_the_engine_generates_the_tokens_of_the_directory(exports, assert_greedy, name, cache):
    prompts = [random_ids(length, seed=length) for length in (1, 7, 30)]
    outputs = LLM(exports[name], cache=cache, prefill_chunk=7).generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(exports[name], prompt, output.outputs[0].token_ids)


def test_ratios_count_the_other_layers_and_bytes_count_all(exports):
    prompt = random_ids(30, seed=1)
    dense, evicts = (
        LLM(exports[name]).generate([prompt], GREEDY)[0].kv for name in ("dense", "dms")
    )
    assert dense.cr_factor == 1.0
    assert dense.cr_factors.tolist() == [[1.0, 1.0]] * 2
    assert dense.live_tokens == (2 * dense.tokens + WIDTH) / 3
    assert evicts.cr_factors.shape == (2, 2)
    assert evicts.cr_factor == pytest.approx(1 / (1 / evicts.cr_factors).mean().item())
    assert 1.2 < evicts.cr_factor < 3
    assert evicts.live_bytes < dense.live_bytes


def test_usage_of_a_server_counts_the_other_layers(exports):
    params = replace(GREEDY, n=2)
    dense, evicts = (
        LLM(exports[name]).generate([random_ids(30, seed=1)], params) for name in ("dense", "dms")
    )
    assert _kv_usage(dense)["cr_factor"] == 1.0
    costs = [completion.kv for completion in evicts[0].outputs]
    held = sum((kv.tokens / kv.cr_factors).mean().item() for kv in costs)
    expected = sum(kv.tokens for kv in costs) / held
    assert _kv_usage(evicts)["cr_factor"] == pytest.approx(expected)


def test_dms_generate_prints_and_draws_the_numbers_of_the_layers(exports, tmp_path, capsys):
    files = tmp_path / "out.json", tmp_path / "heat.png"
    command = [str(exports["dms"]), "--token-ids", "1,2,3", "--max-tokens", "9"]
    assert main([*command, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    table = capsys.readouterr().out.split("cr_factor by layer")[1].splitlines()[1:]
    assert [int(line.split()[0]) for line in table] == [0, 2]
    assert json.loads(files[0].read_text())["total"]["layers"] == [0, 2]
    pictures = [BytesIO() for _ in range(3)]
    for picture, numbers in zip(pictures, (None, (0, 1), (0, 2)), strict=True):
        draw_heatmap(torch.ones(2, 2), picture, "title", layer_numbers=numbers)
    plain, same, other = (picture.getvalue() for picture in pictures)
    assert plain == same != other


def test_generate_frees_what_the_windows_leave(exports, load):
    model = load(exports["dms"])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = torch.tensor([random_ids(30, seed=4)]).clamp(min=1)
    done = model.generate(prompt, return_dict_in_generate=True, **options)
    windowed = model.generate(prompt, past_key_values=DynamicCache(config=model.config), **options)
    whole = model.generate(prompt, past_key_values=DynamicCache(), **options)
    assert torch.equal(done.sequences, windowed)
    assert torch.equal(done.sequences, whole)
    assert done.past_key_values.live()[1].tolist() == [[WIDTH, WIDTH]]
    assert model.dms_live_slots(done.past_key_values).shape == (2, 1, 2)


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_the_kernels_compute_what_torch_computes(exports):
    """Two chunks of a prompt, decode steps beyond the window, and a snapshot of the prompt."""
    prompts, params = [random_ids(12, seed=3)], replace(GREEDY, max_tokens=8, n=2)
    how = {"device": DEVICE.type, "max_num_seqs": 2, "prefill_chunk": 8}
    ours, theirs = (
        LLM(exports["dms"], kernels=kernels, **how).generate(prompts, params)
        for kernels in ("triton", "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert [x.token_ids for x in a.outputs] == [x.token_ids for x in b.outputs]
        assert a.kv.kv_reads == b.kv.kv_reads
        assert a.kv.live_tokens == b.kv.live_tokens
        assert torch.equal(a.kv.cr_factors, b.kv.cr_factors)


def test_other_policies_are_refused(exports):
    with pytest.raises(InferenceError, match=r"^policy=h2o: does not support .* use policy=auto"):
        LLM(exports["dms"], policy="h2o", policy_options={"budget": 16})


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_fp8_is_refused_with_the_option_that_changes_it(exports):
    with pytest.raises(InferenceError, match=r"cache_dtype=fp8: models with .* cache_dtype=auto$"):
        LLM(exports["dms"], device=DEVICE.type, cache_dtype="fp8")


def test_policies_that_read_attention_refuse_sinks(folder):
    """Also where no layer has a window: sinks change the weights that they read."""
    kept, read = build_policy("keep_all", {}, None), build_policy("h2o", {"budget": 8}, None)
    assert with_windows(kept, "keep_all", [None], sinks=True) is kept
    with pytest.raises(InferenceError, match="policy=h2o: does not support models with attention"):
        with_windows(read, "h2o", [None], sinks=True)
    with pytest.raises(InferenceError, match="policy=tova: does not support models with sliding"):
        LLM(folder("gpt_oss", small_spec("dms")), policy="tova", policy_options={"budget": 8})


@pytest.mark.parametrize("policy", ["auto", "window", "keep_all"])
def test_the_dense_cache_has_sinks_too(folder, policy):
    directory = folder("gpt_oss", small_spec("dms"))
    found = [
        LLM(directory, cache=cache, policy=policy, prefill_chunk=7).generate(
            [random_ids(17, seed=2)], GREEDY
        )
        for cache in ("compact", "dense")
    ]
    assert found[0][0].outputs[0].token_ids == found[1][0].outputs[0].token_ids
