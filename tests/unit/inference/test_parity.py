"""Token for token: the compact cache against one masked forward of the shipped modelling code."""

from __future__ import annotations

import pytest
import torch

from dms_train.families import FAMILIES
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.sampler import SamplingRow, sample
from tests.support.matrix import FULL_MATRIX, combinations
from tests.unit.inference.conftest import WINDOW, random_ids, small_spec

PRESETS = ("dms", "dms_nvidia", "dms_fastdms")
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 40)
NEW = 3 * WINDOW
SMALL = {"page_slots": 4, "slab_pages": 8}
# A family runs with one preset and one size of chunks, llama with every preset; `test_matrix` has
# every combination.
EACH = combinations(FAMILIES, PRESETS)
# What concerns the cache only, which is the same for every family, runs once a preset.
FEW = EACH if FULL_MATRIX else EACH[::4]
CHUNKED = [
    *((family, preset, 7) for family, preset in EACH if family != "llama"),
    *(("llama", preset, 7) for preset in PRESETS),
    *combinations(["qwen3"], PRESETS, (1, 64)),
]


def greedy(tokens=NEW):
    return SamplingParams(max_tokens=tokens, temperature=0.0)


def check(assert_greedy, directory, prompts, outputs, *, evicted=(0.25, 0.75)):
    """Every token of every output, and the share of decisions to evict in the whole run."""
    shares = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        decisions = assert_greedy(directory, prompt, output.outputs[0].token_ids)
        if evicted is not None:
            shares.append(decisions.double().flatten())
    assert evicted is None or evicted[0] <= torch.cat(shares).mean() <= evicted[1]


@pytest.mark.parametrize(("family", "preset", "chunk"), CHUNKED)
def test_mixed_batch(folder, assert_greedy, family, preset, chunk):
    """All lengths in one batch, fewer rows than prompts."""
    directory = folder(family, small_spec(preset))
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    llm = LLM(directory, max_num_seqs=3, prefill_chunk=chunk, **SMALL)
    outputs = llm.generate(prompts, [greedy(NEW - 5 * i) for i in range(len(prompts))])
    check(assert_greedy, directory, prompts, outputs)
    assert llm.kv.cr_factor > 1.1
    assert llm.kv.live_bytes == llm.engine._runner.cache.pool.allocated_bytes == 0


@pytest.mark.parametrize(("family", "preset"), FEW)
def test_immediate(folder, assert_greedy, family, preset):
    directory = folder(family, small_spec(preset, eviction="immediate"))
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    for chunk in (7, 64):
        llm = LLM(directory, prefill_chunk=chunk, **SMALL)
        outputs = llm.generate(prompts, greedy())
        check(assert_greedy, directory, prompts, outputs)


@pytest.mark.parametrize(("family", "share"), combinations(dict(FEW), (0.0, 1.0)))
def test_none_and_all_evicted(folder, assert_greedy, family, share):
    offset = -1e5 if share else 1e5
    directory = folder(family, small_spec("dms", alpha_offset=offset))
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    llm = LLM(directory, prefill_chunk=7, **SMALL)
    outputs = llm.generate(prompts, greedy())
    check(assert_greedy, directory, prompts, outputs, evicted=(share, share))
    for output in outputs:
        seen = output.kv.tokens
        assert output.kv.compressed_tokens == (WINDOW + 1 if share else seen)


@pytest.mark.parametrize(("family", "preset"), FEW)
def test_turns(folder, assert_greedy, family, preset):
    """Prefill after decoding, twice, while other requests come and go."""
    directory = folder(family, small_spec(preset))
    llm = LLM(directory, max_num_seqs=2, prefill_chunk=7, **SMALL)
    tokens: list[int] = []
    with llm.conversation() as conversation:
        for turn, length in enumerate((12, 1, 30)):
            prompt = random_ids(length, seed=turn)
            output = conversation.say(prompt, greedy(12))
            tokens += prompt
            assert_greedy(directory, tokens, output.outputs[0].token_ids)
            tokens += output.outputs[0].token_ids
            other = [random_ids(10, seed=9)]
            check(assert_greedy, directory, other, llm.generate(other, greedy(5)), evicted=None)
    assert llm.kv.allocated_bytes < 200


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_model(folder, assert_greedy, family):
    directory = folder(family, None, tied=family == "qwen3")
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    outputs = LLM(directory, prefill_chunk=7).generate(prompts, greedy())
    check(assert_greedy, directory, prompts, outputs, evicted=None)
    assert all(output.kv.cr_factor == 1.0 for output in outputs)


@pytest.mark.parametrize("policy", ["dms", "window", "keep_all"])
def test_dense_cache_gives_the_same_tokens(folder, policy):
    directory = folder("qwen3", small_spec("dms_nvidia"))
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    found = [
        LLM(directory, cache=cache, policy=policy, prefill_chunk=7).generate(prompts, greedy())
        for cache in ("compact", "dense")
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert torch.equal(ours.kv.cr_factors, theirs.kv.cr_factors)
        assert ours.kv.kv_reads == theirs.kv.kv_reads
        assert policy == "keep_all" or ours.kv.allocated_bytes < theirs.kv.allocated_bytes


def test_runs_are_varied(folder):
    """Continuations that repeat one token would hide errors."""
    for family in FAMILIES:
        llm = LLM(folder(family, small_spec("dms")))
        for output in llm.generate([random_ids(n, seed=n) for n in LENGTHS[::2]], greedy()):
            assert len(set(output.outputs[0].token_ids)) >= 5


@pytest.mark.parametrize(("family", "preset"), FEW)
def test_sampled(folder, oracle, family, preset):
    """Replaying the draws on the masked model's logits gives the same tokens."""
    directory = folder(family, small_spec(preset))
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    params = [SamplingParams(max_tokens=NEW, top_k=20, top_p=0.95, seed=i) for i in range(3)]
    outputs = LLM(directory, prefill_chunk=7, **SMALL).generate(prompts, params)
    for prompt, how, output in zip(prompts, params, outputs, strict=True):
        ids = output.outputs[0].token_ids
        logits, decisions = oracle(directory, prompt + ids)
        rows = [SamplingRow(how, how.seed, 0, prompt, ids[:place]) for place in range(len(ids))]
        replayed = [drawn.token for drawn in sample(logits[len(prompt) - 1 : -1], rows)]
        assert replayed == ids
        assert len(set(ids)) > NEW // 2
        assert decisions.double().mean() >= 0.25


@pytest.mark.parametrize(("family", "preset", "chunk"), CHUNKED)
def test_same_text_same_logits(folder, oracle, family, preset, chunk):
    directory = folder(family, small_spec(preset))
    ids = random_ids(90, seed=3)
    expected, decisions = oracle(directory, ids)
    assert 0.3 <= decisions.double().mean() <= 0.7
    found = LLM(directory, prefill_chunk=chunk, **SMALL).logits(ids)
    assert (found - expected).abs().max() <= 1e-4


def test_bfloat16(folder, load):
    """Rounding moves logits by little and the storage is half as large."""
    directory = folder("llama", small_spec("dms"))
    ids = random_ids(60, seed=3)
    model = load(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    llm = LLM(directory, dtype="bfloat16", prefill_chunk=7)
    found = llm.logits(ids)
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()
    full = LLM(directory).generate([ids], greedy(5))[0].kv
    half = llm.generate([ids], greedy(5))[0].kv
    assert half.live_bytes < 0.7 * full.live_bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrix(folder, assert_greedy, compared, family, preset, eviction):
    for seed in (0, 1):
        directory = folder(family, small_spec(preset, eviction=eviction), seed)
        prompts = [random_ids(length, seed=length + seed) for length in (*LENGTHS, 200, 500)]
        for chunk in (1, 7, 64):
            llm = LLM(directory, max_num_seqs=5, prefill_chunk=chunk)
            outputs = llm.generate(prompts, greedy(60))
            check(assert_greedy, directory, prompts, outputs)
    print(compared)
