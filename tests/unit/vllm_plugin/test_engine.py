"""Exports in vLLM's engine: the tokens and the cache of this project's engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

# before the tests, so that its interpreter rounds to FP8 as a GPU does
pytest.importorskip("triton", reason="triton is not installed")

from dms_train.export.writer import write_export
from dms_train.families import LayerAttention
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from tests.interop.conftest import ours
from tests.unit.inference.conftest import (
    random_ids,
    small_spec,
    tiny_architecture,
    varied_weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPTS = [random_ids(length, seed=length) for length in (5, 40, 90, 33, 1, 64)]
NEW_TOKENS = 12
OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16}
# family, format, preset
EXPORTS = {
    # the first one: vLLM creates the process group of experts with the first model of a process
    "qwen3-moe-dms": ("qwen3_moe", "dms", "dms"),
    "gpt-oss-dms": ("gpt_oss", "dms", "dms"),
    "gemma3-dms": ("gemma3_text", "dms", "dms"),
    "glm4-dms": ("glm4", "dms", "dms"),
    "llama-dms": ("llama", "dms", "dms"),
    "llama-fastdms": ("llama", "fastdms", "dms_fastdms"),
    "mistral-dms": ("mistral", "dms", "dms"),
    "olmo3-dms": ("olmo3", "dms", "dms"),
    "phi3-dms": ("phi3", "dms", "dms"),
    "qwen2-dms": ("qwen2", "dms", "dms"),
    "qwen3-dms": ("qwen3", "dms", "dms"),
    "qwen3-nvidia": ("qwen3", "nvidia", "dms_nvidia"),
    "qwen3-fastdms": ("qwen3", "fastdms", "dms_fastdms"),
    "smollm3-dms": ("smollm3", "dms", "dms"),
}
_LAYERS = [LayerAttention(rotary_base=1e6, window=window) for window in (8, None)]
WINDOWED = {name: {"layers": tuple(_LAYERS)} for name in ("qwen2-windows", "qwen3-windows")}
EXPORTS |= {name: (name.partition("-")[0], "dms", "dms") for name in WINDOWED}
CHANGES = {**WINDOWED, "gpt-oss-dms": {"layernorm_epsilon": 1e-5}}  # vLLM reads no other


def write(path: Path, family: str, export_format: str, preset: str, **sizes: Any) -> str:
    a = replace(tiny_architecture(family), **sizes)
    write_export(
        path,
        architecture=a,
        spec=small_spec(preset),
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32 if export_format == "dms" else torch.bfloat16,
        export_format=export_format,
        weights=varied_weights(a, 0).items(),
        source_dir=None,
        selftest=None,
        block_size=4,
        provenance={},
    )
    return str(path)


def job(model: str, blocks: int = 200, **changes: Any) -> dict[str, Any]:
    fields = {
        "model": model,
        "prompts": PROMPTS,
        "max_tokens": [NEW_TOKENS] * len(PROMPTS),
        "blocks": blocks,
        "options": OPTIONS,
    }
    return {**fields, **changes}


@dataclass
class Served:
    """An export, and what vLLM's engine made of it."""

    model: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def served(in_vllm, tmp_path_factory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("exports")
    models = {
        name: write(folder / name, *how, **CHANGES.get(name, {})) for name, how in EXPORTS.items()
    }
    jobs = [job(model) for model in models.values()]
    models["synchronous"] = models["llama-dms"]
    jobs.append(job(models["synchronous"], options={**OPTIONS, "async_scheduling": False}))
    results = in_vllm("generate", jobs)
    return {
        name: Served(model, result)
        for (name, model), result in zip(models.items(), results, strict=True)
    }


@pytest.mark.parametrize("name", [*EXPORTS, "synchronous"])
def test_tokens_are_those_of_the_own_engine(served, name):
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = LLM(served[name].model, dtype="float32").generate(PROMPTS, params)
    assert served[name].result["tokens"] == [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("name", [*EXPORTS, "synchronous"])
def test_lists_are_as_long_as_in_the_own_engine_after_every_step(served, name):
    model, result = served[name].model, served[name].result
    expected = {
        request: ours(model, prompt + tokens, prompt=1)["live"]
        for request, prompt, tokens in zip(result["names"], PROMPTS, result["tokens"], strict=True)
    }
    compared = evicted = 0
    for step in result["steps"]:
        for request, found in step["requests"].items():
            live = expected[request.partition("-")[0]][found["seen"] - 1].tolist()
            assert found["lengths"] == live, (request, found["seen"])
            compared += 1
            evicted += found["seen"] * 4 > sum(map(sum, live))
    assert compared > 6 * NEW_TOKENS
    assert evicted > compared / 2


def test_batches_mix_chunks_of_prompts_with_single_tokens(served):
    for name, case in served.items():
        counts = [
            sorted(r["new"] for r in step["requests"].values()) for step in case.result["steps"]
        ]
        assert any(c and c[0] == 1 and c[-1] > 1 for c in counts)
        assert any(0 < c[-1] < 48 and len(c) > 1 for c in counts if c)
        expected = "DMSScheduler" if name == "synchronous" else "DMSAsyncScheduler"
        assert case.result["scheduler"] == expected


def test_steps_with_one_or_two_parts_of_prompts_are_padded(served):
    for case in served.values():
        steps = [[r["new"] for r in step["requests"].values()] for step in case.result["steps"]]
        parts = [sum(n > 1 for n in counts) for counts in steps]
        assert [kind[2] for kind in case.result["padded"]] == [n for n in parts if n in (1, 2)]
        assert {1, 2} <= set(parts)


def test_no_block_has_an_address(served):
    for case in served.values():
        assert all(ids == [[]] for step in case.result["steps"] for ids in step["block_ids"])


@pytest.fixture(scope="module")
def replayed(in_vllm, served) -> dict[str, Any]:
    """Result of an export whose decode steps are replays of captured ones, with padded batches."""
    (result,) = in_vllm("replay", [job(served["llama-dms"].model)])
    return result


def test_replays_of_captured_steps_change_no_token(served, replayed):
    eager = served["llama-dms"].result
    assert replayed["tokens"] == eager["tokens"]
    decodes = [
        len(step["requests"])
        for step in replayed["steps"]
        if step["requests"] and all(r["new"] == 1 for r in step["requests"].values())
    ]
    assert replayed["replays"] == len(decodes)
    assert {1, 3} & set(decodes)  # batches with padding


def test_replays_of_captured_steps_leave_lists_as_long(served, replayed):
    def lengths(result):
        return [[r["lengths"] for r in step["requests"].values()] for step in result["steps"]]

    assert lengths(replayed) == lengths(served["llama-dms"].result)
    assert all(step["used"] + step["free"] == replayed["pages"] for step in replayed["steps"])
    assert replayed["steps"][-1]["used"] == 0


FP8 = {**OPTIONS, "max_num_batched_tokens": 256, "kv_cache_dtype": "fp8"}  # no prompt in chunks


def test_fp8_pages_give_the_tokens_of_the_own_engine(in_vllm, served):
    model = served["llama-dms"].model
    (result,) = in_vllm("generate", [job(model, options=FP8)])
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = LLM(model, dtype="float32", cache_dtype="fp8", kernels="triton", page_slots=16)
    expected = [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params)]
    assert result["tokens"] == expected
    wide = served["llama-dms"].result
    assert result["block_bytes"] * 4 == wide["block_bytes"]  # the model is in float32
    assert result["pages"] == wide["pages"]


def storm(model: str, blocks: int) -> dict[str, Any]:
    """200 requests, at most 16 at once."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 48, (200,), generator=draw).tolist()
    outputs = torch.randint(2, 16, (200,), generator=draw).tolist()
    return job(
        model,
        blocks,
        prompts=[random_ids(length, seed=i) for i, length in enumerate(lengths)],
        max_tokens=outputs,
        options={
            "max_model_len": 64,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "block_size": 4,
        },
    )


LARGE, SMALL = 400, 22


@pytest.fixture(scope="module")
def storms(in_vllm, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results with a large pool, and with a pool of a quarter of the pages that are used there."""
    sizes = {"num_layers": 1, "num_attention_heads": 2}  # the interpreter is slow
    path = tmp_path_factory.mktemp("storm") / "export"
    model = write(path, *EXPORTS["llama-dms"], **sizes)
    large, small = in_vllm("generate", [storm(model, blocks) for blocks in (LARGE, SMALL)])
    return large, small


def preemptions(result: dict[str, Any]) -> int:
    return sum(len(step["preempted"]) for step in result["steps"])


def test_preemptions_change_no_token(storms):
    large, small = storms
    print(f"preemptions {preemptions(small)}, steps {len(large['steps'])}, {len(small['steps'])}")
    assert preemptions(large) == 0
    assert preemptions(small) >= 3
    assert small["tokens"] == large["tokens"]


def test_pages_never_exceed_the_pool(storms):
    large, small = storms
    most = [max(step["used"] for step in result["steps"]) for result in storms]
    print(f"most pages {most}, pool {small['pages']}")
    assert small["pages"] * 4 <= most[0]
    for result in (large, small):
        bound = [step for step in result["steps"] if step["free"] is not None]
        assert all(step["used"] + step["free"] == result["pages"] for step in bound)


def test_all_pages_and_blocks_come_back(storms):
    for result, blocks in zip(storms, (LARGE, SMALL), strict=True):
        assert result["free_blocks"] == blocks - 1  # vLLM never grants one
        assert result["steps"][-1]["used"] == 0
        assert result["steps"][-1]["free"] == result["pages"]


def test_a_token_without_a_page_is_an_error(in_vllm, tmp_path):
    model = write(tmp_path / "export", *EXPORTS["llama-dms"])
    options = {**OPTIONS, "max_model_len": 112}
    (error,) = in_vllm("starve", [job(model, 10, options=options)])
    assert "a token of its batch found no page" in error
