"""Every option of the engine, and every parameter of a request, is read back where it acts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.evaluation.measure import EvaluationTarget
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput
from tests.support.wiring import Wire, missing_tests, uncovered
from tests.unit.evaluation import conftest as evaluation

target, tokenizer, load = (getattr(evaluation, name) for name in ("target", "tokenizer", "load"))
PROMPT = [5, 9, 14, 20, 9, 31, 40, 9, 2]
TRITON = {"kernels": "triton"}
HUGE = 1e6


class Built:
    """An engine with options."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        self.model, self.options = model, EngineOptions(**options)

    @property
    def engine(self) -> InferenceEngine:
        return InferenceEngine(self.model, self.options)


def limit(name: str) -> Callable[[Built], Any]:
    return lambda b: getattr(b.engine._scheduler.limits, name)


def cache(name: str) -> Callable[[Built], Any]:
    return lambda b: getattr(b.engine._runner.cache, name)


def device(b: Built) -> str:
    try:
        return str(b.engine._runner._device)
    except InferenceError as error:
        return str(error).partition("device=")[2].partition(": ")[0]


def prompt_reads(engine: InferenceEngine, prompt: list[int]) -> tuple[list[int], float]:
    """Tokens of a continuation, and slots that its prompt has read."""
    engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0.0))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = [output for output in engine.step() if output.finished]
    return outputs[0].outputs[0].token_ids, outputs[0].kv.prefill_reads


def snapshots(b: Built) -> bool:
    """A prompt that goes on from a finished request computes less than in a new engine."""
    engine = b.engine
    tokens, _ = prompt_reads(engine, PROMPT * 4)
    longer = PROMPT * 4 + tokens + PROMPT
    return prompt_reads(engine, longer)[1] < prompt_reads(b.engine, longer)[1]


ENGINE: dict[str, Wire] = {
    "policy": Wire("keep_all", lambda b: type(cache("policy")(b)).__name__, "KeepAllPolicy"),
    "policy_options": Wire(
        {"window": 5},
        lambda b: cache("policy")(b).window,
        5,
        {"policy": "window", "policy_options": {"window": 3}},
    ),
    "cache": Wire("dense", lambda b: type(b.engine._runner.cache).__name__, "DenseCache"),
    "max_num_seqs": Wire(3, lambda b: b.engine.free_batch_slots),
    "max_num_batched_tokens": Wire(77, limit("max_num_batched_tokens")),
    "prefill_chunk": Wire(7, limit("prefill_chunk")),
    "decode_steps": Wire(3, limit("decode_steps"), others=TRITON),
    "max_model_len": Wire(99, lambda b: b.engine.longest),
    "cache_bytes": Wire(2**20, lambda b: cache("max_pages")(b), lambda b: pages_within(b, 2**20)),
    "enable_prefix_caching": Wire(True, snapshots),
    "page_slots": Wire(8, limit("page_slots")),
    "slab_pages": Wire(64, lambda b: cache("pool")(b).allocator.slab_pages),
    "dtype": Wire("bfloat16", lambda b: b.engine.dtype, torch.bfloat16),
    "device": Wire("cuda:7", device),
    "kernels": Wire("triton", lambda b: "Paged" in type(b.engine._runner.cache).__name__, True),
    "cache_dtype": Wire("fp8", lambda b: cache("pool")(b).pages.dtype, torch.float8_e4m3fn, TRITON),
}
ENGINE_ELSEWHERE = {
    "gpu_memory_utilization": (
        "gpu/test_paged_engine.py::test_the_cache_takes_its_share_of_the_memory"
    ),
}


def pages_within(b: Built, size: int) -> int:
    pool = cache("pool")(b)
    return size // pool.slab_bytes * b.options.slab_pages


@pytest.mark.parametrize("key", ENGINE)
def test_an_option_of_the_engine_acts(target: EvaluationTarget, key: str) -> None:
    wire = ENGINE[key]
    found = []
    for own in (None, key):
        built = Built(target.export, wire.given(None, own))
        found.append(wire.read(built))
    assert found[1] == wire.expectation(built)
    assert found[0] != found[1], "the value is the default, or another option decides"


class Answered:
    """A request with parameters to a dense model."""

    def __init__(self, model: Path, params: dict[str, Any]) -> None:
        self.model, self.llm = model, LLM(model)
        self.params = SamplingParams(**params)

    @property
    def output(self) -> RequestOutput:
        return self.llm.generate(PROMPT, self.params)[0]

    @property
    def tokens(self) -> list[int]:
        return self.output.outputs[0].token_ids


def tokens(a: Answered) -> list[int]:
    return a.tokens


def first(a: Answered) -> int:
    return a.tokens[0]


def greedy(a: Answered) -> list[int]:
    """The most likely continuation, by whole passes."""
    ids = list(PROMPT)
    for _ in range(a.params.max_tokens):
        ids.append(int(a.llm.logits(ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def unrepeated(a: Answered) -> list[int]:
    """The most likely continuation where the tokens so far are worth nothing."""
    ids = list(PROMPT)
    for _ in range(a.params.max_tokens):
        logits, seen = a.llm.logits(ids)[-1].double(), sorted(set(ids))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / HUGE, logits[seen] * HUGE)
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


def distinct(a: Answered) -> bool:
    return len(set(a.tokens)) == len(a.tokens)


def widths(entries: list[Any] | None) -> int | None:
    """Alternatives at the newest token; None if nothing was asked for."""
    return None if entries is None else len(entries[-1].top)


def ended(a: Answered) -> str | None:
    return a.output.outputs[0].finish_reason


def second_token(llm: LLM) -> int:
    output = llm.generate(PROMPT, SamplingParams(**COLD))[0].outputs[0]
    return output.token_ids[1]


def second_letter(llm: LLM) -> str:
    return llm.generate(PROMPT, SamplingParams(**COLD))[0].outputs[0].text[1]


def again(a: Answered) -> list[int]:
    """The same seed gives the same tokens, in another engine too."""
    return LLM(a.model).generate(PROMPT, a.params)[0].outputs[0].token_ids


COLD = {"temperature": 0.0, "max_tokens": 12}
WARM = {"temperature": 1.5, "max_tokens": 12, "seed": 1}
SAMPLING: dict[str, Wire] = {
    "n": Wire(3, lambda a: len(a.output.outputs)),
    "max_tokens": Wire(5, lambda a: len(a.tokens), others={"temperature": 0.0}),
    "temperature": Wire(0.0, tokens, greedy, WARM),
    "top_p": Wire(1e-9, tokens, greedy, WARM),
    "top_k": Wire(1, tokens, greedy, WARM),
    "min_p": Wire(1.0, tokens, greedy, WARM),
    "presence_penalty": Wire(HUGE, distinct, True, COLD | {"max_tokens": 30}),
    "frequency_penalty": Wire(HUGE, distinct, True, COLD | {"max_tokens": 30}),
    "repetition_penalty": Wire(HUGE, tokens, unrepeated, COLD | {"max_tokens": 30}),
    "logit_bias": Wire({7: 1e4}, first, 7, COLD),
    "logprobs": Wire(2, lambda a: widths(a.output.outputs[0].logprobs), 2, COLD),
    "prompt_logprobs": Wire(3, lambda a: widths(a.output.prompt_logprobs), 3, COLD),
    "seed": Wire(77, tokens, again, WARM),
    "stop": Wire(lambda llm: (second_letter(llm),), ended, "stop", COLD),
    "stop_token_ids": Wire(lambda llm: (second_token(llm),), ended, "stop", COLD),
    "ignore_eos": Wire(True, ended, "length", COLD),
    "kv_trace": Wire(True, lambda a: a.output.outputs[0].kv.trace is not None, others=COLD),
}


@pytest.fixture(scope="module")
def model(target: EvaluationTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model that ends a text with the second token of its answer to the prompt."""
    copy = shutil.copytree(target.teacher, tmp_path_factory.mktemp("dense") / "model")
    stop = {"eos_token_id": second_token(LLM(copy))}
    (copy / "generation_config.json").write_text(json.dumps(stop))
    return copy


@pytest.mark.parametrize("key", SAMPLING)
def test_a_parameter_of_a_request_acts(target: EvaluationTarget, model: Path, key: str) -> None:
    wire = SAMPLING[key]
    chosen, found = model if key == "ignore_eos" else target.teacher, []
    for own in (None, key):
        asked = Answered(chosen, wire.given(LLM(chosen), own))
        found.append(wire.read(asked))
    assert found[1] == wire.expectation(asked)
    assert found[0] != found[1], "the value is the default, or another parameter decides"


def test_every_option_has_a_test() -> None:
    assert uncovered([f.name for f in fields(EngineOptions)], ENGINE, ENGINE_ELSEWHERE) == []
    assert uncovered([f.name for f in fields(SamplingParams)], SAMPLING, {}) == []
    assert missing_tests(ENGINE_ELSEWHERE) == []
