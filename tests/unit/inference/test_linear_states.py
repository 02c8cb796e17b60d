"""States of linear attention in the engine, against the export's own code."""

from __future__ import annotations

import pytest

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from tests.unit.inference.conftest import random_ids, small_spec

FAMILY = "qwen3_5_text"
SMALL = {"page_slots": 4, "slab_pages": 1}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def run(engine, prompts, params=GREEDY):
    """Output of each prompt, all added at once."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [found[request_id] for request_id in ids]


def test_kernels_continue_with_the_same_tokens(folder, assert_greedy):
    """More prompts than rows, so that rows are used again."""
    directory = folder(FAMILY, small_spec("dms"))
    prompts = [random_ids(n, n) for n in (20, 3, 9)]
    how = {"max_num_seqs": 2, "prefill_chunk": 16, "kernels": "triton"}
    outputs = LLM(directory, **how).generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(directory, prompt, output.outputs[0].token_ids)


def test_a_snapshot_holds_the_states_after_its_tokens(folder, assert_greedy):
    directory = folder(FAMILY, small_spec("dms"))
    options = EngineOptions(enable_prefix_caching=True, prefill_chunk=7, max_num_seqs=12, **SMALL)
    engine, system = InferenceEngine(directory, options), random_ids(40, seed=9)
    for number in range(4):
        prompt = [*system, number, *random_ids(10, seed=number)]
        (output,) = run(engine, [prompt])
        assert_greedy(directory, prompt, output.outputs[0].token_ids)
        assert output.kv.cached_tokens == (40 if number >= 2 else 0)
        # another request takes the row in between
        run(engine, [random_ids(5, seed=50 + number)])


def test_continuations_of_a_prompt_start_from_its_states(folder, assert_greedy):
    directory, prompt = folder(FAMILY, small_spec("dms")), random_ids(30)
    params = SamplingParams(n=3, max_tokens=12, temperature=0.0, ignore_eos=True)
    (output,) = LLM(directory, prefill_chunk=7, **SMALL).generate([prompt], params)
    assert len(output.outputs) == 3
    for continuation in output.outputs:
        assert_greedy(directory, prompt, continuation.token_ids)


def test_a_preempted_sequence_computes_its_states_again(folder, assert_greedy):
    directory = folder(FAMILY, small_spec("dms"))
    prompts = [random_ids(n, n) for n in (6, 4, 5)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    states = LLM(directory, max_num_seqs=3, **SMALL).engine._runner.cache.states.nbytes
    held = LLM(directory, max_num_seqs=1, **SMALL).generate(prompts, params)
    most = max(output.kv.peak_allocated_bytes for output in held)
    options = EngineOptions(max_num_seqs=3, cache_bytes=states + 3 * most // 2, **SMALL)
    engine = InferenceEngine(directory, options)
    for prompt, output in zip(prompts, run(engine, prompts, params), strict=True):
        assert_greedy(directory, prompt, output.outputs[0].token_ids)
    assert engine.preemptions > 0


def test_states_count_as_memory_of_the_cache(folder):
    directory = folder(FAMILY, small_spec("dms"))
    engine = LLM(directory, max_num_seqs=3, **SMALL).engine
    cache = engine._runner.cache
    # 1 layer x 3 rows: 3 inputs of 2 * 12 + 40 channels, and 4 states of 6 x 10, in float32
    assert engine.allocated_bytes == cache.allocated_bytes + 4 * 3 * (3 * 64 + 4 * 60)
    for cached, needed in ((False, 5184), (True, 10368)):
        with pytest.raises(InferenceError, match=f"the states of linear attention take {needed}"):
            LLM(directory, max_num_seqs=3, cache_bytes=needed, enable_prefix_caching=cached)
