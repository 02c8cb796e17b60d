"""Chunks of prompts padded to a few sizes, in Triton's interpreter or as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.prompt_graphs import PromptGraphs, chunk_sizes
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not dispatch.is_supported(torch.device(DEVICE)), reason="needs triton's interpreter"
)
SIZES = {"kernels": "triton", "device": DEVICE, "max_model_len": 128, "page_slots": 4}
CHUNK = 24


@pytest.mark.parametrize("chunk", [1, 2, 16, 17, 24, 100, 2048, 8192])
def test_every_long_chunk_has_a_size_that_is_at_most_half_as_large_again(chunk: int) -> None:
    """Up to 128 tokens, padding at most doubles a chunk."""
    sizes = chunk_sizes(chunk)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == chunk
    for count in range(1, chunk + 1):
        size = min(size for size in sizes if size >= count)
        assert size <= max(16, 1.5 * count if count > 128 else 2 * count)


@needs_kernels
@pytest.mark.parametrize(
    "preset", ["dms", pytest.param("dms_nvidia", marks=pytest.mark.slow), None]
)
def test_logits_of_texts_of_every_kind(folder, oracle, preset: str | None) -> None:
    """Whole and padded chunks, first and later ones, each three times in one engine."""
    directory = folder("llama", small_spec(preset) if preset else None)
    llm = LLM(directory, prefill_chunk=CHUNK, max_num_seqs=2, **SIZES)
    for seed in range(3):
        for length in (2, 9, 16, CHUNK, CHUNK + 2, 2 * CHUNK + 17):
            ids = random_ids(length, seed=length + seed)
            expected, _ = oracle(directory, ids)
            found = llm.logits(ids).cpu()
            assert (found - expected).abs().max() <= 1e-4


@needs_kernels
@pytest.mark.parametrize(
    ("lengths", "replays"),
    [
        ((31, 5, 17, 11), [1, 1, 1, 1]),
        ((14, 31, *range(3, 15), 16, *range(4, 9)), [16, 1, 1, 1, 1]),
    ],
    ids=["four", "twenty"],
)
def test_prompts_of_a_step_are_computed_together_if_their_sizes_agree(
    folder, monkeypatch, lengths, replays
) -> None:
    """Their first tokens and costs are those of the cache in plain torch."""
    directory = folder("llama", small_spec("dms"))
    prompts = [random_ids(n, seed) for seed, n in enumerate(lengths)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    together, replay = [], PromptGraphs._replay

    def watched(self, parts, size):
        together.append(len(parts))
        replay(self, parts, size)

    monkeypatch.setattr(PromptGraphs, "_replay", watched)
    count = len(lengths)
    how = {"max_num_seqs": count, "prefill_chunk": 256, "max_num_batched_tokens": 256}
    ours = LLM(directory, **SIZES, **how).generate(prompts, params)
    assert sorted(together, reverse=True) == replays
    theirs = LLM(directory, kernels="reference", **how).generate(prompts, params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.kv.prefill_reads == b.kv.prefill_reads
        assert a.kv.peak_live_tokens == b.kv.peak_live_tokens


@needs_kernels
def test_later_chunks_that_share_pages_are_computed_together(folder, monkeypatch) -> None:
    """Continuations of several prompts get the same scores as alone."""
    directory = folder("llama", small_spec("dms"))
    most, replay = [], PromptGraphs._replay
    monkeypatch.setattr(
        PromptGraphs,
        "_replay",
        lambda self, parts, size: [most.append(len(parts)), replay(self, parts, size)][1],
    )
    prompts = [random_ids(9 + i, seed=i) for i in range(3)]
    choices = [random_ids(2 + i, seed=9 + i) for i in range(4)]

    def scores(together: int) -> list[list[float]]:
        options = EngineOptions(max_num_seqs=together, **SIZES)
        engine = InferenceEngine(directory, options)
        ids = [engine.add_scoring(prompt, choices) for prompt in prompts]
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        return [done.scores.logprobs for number in ids for done in found[number].outputs]

    alone = scores(1)
    assert set(most) == {1}
    for ours, expected in zip(scores(12), alone, strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)
    assert max(most) == 4


@needs_kernels
def test_fp8_pages_of_prompts_that_share_a_graph_are_those_of_each_alone(folder, monkeypatch):
    directory, together, replay = folder("llama", small_spec("dms")), [], PromptGraphs._replay
    monkeypatch.setattr(
        PromptGraphs,
        "_replay",
        lambda self, parts, size: [together.append(len(parts)), replay(self, parts, size)][1],
    )
    prompts = [random_ids(9 + i, seed=i) for i in range(4)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    found = []
    for rows in (1, 4):
        llm = LLM(directory, cache_dtype="fp8", max_num_seqs=rows, **SIZES)
        outputs = llm.generate(prompts, params)
        found.append([(o.outputs[0].token_ids, o.kv.prefill_reads, o.kv.kv_reads) for o in outputs])
    assert together == [1, 1, 1, 1, 4]
    assert found[0] == found[1]
