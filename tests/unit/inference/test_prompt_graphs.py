"""Chunks of prompts that are padded to a few sizes, in Triton's interpreter or as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.prompt_graphs import PromptGraphs, chunk_sizes
from dms_train.kernels.decode import kernels as decode
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not decode.runs_on(torch.device(DEVICE)), reason="needs triton's interpreter"
)
SIZES = {"kernels": "triton", "device": DEVICE, "max_model_len": 128, "page_slots": 4}
CHUNK = 24


@pytest.mark.parametrize("chunk", [1, 2, 16, 17, 24, 100, 2048, 8192])
def test_every_chunk_has_a_size_that_is_at_most_half_as_large_again(chunk: int) -> None:
    sizes = chunk_sizes(chunk)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == chunk
    for count in range(1, chunk + 1):
        size = min(size for size in sizes if size >= count)
        assert size <= max(16, 1.5 * count)


@needs_kernels
@pytest.mark.parametrize("preset", ["dms", "dms_nvidia", None])
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
def test_prompts_of_a_step_are_computed_one_after_the_other(folder, monkeypatch) -> None:
    """Their first tokens and costs are those of the cache in plain torch."""
    directory = folder("llama", small_spec("dms"))
    prompts = [random_ids(n, n) for n in (31, 5, 16, 11)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    together, step = [], PromptGraphs.step

    def watched(self, parts):
        together.append(len(parts))
        return step(self, parts)

    monkeypatch.setattr(PromptGraphs, "step", watched)
    how = {"max_num_seqs": 4, "prefill_chunk": 32, "max_num_batched_tokens": 64}
    ours = LLM(directory, **SIZES, **how).generate(prompts, params)
    assert together[0] == 4
    theirs = LLM(directory, kernels="reference", **how).generate(prompts, params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.kv.prefill_reads == b.kv.prefill_reads
        assert a.kv.peak_live_tokens == b.kv.peak_live_tokens
