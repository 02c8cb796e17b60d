"""The kernels sample the tokens after prompts while the host prepares the next step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dms_train.inference.devices import Fetched
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import random_ids
from tests.unit.inference.test_requests import DEVICE, GREEDY, ROWS, directory, run, start, usage

__all__ = ["directory", "start"]  # fixtures

pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter, or a GPU"
)
DRAWN = SamplingParams(max_tokens=5, temperature=0.9, seed=3)
LIMITED = replace(DRAWN, top_p=0.5, top_k=20)


@pytest.fixture
def waits(monkeypatch) -> list[int]:
    """Record every time that the host waits for numbers in flight."""
    found: list[int] = []
    wait = Fetched.wait
    monkeypatch.setattr(Fetched, "wait", lambda self: [found.append(1), wait(self)][1])
    return found


def first_tokens(engine: InferenceEngine, prompts: list[list[int]], params: SamplingParams):
    """Return the first output of every request that has a token."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                found.setdefault(output.request_id, output.outputs[0].token_ids)
    return [found[request_id] for request_id in ids]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, LIMITED], ids=["greedy", "drawn", "limited"])
def test_they_are_those_of_the_host(start, params):
    prompts = [random_ids(n, seed=n) for n in (7, 3, 19)]
    engine, reference = start(kernels="triton"), start(kernels="reference")
    assert first_tokens(engine, prompts, params) == first_tokens(reference, prompts, params)


def test_the_next_step_is_started_before_they_are_known(start, waits):
    engine = start(kernels="triton")
    request_id = engine.add_request(random_ids(7), GREEDY)
    (sequence,) = engine._requests[request_id].sequences
    assert engine.step() == []
    assert (sequence.num_computed_tokens, sequence.num_inflight_tokens, waits) == (7, 1, [])
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == len(waits) == 1
    assert (sequence.num_computed_tokens, sequence.num_inflight_tokens) == (
        8,
        1,
    )  # of the step in flight


def test_the_host_waits_for_sampling_of_its_own(start, waits):
    engine = start(kernels="triton")
    engine.add_request(random_ids(7), replace(GREEDY, logprobs=1))
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == 1
    assert not waits


@pytest.mark.parametrize("ends", ["stop", "length", "abort", "timeout"])
def test_a_sequence_that_ends_with_its_first_token_leaves_nothing(start, ends):
    engine, reference = start(kernels="triton"), start(kernels="reference")
    before = usage(engine)
    reference.add_request(random_ids(7), GREEDY)
    ((first, *_),) = run(reference).values()
    params = {
        "stop": replace(GREEDY, stop_token_ids=(first,)),
        "length": replace(GREEDY, max_tokens=1),
    }.get(ends, GREEDY)
    other = engine.add_request(random_ids(9, seed=2), GREEDY)
    request_id = engine.add_request(random_ids(7), params)
    assert engine.step() == []
    (sequence,) = engine._requests[request_id].sequences
    assert sequence.num_inflight_tokens == 1
    if ends == "abort":
        engine.abort(request_id)
    if ends == "timeout":
        sequence.deadline = 0.0
    found = run(engine)
    assert found.pop(other)
    assert found == ({} if ends == "abort" else {request_id: [first]})
    assert usage(engine) == before


def test_a_preemption_while_a_token_is_in_flight_changes_no_token(start):
    engine, reference = start(kernels="triton"), start(kernels="reference")
    reference.add_request(random_ids(7), DRAWN)
    (expected,) = run(reference).values()
    request_id = engine.add_request(random_ids(7), DRAWN)
    engine.step()
    (sequence,) = engine._requests[request_id].sequences
    engine._scheduler.remove(sequence)  # as a preemption does
    engine._scheduler.add(sequence)
    assert run(engine) == {request_id: expected}
    assert usage(engine)[3] == ROWS


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_sequence_with_a_token_in_flight_is_not_preempted(start, monkeypatch, tokens):
    """Nothing is computed again, and as many prompts as batch slots begin together."""
    engine, reference = start(kernels="triton"), start(kernels="reference")
    params = replace(GREEDY, max_tokens=tokens, ignore_eos=True)
    prompts = [random_ids(4 + i % 5, seed=i) for i in range(3 * ROWS)]
    passes, step = [], engine._runner.step
    monkeypatch.setattr(
        engine._runner, "step", lambda batch: [passes.append(len(batch)), step(batch)][1]
    )
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found = run(engine)
    assert engine.preemptions == 0
    assert passes == [ROWS] * 3
    for prompt in prompts:
        reference.add_request(prompt, params)
    assert [found[request_id] for request_id in ids] == list(run(reference).values())


def test_a_sequence_of_one_token_leaves_a_snapshot_though_others_wait_for_its_row(start):
    engine = start(kernels="triton", enable_prefix_caching=True)
    params = replace(GREEDY, max_tokens=1, ignore_eos=True)
    prompts = [random_ids(20, seed=i) for i in range(ROWS + 1)]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found, last = run(engine), ROWS - 1
    engine.add_request([*prompts[last], *found[ids[last]], 3], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].kv.cached_tokens == 20


def test_a_chunk_is_started_before_the_host_waits_for_the_one_before(start, monkeypatch):
    engine, order = start(kernels="triton"), []
    launch, wait = engine._runner.launch_pass, Fetched.wait
    monkeypatch.setattr(
        engine._runner, "launch_pass", lambda batch: [order.append("launch"), launch(batch)][1]
    )
    monkeypatch.setattr(Fetched, "wait", lambda self: [order.append("wait"), wait(self)][1])
    engine.add_request(random_ids(24), replace(GREEDY, max_tokens=1))
    ((token,),) = run(engine).values()
    assert order == ["launch", "launch", "wait", "launch", "wait", "wait"]
    reference = start(kernels="reference")
    reference.add_request(random_ids(24), GREEDY)
    ((expected, *_),) = run(reference).values()
    assert token == expected


def test_a_sequence_preempted_and_admitted_in_one_step_computes_known_tokens(start):
    """The tokens of a burst are in flight then; they are computed once the host knows them."""
    engine, reference = start(kernels="triton", decode_steps=4), start(kernels="reference")
    params = replace(DRAWN, max_tokens=14, ignore_eos=True)
    request_id = engine.add_request(random_ids(5), params, final_only=True)
    (sequence,) = engine._requests[request_id].sequences
    while sequence.num_inflight_tokens != 4:
        engine.step()
    engine._scheduler.remove(sequence)
    engine._scheduler.add(sequence)
    found = run(engine)
    reference.add_request(random_ids(5), params)
    assert [found[request_id]] == list(run(reference).values())
