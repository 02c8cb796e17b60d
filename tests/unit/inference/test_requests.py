"""Requests of the engine are added, stepped and aborted; no page is lost."""

from __future__ import annotations

import gc
import importlib
import weakref
from dataclasses import replace

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.models import fused
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import CompletionOutput
from dms_train.kernels import dispatch
from dms_train.kernels.prefill import sparse
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ROWS = 3
CACHES = [
    {"kernels": "reference"},
    {"kernels": "reference", "cache": "dense"},
    pytest.param(
        {"kernels": "triton"},
        marks=pytest.mark.skipif(
            not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
        ),
    ),
]


@pytest.fixture
def directory(folder):
    return folder("llama", small_spec("dms"))


@pytest.fixture
def start(directory):
    """(**options) -> engine with small pages."""

    def _start(**options) -> InferenceEngine:
        small = {"page_slots": 4, "slab_pages": 8, "prefill_chunk": 8, "max_num_seqs": ROWS}
        return InferenceEngine(directory, EngineOptions(**small, device=DEVICE.type, **options))

    return _start


def usage(engine: InferenceEngine) -> tuple:
    """Return live slots, pages in use, bytes and free batch slots of the cache."""
    cache = engine._runner.cache
    live = int(cache.live(torch.arange(ROWS, device=DEVICE)).sum())
    return live, cache.used_pages, cache.allocated_bytes, engine.free_batch_slots


def run(engine: InferenceEngine) -> dict[str, list[int]]:
    """Run until all requests have finished; return their tokens."""
    found = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    return found


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_requests_that_arrive_later_join_the_batch(start, options):
    """Each of more requests than batch slots generates the same tokens as alone."""
    prompts = [random_ids(n, seed=n) for n in (20, 3, 9, 4)]
    engine = start(**options)
    before = usage(engine)
    ids = [engine.add_request(prompts[0], GREEDY)]
    found = {}
    for prompt in prompts[1:]:
        for _ in range(3):
            found |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        ids.append(engine.add_request(prompt, GREEDY))
    found |= run(engine)
    alone = start(kernels="reference")
    expected = [list(run_one(alone, prompt).values()) for prompt in prompts]
    assert [[found[request_id]] for request_id in ids] == expected
    assert usage(engine) == before
    assert engine.step() == []


def run_one(engine: InferenceEngine, prompt: list[int]) -> dict[str, list[int]]:
    engine.add_request(prompt, GREEDY)
    return run(engine)


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_an_aborted_request_frees_its_pages_at_once(start, options, steps):
    """Abort in the prompt, after it and during generation; the other request continues."""
    engine = start(**options)
    before = usage(engine)
    kept = engine.add_request(random_ids(9), GREEDY)
    for _ in range(2):
        engine.step()
    alone = usage(engine)
    second = engine.add_request(random_ids(20, seed=1), GREEDY)
    for _ in range(steps):
        engine.step([second])
    assert usage(engine)[0] > alone[0]
    engine.abort(second)
    assert usage(engine)[0] == alone[0]
    if options.get("cache") != "dense":
        assert usage(engine)[1] == alone[1] or engine._runner.cache.pool.allocated_bytes < alone[2]
    assert list(run(engine)) == [kept]
    assert usage(engine) == before


def test_abort_of_a_waiting_finished_or_unknown_request(start):
    engine = start()
    ids = [engine.add_request(random_ids(5, seed=n), GREEDY) for n in range(ROWS + 1)]
    engine.step()
    engine.abort(ids[-1])  # it waits for a row
    assert sorted(run(engine)) == ids[:-1]
    engine.abort(ids[0])
    engine.abort("never added")
    assert not engine.has_unfinished_requests()


def test_a_kept_cache_is_free_after_abort(start):
    engine = start()
    before = usage(engine)
    request_id = engine.add_request(random_ids(9), GREEDY, keep_cache=True)
    run(engine)
    assert usage(engine)[1] > before[1]
    engine.abort(request_id)
    assert usage(engine) == before


def test_final_only_shows_a_request_once(start):
    engine = start()
    engine.add_request(random_ids(9), GREEDY, final_only=True)
    shown = []
    while engine.has_unfinished_requests():
        shown += engine.step()
    assert [(o.finished, len(o.outputs[0].token_ids)) for o in shown] == [(True, 6)]


def test_idle_conversations_give_their_rows_to_requests(start):
    engine = start()
    held = [engine.open_conversation() for _ in range(ROWS)]
    for request_id in held:
        engine.add_turn(request_id, random_ids(9), GREEDY)
    run(engine)
    assert engine.free_batch_slots == 0
    assert len(run_one(engine, random_ids(5)).popitem()[1]) == 6
    assert engine.preemptions == 1


class Interrupted(BaseException):
    """Error that the engine does not expect, like KeyboardInterrupt."""


def interrupt(monkeypatch, engine, options, call: int):
    """Raise in the middle of a forward pass, at a given call of attention."""
    calls = iter(range(10**6))

    def broken(original):
        def _broken(*args, **kwargs):
            if next(calls) == call:
                raise Interrupted
            return original(*args, **kwargs)

        return _broken

    if options["kernels"] == "triton":
        monkeypatch.setattr(sparse, "extend", broken(sparse.extend))
    else:
        cache = engine._runner.cache
        monkeypatch.setattr(cache, "attend", broken(cache.attend))


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("call", [0, 3, 5])
def test_an_error_in_the_middle_of_a_pass_loses_no_pages(start, monkeypatch, options, call):
    """The requests of the pass are aborted, their pages are freed, and later requests run."""
    engine = start(**options)
    before = usage(engine)
    expected = run_one(engine, random_ids(20))
    with monkeypatch.context() as patch:
        interrupt(patch, engine, options, call)
        engine.add_request(random_ids(20), GREEDY)
        engine.add_request(random_ids(30, seed=1), GREEDY)
        with pytest.raises(Interrupted):
            run(engine)
    assert usage(engine) == before
    assert not engine.has_unfinished_requests()
    assert list(run_one(engine, random_ids(20)).values()) == list(expected.values())
    assert usage(engine) == before


def test_memory_that_runs_out_while_a_slab_opens_loses_no_pages(start, monkeypatch):
    engine = start(kernels="reference")
    zeros, calls = torch.zeros, iter(range(10**6))

    def full(*args, **kwargs):
        if kwargs.get("dtype") == torch.int32 and next(calls) == 1:
            raise torch.OutOfMemoryError
        return zeros(*args, **kwargs)

    engine.add_request(random_ids(60), GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            run(engine)
    pool = engine._runner.cache.pool
    assert (pool.allocator.used, pool.allocated_bytes) == (0, 0)
    assert len(run_one(engine, random_ids(60)).popitem()[1]) == 6


def test_generate_runs_beside_a_stream_without_advancing_it(directory):
    llm = LLM(directory, max_num_seqs=2)
    stream = llm.stream(random_ids(5), GREEDY)
    first = next(stream)[0].outputs[0].token_ids
    llm.generate(random_ids(9), GREEDY)
    assert len(next(stream)[0].outputs[0].token_ids) == len(first) + 1


def test_a_stream_that_never_starts_leaves_no_request(directory):
    llm = LLM(directory)
    stream = llm.stream(random_ids(5), GREEDY)
    assert llm.engine.has_unfinished_requests()
    del stream
    assert not llm.engine.has_unfinished_requests()


def test_a_bad_prompt_leaves_none_of_its_list(directory):
    llm = LLM(directory)
    with pytest.raises(InferenceError, match="empty"):
        llm.generate([[1, 2], []], GREEDY)
    assert not llm.engine.has_unfinished_requests()


def test_an_interrupted_turn_closes_the_conversation(directory, monkeypatch):
    llm = LLM(directory, max_num_seqs=1)
    conversation = llm.conversation()
    with monkeypatch.context() as patch:
        interrupt(patch, llm.engine, {"kernels": "reference"}, 3)
        with pytest.raises(Interrupted):
            conversation.say(random_ids(20), GREEDY)
    with pytest.raises(InferenceError, match="closed"):
        conversation.say([1])
    assert llm.generate([1], GREEDY)[0].finished


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_a_step_that_cannot_start_waits_for_the_one_in_flight(start, monkeypatch):
    """The inputs of a running graph must not change."""
    engine = start(kernels="triton", decode_steps=4)
    engine.add_request(random_ids(5), replace(GREEDY, max_tokens=20), final_only=True)
    while not engine._launched:
        engine.step()
    in_flight, waited = list(engine._launched), []

    def failed(*args):
        raise Interrupted

    monkeypatch.setattr(engine._runner, "launch", failed)
    monkeypatch.setattr(engine._runner, "wait", waited.append)
    with pytest.raises(Interrupted):
        engine.step()
    assert waited == in_flight
    assert not engine.has_unfinished_requests()


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_a_step_too_many_is_not_counted(start):
    """Requests stop while their next step is in flight, at a token, a time or `max_tokens`.

    In decode bursts, costs are those of single steps.
    """
    prompts = [random_ids(n, seed=n) for n in (12, 5, 9, 3)]
    free = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    reference = start(kernels="reference")
    ids = [reference.add_request(prompt, free) for prompt in prompts]
    texts = run(reference)
    found = []
    for kernels, steps in (("reference", 4), ("triton", 1), ("triton", 4)):
        engine = start(kernels=kernels, decode_steps=steps)
        for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            stops = (texts[request_id][2 + 2 * number],)
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop_token_ids=stops)
            engine.add_request(prompt, params, final_only=True)
        engine.add_request(random_ids(3, seed=9), replace(free, max_tokens=7), final_only=True)
        outputs, passes = {}, 0
        while engine.has_unfinished_requests():
            outputs |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
            passes += 1
        found.append({i: (o.token_ids, o.finish_reason, costs(o)) for i, o in outputs.items()})
        tokens = sum(costs["tokens"] for *_, costs in found[0].values())
        assert (engine.kv.tokens, engine.free_batch_slots) == (tokens, ROWS)
        assert (engine.decoded_steps > passes) == (kernels == "triton" and steps > 1)
    assert found[0] == found[1] == found[2]
    reasons = [found[0][i][1] for i in ids]
    assert reasons == ["stop"] * len(ids)
    assert [len(found[0][i][0]) for i in ids] != [12] * len(ids)


@pytest.mark.parametrize(
    ("kernels", "steps"),
    [
        ("reference", 1),
        pytest.param(
            "triton",
            4,
            marks=pytest.mark.skipif(
                not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    ("policy", "own"),
    [("auto", {}), ("h2o", {"cr": 1.5})],
    ids=["auto", "h2o"],
)
def test_a_trace_is_what_a_stream_shows_at_each_token(start, kernels, steps, policy, own):
    """More continuations than batch slots stop at different times.

    The stream computes one token per step with torch operations.
    """
    prompts = [random_ids(n, seed=n) for n in (12, 2)]
    how = {"policy": policy, "policy_options": own}
    params = [SamplingParams(n=2, max_tokens=5 + n, seed=n, stop_token_ids=(7,)) for n in (0, 1)]
    stream = start(kernels="reference", **how)
    expected: dict[tuple[str, int], list] = {}
    for prompt, asked in zip(prompts, params, strict=True):
        stream.add_request(prompt, asked)
    while stream.has_unfinished_requests():
        for output in stream.step():
            for chain in output.outputs:
                shown = expected.setdefault((output.request_id, chain.index), [])
                if len(chain.token_ids) > len(shown):
                    shown.append((chain.token_ids[-1], chain.kv.kv_reads, chain.kv.live_tokens))
                assert len(shown) == len(chain.token_ids)
                assert chain.kv.trace is None
    engine = start(kernels=kernels, decode_steps=steps, **how)
    for prompt, asked in zip(prompts, params, strict=True):
        engine.add_request(prompt, replace(asked, kv_trace=True), final_only=True)
    found = {}
    passes = 0
    while engine.has_unfinished_requests():
        passes += 1
        for output in engine.step():
            for chain in output.outputs:
                trace = chain.kv.trace
                rows = (chain.token_ids, trace.kv_reads.tolist(), trace.live_tokens.tolist())
                found[output.request_id, chain.index] = list(zip(*rows, strict=True))
                assert chain.kv.kv_reads == trace.kv_reads[-1]
    assert found == expected
    assert len({len(rows) for rows in found.values()}) > 1
    assert (engine.decoded_steps > passes) == (steps > 1)


RESTRICTED = [
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=7, temperature=0.7),
    GREEDY,
    SamplingParams(top_k=30, top_p=0.9, min_p=0.02, temperature=1.5),
]


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
@pytest.mark.parametrize("final_only", [False, True])
def test_top_k_top_p_and_min_p_are_decoded_by_the_kernels(start, final_only):
    """Bursts without streamed requests; more requests than batch slots, of different parameters."""
    asked = [replace(p, seed=i, max_tokens=5 + i) for i, p in enumerate(RESTRICTED)]
    found = []
    for how in ({"kernels": "reference"}, {"kernels": "triton", "decode_steps": 4}):
        engine = start(**how)
        for seed, params in enumerate(asked):
            engine.add_request(random_ids(5 + seed, seed=seed), params, final_only=final_only)
        passes, tokens = 0, {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            tokens |= {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
            passes += 1
        found.append(tokens)
    assert found[0] == found[1]
    assert [len(tokens) for _, tokens in sorted(found[0].items())] == [5, 6, 7, 8]
    assert (engine.decoded_steps > passes) == final_only
    assert engine.decoded_steps >= 7
    alone = start(kernels="triton", decode_steps=1)
    alone.add_request(random_ids(5 + 3, seed=3), asked[3])
    assert run(alone) == {"0": found[1]["3"]}
    assert alone.decoded_steps == 7  # all but the first token


@pytest.mark.skipif(
    DEVICE.type == "cuda" or not dispatch.is_supported(DEVICE),
    reason="needs triton's interpreter: a graph is replayed without this function",
)
def test_requests_without_top_k_top_p_and_min_p_run_no_kernels_for_them(start, monkeypatch):
    restrict = importlib.import_module("dms_train.kernels.layers.triton_restrict")
    engine, calls = start(kernels="triton"), []
    monkeypatch.setattr(restrict, "restrict", lambda *_: calls.append(1))
    for params in (GREEDY, SamplingParams(), replace(GREEDY, top_k=5, top_p=0.5)):
        engine.add_request(random_ids(4), params)
    run(engine)
    assert not calls
    engine.add_request(random_ids(4), SamplingParams(top_p=0.5, max_tokens=3))
    run(engine)
    assert len(calls) == 3  # after the prompt as well


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
@pytest.mark.parametrize("how", [{}, {"final_only": True}], ids=["streamed", "sampled by the host"])
def test_no_burst_runs_if_it_would_delay_a_request(start, how):
    engine = start(kernels="triton", decode_steps=4)
    engine.add_request(random_ids(5), replace(GREEDY, max_tokens=20), final_only=True)
    params = GREEDY if not how else replace(GREEDY, logprobs=0)
    other = engine.add_request(random_ids(4), params, **how)
    steps = 0
    while engine.has_request(other):
        engine.step()
        steps += 1
        assert engine.decoded_steps <= steps
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert engine.decoded_steps > steps


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_past_its_deadline_keeps_its_in_flight_tokens(start, steps):
    prompt, params = random_ids(5), replace(GREEDY, max_tokens=20)
    reference = start(kernels="reference")
    reference.add_request(prompt, params)
    (expected,) = run(reference).values()
    engine = start(kernels="triton", decode_steps=steps)
    request_id = engine.add_request(prompt, params, timeout_s=1e6, final_only=True)
    for _ in range(4):
        assert not engine.step()
    (sequence,) = engine._requests[request_id].sequences
    sampled = sequence.length - sequence.prompt_end
    assert sequence.num_inflight_tokens == steps
    sequence.deadline = 0.0
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "timeout"
    assert output.outputs[0].token_ids == expected[:sampled]
    assert usage(engine)[3] == ROWS


def costs(output: CompletionOutput) -> dict:
    """Return tokens and reads of an output."""
    fields = (f for f in output.kv.__dataclass_fields__ if "bytes" not in f)
    found = {name: getattr(output.kv, name) for name in fields}
    return found | {"cr_factors": output.kv.cr_factors.tolist()}


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_a_conversation_continues_after_a_step_too_many(directory):
    """A turn of one token takes the entry of the dropped step in the batch."""
    found = []
    for kernels in ("reference", "triton"):
        options = EngineOptions(kernels=kernels, page_slots=4, max_num_seqs=2, device=DEVICE.type)
        with LLM(directory, options).conversation() as talk:
            first = talk.say(random_ids(7), SamplingParams(max_tokens=8, temperature=0.0))
            stop = (first.outputs[0].token_ids[3],)
        with LLM(directory, options).conversation() as talk:
            params = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=stop)
            turns = [talk.say(prompt, params) for prompt in (random_ids(7), [5], [6], [7, 8])]
        found.append([(turn.outputs[0].token_ids, turn.outputs[0].kv.kv_reads) for turn in turns])
    assert found[0] == found[1]


@pytest.mark.skipif(not dispatch.is_supported(DEVICE), reason="needs triton's interpreter")
def test_steps_of_many_sequences_run_the_layers_of_the_decoder(start, monkeypatch):
    """A fused product of more sequences than a program takes would read its weights repeatedly."""
    decoder = start(kernels="reference")._runner.model.decoder
    assert fused.can_fuse(decoder, 64)
    assert fused.can_fuse(decoder, 65)  # its weights are small
    monkeypatch.setattr(fused, "_CACHED_BYTES", 0)
    assert fused.can_fuse(decoder, 64)
    assert not fused.can_fuse(decoder, 65)
    monkeypatch.setattr(fused, "_SEQUENCES", 0)
    monkeypatch.delattr(fused.FusedDecoder, "logits")
    prompt = random_ids(5)
    engine, reference = start(kernels="triton"), start(kernels="reference")
    assert run_one(engine, prompt) == run_one(reference, prompt)


@pytest.mark.parametrize("how", CACHES)
def test_an_engine_that_is_dropped_frees_its_cache_at_once(how, start) -> None:
    """It needs no garbage collector, so the next engine finds the memory."""
    start(**how)  # a first import keeps frames alive
    gc.collect()
    gc.disable()
    try:
        engine = start(**how)
        engine.add_request([3, 5], GREEDY)
        run(engine)
        cache = weakref.ref(engine._runner.cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()
