"""Values of a request: wrong types and ranges are refused with the value, before any step."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from tests.unit.inference.conftest import random_ids, small_spec

VOCABULARY = 61
IDS = random_ids(5)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
NOT_INTEGERS = (1.5, "1", True, [1], math.nan)
NOT_NUMBERS = ("1", True, [1], math.nan, math.inf, 1j)
WRONG = {
    "n": (*NOT_INTEGERS, None, 0, -1, 10**9),
    "max_tokens": (*NOT_INTEGERS, None, -1),
    "temperature": (*NOT_NUMBERS, None, -0.1, 1e7),
    "top_p": (*NOT_NUMBERS, None, 0, 1.1),
    "top_k": (*NOT_INTEGERS, None, 0, -2, 10**30),
    "min_p": (*NOT_NUMBERS, None, -0.1, 1.1),
    "presence_penalty": (*NOT_NUMBERS, None, 1e7, 10**400),
    "frequency_penalty": (*NOT_NUMBERS, None, -1e7),
    "repetition_penalty": (*NOT_NUMBERS, None, 0, -1, 1e-300),
    "logit_bias": (
        *([1], "1", None),
        *({1.5: 1.0}, {"1": 1.0}, {True: 1.0}, {-1: 1.0}),
        *({1: "x"}, {1: math.nan}, {1: math.inf}, {1: True}),
    ),
    "logprobs": (*NOT_INTEGERS, -1),
    "prompt_logprobs": (*NOT_INTEGERS, -1),
    "seed": NOT_INTEGERS,
    "stop": ("x", b"x", None, ("",), (1,), [None], {"x": 1}, 5),
    "stop_token_ids": (5, "5", None, (1.5,), ("1",), (True,), (-1,)),
    "ignore_eos": (1, "yes", None),
    "kv_trace": (1, "yes", None),
}
PROMPTS = (
    5,
    None,
    b"bytes",
    {},
    {"prompt_token_ids": None},
    {"prompt_token_ids": "text"},
    [1, 2.0],
    ["1"],
    [True],
    [[1]],
    [-1],
    [1, VOCABULARY],
    [2**70],
    np.array([1.5]),
    torch.tensor([True]),
    torch.tensor(1),
)
REQUESTS = (
    {"params": {"max_tokens": 4}},
    {"params": SamplingParams(logit_bias={VOCABULARY: 1.0})},
    {"params": SamplingParams(stop_token_ids=(VOCABULARY,))},
    {"priority": 1.5},
    {"priority": "high"},
    {"priority": True},
    {"timeout_s": "1"},
    {"timeout_s": -1},
    {"timeout_s": math.nan},
)


@pytest.fixture
def directory(folder):
    return folder("llama", small_spec("dms"))


def test_every_field_is_tried():
    assert set(WRONG) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampling_parameter_is_refused_with_its_value(name):
    for value in WRONG[name]:
        with pytest.raises(InferenceError, match=name) as refusal:
            SamplingParams(**{name: value})
        shown = value if not isinstance(value, dict | tuple | list) else next(iter(value))
        assert repr(shown)[:60] in str(refusal.value), (value, refusal.value)
        assert "must" in str(refusal.value)


def test_a_wrong_request_leaves_the_others_alone(directory):
    engine = InferenceEngine(directory, EngineOptions())
    kept = engine.add_request(IDS, GREEDY)
    for prompt in PROMPTS:
        with pytest.raises(InferenceError, match="prompt_token_ids"):
            engine.add_request(prompt, GREEDY)
    for wrong in REQUESTS:
        with pytest.raises(InferenceError, match="must be"):
            engine.add_request(IDS, **{"params": GREEDY, **wrong})
    with pytest.raises(InferenceError, match=r"continuations: token=2\.5"):
        engine.add_scoring(IDS, [[1], [2.5]])
    with pytest.raises(InferenceError, match="sampling_params"):
        engine.add_turn(engine.open_conversation(), IDS, {"n": 1})
    assert engine.unfinished == 1
    outputs = []
    while engine.has_request(kept):
        outputs = engine.step()
    assert len(outputs[0].outputs[0].token_ids) == 4


def test_numbers_of_numpy_are_those_of_python(directory):
    llm, token = LLM(directory), IDS[0]
    plain = SamplingParams(
        n=2,
        max_tokens=6,
        top_k=20,
        top_p=0.75,
        temperature=2.0,
        seed=2**64 - 1,
        logprobs=2,
        logit_bias={token: 1.5},
        stop=[],
        stop_token_ids=[3],
    )
    given = SamplingParams(
        n=np.int8(2),
        max_tokens=np.uint16(6),
        top_k=np.int64(20),
        top_p=np.float32(0.75),
        temperature=np.float16(2.0),
        seed=np.uint64(2**64 - 1),
        logprobs=np.int32(2),
        logit_bias={np.int16(token): np.float32(1.5)},
        stop_token_ids=np.array([3]),
    )
    assert given == plain
    assert type(given.seed) is int
    expected = [output.token_ids for output in llm.generate(IDS, plain)[0].outputs]
    prompts = [np.array(IDS), torch.tensor(IDS), [np.int32(i) for i in IDS], tuple(IDS)]
    for prompt in [*prompts, np.array([IDS]), [np.array(IDS)], {"prompt_token_ids": prompts[1]}]:
        (output,) = llm.generate(prompt, given)
        assert [one.token_ids for one in output.outputs] == expected
        assert output.prompt_token_ids == IDS
        assert all(type(i) is int for i in output.prompt_token_ids)


def test_the_smallest_temperatures_take_the_most_likely_token(directory):
    llm = LLM(directory)
    expected = llm.generate(IDS, GREEDY)[0].outputs[0].token_ids
    how = {"max_tokens": 4, "top_p": 0.5, "min_p": 0.5, "top_k": 9}
    params = [SamplingParams(temperature=t, **how) for t in (5e-324, 1e-310, 1e-300, 1e-6)]
    beside = SamplingParams(temperature=1.0, max_tokens=4, seed=1)
    outputs = llm.generate([IDS] * 5, [*params, beside])
    assert [output.outputs[0].token_ids for output in outputs[:4]] == [expected] * 4
    alone = llm.generate(IDS, beside)[0].outputs[0].token_ids
    assert outputs[4].outputs[0].token_ids == alone


@pytest.mark.parametrize("name", ["max_num_seqs", "decode_steps", "max_model_len", "cache_bytes"])
def test_a_wrong_count_of_the_engine_is_refused_with_its_value(name):
    for value in (1.5, "1", True, 0):
        with pytest.raises(InferenceError, match=f"{name}={value!r}: must be an integer"):
            EngineOptions(**{name: value})
