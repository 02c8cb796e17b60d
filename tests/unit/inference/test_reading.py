"""Hidden states of several texts at a time, through every kind of cache."""

from __future__ import annotations

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CACHES = {
    "compact": {"kernels": "reference"},
    "dense": {"cache": "dense"},
    "kernels": {"kernels": "triton", "page_slots": 4, "device": DEVICE},
}
LENGTHS = (50, 1, 33, 20, 2)
needs_kernels = pytest.mark.skipif(
    not dispatch.is_supported(torch.device(DEVICE)), reason="needs triton's interpreter"
)
parametrize = pytest.mark.parametrize(
    "how",
    [pytest.param(CACHES[name], id=name) for name in ("compact", "dense")]
    + [pytest.param(CACHES["kernels"], id="kernels", marks=needs_kernels)],
)


def reader(directory, rows: int, **how) -> InferenceEngine:
    """Engine that reads texts in chunks of 16 tokens."""
    options = EngineOptions(max_num_seqs=rows, prefill_chunk=16, max_model_len=128, **how)
    return InferenceEngine(directory, options)


@parametrize
@pytest.mark.parametrize("rows", [2, 5])
def test_texts_read_together_have_the_states_and_costs_of_each_alone(folder, oracle, how, rows):
    """The logits are those of the masked model."""
    directory = folder("llama", small_spec("dms"))
    texts = [random_ids(length, seed=length) for length in LENGTHS]
    together, alone = reader(directory, rows, **how), reader(directory, 1, **how)
    for text, read in zip(texts, together.hidden_states(texts), strict=True):
        expected, _ = oracle(directory, text)
        logits = read.hidden @ together.head.cpu().T
        assert (logits - expected).abs().max() <= 1e-4
        (single,) = alone.hidden_states([text])
        assert read.kv.prefill_reads == single.kv.prefill_reads
        assert read.kv.peak_live_tokens == single.kv.peak_live_tokens
        torch.testing.assert_close(read.kv.cr_factors, single.kv.cr_factors)
    assert together.kv.requests == alone.kv.requests == len(LENGTHS)
    torch.testing.assert_close(together.kv.cr_factors, alone.kv.cr_factors, rtol=0, atol=0)


@parametrize
def test_a_text_that_is_refused_leaves_the_engine_usable(folder, how):
    engine = reader(folder("llama", small_spec("dms")), 2, **how)
    with pytest.raises(InferenceError, match="a prompt of 129 tokens"):
        engine.hidden_states([random_ids(9), random_ids(129)])
    assert engine.unfinished == 0
    assert len(engine.hidden_states([random_ids(9)])[0].hidden) == 9


@parametrize
def test_a_text_with_a_cached_prefix_is_read_from_its_beginning(folder, oracle, how):
    directory = folder("llama", small_spec("dms"))
    text = random_ids(50)
    engine = reader(directory, 2, enable_prefix_caching=True, **how)
    for prompt in (text[:40], text[:45], text[:48]):  # the second one takes a snapshot
        engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True), final_only=True)
        while engine.has_unfinished_requests():
            outputs = engine.step()
    assert outputs[0].outputs[0].kv.cached_tokens > 0
    expected, _ = oracle(directory, text)
    assert (engine.logits(text).cpu() - expected).abs().max() <= 1e-4
    (read,) = engine.hidden_states([text])
    assert (read.hidden @ engine.head.cpu().T - expected).abs().max() <= 1e-4
    assert read.kv.cached_tokens == 0


def test_texts_wait_for_memory(folder):
    """The cache holds one text and a half; nothing is read twice."""
    directory = folder("llama", small_spec("dms"))
    texts = [random_ids(60, seed=seed) for seed in range(3)]
    plenty = reader(directory, 3, kernels="reference", page_slots=4, slab_pages=4)
    taken = plenty.hidden_states(texts[:1])[0].kv.peak_allocated_bytes
    options = {"kernels": "reference", "page_slots": 4, "slab_pages": 4}
    scarce = reader(directory, 3, cache_bytes=int(1.5 * taken), **options)
    for small, full in zip(scarce.hidden_states(texts), plenty.hidden_states(texts), strict=True):
        torch.testing.assert_close(small.hidden, full.hidden, atol=1e-5, rtol=1e-4)
        assert small.kv.prefill_reads == full.kv.prefill_reads
    assert scarce.preemptions == 0
    assert scarce.kv.peak_live_tokens < plenty.kv.peak_live_tokens / 2  # one text after the other


def test_a_preempted_text_is_read_and_counted_once(folder):
    """The scheduler expects evictions that do not come, and admits texts that do not fit."""
    directory = folder("llama", None)
    texts = [random_ids(100, seed=seed) for seed in range(3)]
    options = {"kernels": "reference", "page_slots": 4, "slab_pages": 4}
    plenty = reader(directory, 3, **options)
    taken = plenty.hidden_states(texts[:1])[0].kv.peak_allocated_bytes
    scarce = reader(directory, 3, cache_bytes=int(1.5 * taken), **options)
    scarce._scheduler.observe(tokens=10_000, live=0)
    for small, full in zip(scarce.hidden_states(texts), plenty.hidden_states(texts), strict=True):
        torch.testing.assert_close(small.hidden, full.hidden, atol=1e-5, rtol=1e-4)
        assert small.kv.prefill_reads == full.kv.prefill_reads
    assert scarce.preemptions > 0


@needs_kernels
@pytest.mark.parametrize("generates", [False, True], ids=["read", "one token"])
def test_the_peak_bytes_of_a_prompt_are_its_pages(folder, generates):
    """Without eviction a text of 50 tokens fills 13 pages of 4 slots in every KV list."""
    engine = reader(folder("llama", None), 2, **CACHES["kernels"])
    if generates:
        engine.add_request(random_ids(50), SamplingParams(max_tokens=1), final_only=True)
        while engine.has_unfinished_requests():
            engine.step()
    else:
        engine.hidden_states([random_ids(50)])
    a, cache = engine.architecture, engine._runner.cache
    pages = a.num_layers * a.num_query_groups * 13
    numbers = 2 * 4 * a.kv_channels * 4  # keys and values of a page, in float32
    assert engine.kv.peak_allocated_bytes == pages * (numbers + 8) + cache.table_bytes
    assert engine.kv.allocated_bytes == cache.table_bytes


@needs_kernels
def test_decode_steps_are_captured_when_they_are_needed(folder):
    """Reading needs none; two sequences of ten tokens take a burst and single steps."""
    engine = reader(folder("llama", None), 3, decode_steps=4, **CACHES["kernels"])
    captured = engine._runner._graphs._graphs
    engine.hidden_states([random_ids(9)])
    assert not captured
    for seed in range(2):
        params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
        engine.add_request(random_ids(9, seed=seed), params, final_only=True)
    while engine.has_unfinished_requests():
        engine.step()
    assert {(kind.size, kind.limited) for kind in captured} == {(2, False)}
    engine.capture()
    assert len(captured) == 3 * 2 * 2  # sizes 1, 2 and 4; one step or four; with limits or without
