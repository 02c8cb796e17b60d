"""Preemption: in a cache that is too small, requests wait or are recomputed, with equal tokens."""

from __future__ import annotations

import random

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import CompletionOutput
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"page_slots": 4, "slab_pages": 8, "prefill_chunk": 16, "device": DEVICE.type}
NEEDS_TRITON = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)


def requests(count: int, longest: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Draw prompts of mixed lengths: half of them sampled, some with several continuations."""
    draw = random.Random(seed)
    return [
        (
            random_ids(draw.randint(1, longest // 2), seed=i),
            SamplingParams(
                n=3 if i % 5 == 1 else 1,
                max_tokens=draw.randint(1, longest),
                temperature=float(i % 2),
                seed=i,
                ignore_eos=True,
                kv_trace=True,
            ),
        )
        for i in range(count)
    ]


def run(
    engine: InferenceEngine, work: list[tuple[list[int], SamplingParams]]
) -> list[CompletionOutput]:
    """Add requests while others run; return the continuations of all."""
    waiting, ids, found = list(work), [], {}
    while waiting or engine.has_unfinished_requests():
        for prompt, params in waiting[:3]:
            ids.append(engine.add_request(prompt, params))
        del waiting[:3]
        found |= {o.request_id: o.outputs for o in engine.step() if o.finished}
    return [output for i in ids for output in found[i]]


@pytest.mark.parametrize(
    ("policy", "kernels", "count", "longest"),
    [
        ("dms", "reference", 12, 24),
        ("keep_all", "reference", 12, 24),
        pytest.param("dms", "triton", 9, 16, marks=NEEDS_TRITON),
        pytest.param("keep_all", "triton", 9, 16, marks=[NEEDS_TRITON, pytest.mark.slow]),
    ],
)
def test_a_pool_for_a_third_of_the_requests_changes_no_token(
    folder, policy, kernels, count, longest
):
    directory = folder("llama", small_spec("dms"))
    work = requests(count, longest, seed=3)
    alone = LLM(directory, policy=policy, kernels="reference", **SIZES)
    outputs = [alone.generate(prompt, params)[0].outputs for prompt, params in work]
    single = [output for found in outputs for output in found]
    held = [output.kv.peak_allocated_bytes for output in single]
    third = max(sum(held) // 3, 2 * max(held))
    options = {"max_num_seqs": count, "cache_bytes": third, "decode_steps": 1, **SIZES}
    engine = InferenceEngine(directory, EngineOptions(policy=policy, kernels=kernels, **options))
    for found, expected in zip(run(engine, work), single, strict=True):
        assert found.token_ids == expected.token_ids
        assert len(found.kv.trace.kv_reads) == len(found.token_ids)
        assert found.kv.trace.kv_reads[-1] == expected.kv.kv_reads
        assert found.kv.trace.live_tokens.max() <= expected.kv.peak_live_tokens
        assert found.kv.trace.live_tokens[-1] == expected.kv.live_tokens
    assert engine.preemptions > 0
    assert engine.free_batch_slots == count
    cache = engine._runner.cache
    assert (engine.kv.live_bytes, cache.used_pages) == (0, 0)
    assert cache.max_pages * cache.pool.page_slots * cache.slot_bytes <= third
    if kernels == "reference":
        assert cache.pool.peak_bytes <= third
        assert cache.pool.allocated_bytes == 0


@pytest.mark.parametrize("kernels", ["reference", pytest.param("triton", marks=NEEDS_TRITON)])
def test_continuations_that_do_not_fit_together_generate_the_same_tokens(folder, kernels):
    directory, prompt = folder("llama", small_spec("dms")), random_ids(20)
    params = SamplingParams(n=3, seed=7, max_tokens=18, ignore_eos=True)
    (alone,) = LLM(directory, kernels="reference", **SIZES).generate([prompt], params)
    one = max(output.kv.peak_allocated_bytes for output in alone.outputs)
    options = {"max_num_seqs": 3, "cache_bytes": one * 3 // 2, **SIZES, "slab_pages": 1}
    engine = InferenceEngine(directory, EngineOptions(kernels=kernels, **options))
    engine.add_request(prompt, params)
    found = []
    while engine.has_unfinished_requests():
        found += [output for output in engine.step() if output.finished]
    assert [o.token_ids for o in found[0].outputs] == [o.token_ids for o in alone.outputs]
    assert engine.preemptions > 0


def test_a_request_that_outgrows_the_cache_keeps_what_it_has(folder):
    directory = folder("llama", small_spec("dms"))
    llm = LLM(directory, policy="keep_all", cache_bytes=35_000, **SIZES)
    long = SamplingParams(max_tokens=800, temperature=0.0, ignore_eos=True)
    first, second = llm.generate(
        [random_ids(5), random_ids(9)], [long, SamplingParams(max_tokens=4)]
    )
    assert first.outputs[0].finish_reason == "memory"
    assert 20 < len(first.outputs[0].token_ids) < 800
    assert second.outputs[0].finish_reason == "length"
    with pytest.raises(InferenceError, match="cache_bytes"):
        llm.logits(random_ids(900))
    assert llm.allocated_bytes <= 35_000 + llm.engine._runner.cache.table_bytes
    assert llm.generate(random_ids(5), SamplingParams(max_tokens=2))[0].finished


def test_a_cache_without_room_for_a_slab_is_refused(folder):
    with pytest.raises(InferenceError, match="cache_bytes=100"):
        LLM(folder("llama", None), cache_bytes=100)
    with pytest.raises(InferenceError, match="cache_bytes"):
        LLM(folder("llama", None), cache_bytes=10**9, cache="dense")


def test_a_request_ends_when_its_time_is_over(folder):
    engine = InferenceEngine(folder("llama", None), EngineOptions(**SIZES))
    late = engine.add_request(random_ids(5), SamplingParams(max_tokens=9), timeout_s=0.0)
    other = engine.add_request(random_ids(5), SamplingParams(max_tokens=9), timeout_s=1e6)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    assert (ended[late].finish_reason, ended[late].token_ids) == ("timeout", [])
    assert ended[other].finish_reason == "length"
    assert (engine.kv.requests, engine.kv.tokens) == (2, 5 + 8)
    assert engine.free_batch_slots == engine.options.max_num_seqs


def test_lower_priority_numbers_start_first(folder):
    engine = InferenceEngine(folder("llama", None), EngineOptions(max_num_seqs=1, **SIZES))
    ids = [engine.add_request(random_ids(5), priority=priority) for priority in (1, 0, -1)]
    ended = []
    while engine.has_unfinished_requests():
        ended += [o.request_id for o in engine.step() if o.finished]
    assert ended == ids[::-1]


def test_continuations_of_a_prompt_differ_by_their_index_alone(folder):
    directory = folder("llama", small_spec("dms"))
    llm, prompt = LLM(directory, **SIZES), random_ids(20)
    several = SamplingParams(n=3, seed=5, max_tokens=12, logprobs=1)
    (request,) = llm.generate(prompt, several)
    first, second, third = (o.token_ids for o in request.outputs)
    assert [o.index for o in request.outputs] == [0, 1, 2]
    assert first != second != third != first
    single = SamplingParams(seed=5, max_tokens=12)
    assert llm.generate(prompt, single)[0].outputs[0].token_ids == first
    greedy = SamplingParams(n=3, temperature=0.0, max_tokens=12, seed=1)
    assert len({tuple(o.token_ids) for o in llm.generate(prompt, greedy)[0].outputs}) == 1
    assert llm.generate(prompt, several)[0].outputs == request.outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuations_end_together_or_one_by_one_and_are_forgotten(folder, temperature):
    engine = InferenceEngine(folder("llama", small_spec("dms")), EngineOptions(**SIZES))
    several = SamplingParams(
        n=3, seed=2, max_tokens=9, temperature=temperature, stop_token_ids=(48,)
    )
    engine.add_request(random_ids(20), several)
    ended = []
    while engine.has_unfinished_requests():
        ended += [output for output in engine.step() if output.finished]
    assert [len(output.outputs) for output in ended] == [3]
    assert engine.free_batch_slots == engine.options.max_num_seqs
    assert engine.kv.requests == 3
    assert engine.step() == []


def test_logprobs_are_those_of_the_masked_model(folder, oracle):
    directory, prompt = folder("llama", small_spec("dms")), random_ids(30)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
    (output,) = LLM(directory, **SIZES).generate(prompt, params)[0].outputs
    logits, _ = oracle(directory, prompt + output.token_ids)
    exact = logits[len(prompt) - 1 : -1].log_softmax(-1)
    for place, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert found.logprob == pytest.approx(exact[place, token].item(), abs=1e-4)
        top = exact[place].topk(4)
        assert list(found.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
        assert next(iter(found.top)) == token
