"""The paged cache with fused decode kernels: the same tokens as the readable cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference import prompt_graphs
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.window import WindowPolicy
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import FP8
from dms_train.method.accounting import live_slots
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible
from tests.support.matrix import FULL_MATRIX
from tests.unit.inference import test_cache as readable
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOW = readable.WINDOW
needs_triton = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
pytestmark = needs_triton


def paged(policy, *, rows=2, stored=None, pages=200):
    pool = DevicePool(
        head_size=readable.SIZE,
        dtype=torch.float32,
        stored=stored,
        device=DEVICE,
        page_slots=4,
        pages=pages,
    )
    return PagedKVCache(pool, policy, CacheSizes(1, rows, readable.HEADS, group=1, longest=64))


def text(length, **options):
    return tuple(
        x.float() if x.is_floating_point() else x for x in readable.text(length, **options)
    )


def feed(cache, data, chunks):
    moved = tuple(x.to(DEVICE) for x in data)
    torch.set_default_device(DEVICE)
    try:
        return tuple(x.cpu() for x in readable.feed(cache, moved, chunks))
    finally:
        torch.set_default_device(None)


LENGTH = 18
CHUNKS = [(1,) * 18, (18,), (7, 7, 4), (11,) + (1,) * 7, (1, 7, 1, 1, 1, 2, 5)]


# By default every pair of two of the three occurs.
RULES = [
    pytest.param(chunks, shift, eviction, id=f"{len(chunks)}chunks-{shift}-{eviction}")
    for number, chunks in enumerate(CHUNKS)
    for shift in (0, 1)
    for place, eviction in enumerate(("delayed", "immediate"))
    if (number + shift + place) % 2 == 0 or FULL_MATRIX
]


@pytest.mark.parametrize(("chunks", "shift", "eviction"), RULES)
def test_equals_the_visibility_rule(chunks, shift, eviction):
    spec = PRESETS["dms"].override(window=WINDOW, decision_shift=shift, eviction=eviction)
    data = text(LENGTH)
    output, reads, live = feed(paged(DMSPolicy(WINDOW, spec.governing_shift)), data, chunks)
    allowed = visible(data[3], spec)
    torch.testing.assert_close(output, readable.masked(data, allowed), rtol=1e-5, atol=1e-5)
    ends = torch.tensor(chunks).cumsum(0) - 1
    assert torch.equal(live, live_slots(data[3], spec)[..., ends].permute(2, 0, 1))
    assert torch.equal(reads.sum(0), allowed.sum((2, 3)))


@pytest.mark.parametrize("chunks", [CHUNKS[1], CHUNKS[-1]], ids=lambda c: f"{len(c)}chunks")
def test_keep_all_and_window(chunks):
    data, i = text(LENGTH), torch.arange(LENGTH)
    causal = (i[None] <= i[:, None]).expand(2, readable.HEADS, LENGTH, LENGTH)
    near = causal & (i[:, None] - i[None] <= WINDOW)
    for policy, allowed in ((KeepAllPolicy(), causal), (WindowPolicy(WINDOW), near)):
        output, _, live = feed(paged(policy), data, chunks)
        torch.testing.assert_close(output, readable.masked(data, allowed), rtol=1e-5, atol=1e-5)
        assert torch.equal(live[-1], allowed[..., -1, :].sum(-1))


def test_fp8_pages_survive_chunks_and_steps():
    """Stored at two bits less than bf16, rewritten by every chunk without losing more."""
    data = text(LENGTH)
    chunks = (9, 3, 1, 1, 1, 3) if DEVICE.type == "cuda" else (6, 6, 6)
    output, _, _ = feed(paged(KeepAllPolicy(), stored=FP8), data, chunks)
    i = torch.arange(LENGTH)
    causal = (i[None] <= i[:, None]).expand(2, readable.HEADS, LENGTH, LENGTH)
    assert (output - readable.masked(data, causal)).abs().max() < 0.2


def test_pages_go_back():
    cache = paged(KeepAllPolicy(), pages=96)
    empty = cache.allocated_bytes
    feed(cache, text(60), (50, *(1,) * 10))
    held = int(cache.held_slots(torch.arange(2)).sum()) // 4
    assert (cache.used_pages, held) == (60 // 4 * 2 * readable.HEADS, cache.used_pages)
    assert cache.allocated_bytes == empty + held * cache.pool.page_bytes
    cache.free(torch.arange(2, device=DEVICE))
    assert cache.used_pages == 0
    assert sorted(cache.pool.free.numbers[:96].tolist()) == list(range(1, 97))
    assert int(cache.live(torch.arange(2)).sum()) == 0
    assert cache.allocated_bytes == empty
    with pytest.raises(RuntimeError, match="full"):
        cache.pool.take(97)


CHUNKS_PASS, ONE_PASS = "chunk after chunk", "one pass"


@pytest.mark.parametrize(
    ("family", "policy", "preset", "prompts_pass"),
    [
        ("llama", "auto", "dms", CHUNKS_PASS),
        pytest.param("llama", "auto", "dms", ONE_PASS, marks=pytest.mark.slow),
        ("llama", "auto", "dms_fastdms", ONE_PASS),
        pytest.param("llama", "window", "dms_nvidia", CHUNKS_PASS, marks=pytest.mark.slow),
        ("qwen3", "auto", "dms_nvidia", ONE_PASS),
        pytest.param("qwen2", "keep_all", "dms", CHUNKS_PASS, marks=pytest.mark.slow),
        pytest.param("llama", "auto", None, ONE_PASS, marks=pytest.mark.slow),
        ("smollm3", "auto", "dms", CHUNKS_PASS),
        ("gemma3_text", "auto", "dms", CHUNKS_PASS),
        pytest.param("gemma3_text", "auto", "dms", ONE_PASS, marks=pytest.mark.slow),
        pytest.param("olmo3", "auto", "dms", CHUNKS_PASS, marks=pytest.mark.slow),
        ("gpt_oss", "auto", "dms", ONE_PASS),
    ],
    indirect=["prompts_pass"],
)
@pytest.mark.usefixtures("prompts_pass")
def test_the_engine_continues_with_the_same_tokens(folder, family, policy, preset):
    """Prompts in chunks, more of them than rows; tokens, reads and ratios of both caches agree."""
    directory = folder(family, small_spec(preset) if preset else None)
    prompts = [random_ids(n, n) for n in (30, 3, 17)]
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    how = {"policy": policy, "device": DEVICE.type, "max_num_seqs": 2, "prefill_chunk": 16}
    ours = LLM(directory, kernels="triton", **how).generate(prompts, params)
    theirs = LLM(directory, kernels="reference", **how).generate(prompts, params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.kv.kv_reads == b.kv.kv_reads
        assert torch.equal(a.kv.cr_factors, b.kv.cr_factors)


@pytest.mark.parametrize(
    ("policy", "options", "stored", "most"),
    [
        pytest.param("auto", {}, "auto", 24, marks=pytest.mark.slow),
        pytest.param("auto", {}, "auto", 0, marks=pytest.mark.slow),
        pytest.param("auto", {}, "fp8", 24, marks=pytest.mark.slow),
        ("auto", {}, "fp8", 0),
        pytest.param("tova", {"budget": 64}, "auto", 24, marks=pytest.mark.slow),
        ("quest", {"budget": 64, "page": 4}, "auto", 24),
    ],
)
def test_prompts_of_different_lengths_fill_a_cache_together(
    folder, monkeypatch, policy, options, stored, most
):
    """A pass takes the pages of its tokens, not those of as many prompts like the longest one."""
    monkeypatch.setattr(prompt_graphs, "_MOST", most)
    directory = folder("llama", small_spec("dms"))
    prompts = [random_ids(n, n) for n in (60, *range(1, 8))]
    how = {"policy": policy, "policy_options": options, "cache_dtype": stored, "page_slots": 4}
    how |= {"kernels": "triton", "device": DEVICE.type, "max_num_seqs": 8, "max_model_len": 64}

    def run(**more):
        engine = InferenceEngine(directory, EngineOptions(**how, **more))
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        ids = [engine.add_request(prompt, params, final_only=True) for prompt in prompts]
        found = {}
        while engine.has_unfinished_requests():
            found |= {done.request_id: done.outputs[0].token_ids for done in engine.step()}
        return engine, [found[request_id] for request_id in ids]

    engine, expected = run()
    cache = engine._runner.cache
    layers, _, heads = cache.lists_shape
    pages = layers * heads * sum(-(-(len(prompt) + 1) // 4) for prompt in prompts)
    assert pages < cache.max_pages // 2
    bounds = 2 * engine.architecture.kv_channels * 4 if policy == "quest" else 0
    kept = 0 if policy == "quest" else cache.policy_bytes
    engine, found = run(cache_bytes=(pages + 2) * (cache.pool.page_bytes + bounds) + kept)
    assert engine._runner.cache.max_pages == pages + 1
    assert found == expected


def test_a_conversation_continues_with_the_same_tokens(folder):
    directory = folder("qwen3", small_spec("dms"))
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    outputs = []
    for kernels in ("triton", "reference"):
        llm = LLM(directory, kernels=kernels, device=DEVICE.type)
        with llm.conversation() as talk:
            turns = [talk.say(random_ids(n, n), params) for n in (20, 5, 11)]
        outputs.append([turn.outputs[0].token_ids for turn in turns])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "how",
    [
        {"kernels": "reference", "cache_dtype": "fp8"},
        {"kernels": "triton", "page_slots": 12},
        {"kernels": "flex"},
        {"cache_dtype": "int4"},
    ],
    ids=str,
)
def test_unsupported_options_are_refused(folder, how):
    with pytest.raises(InferenceError):
        LLM(folder("llama", small_spec("dms")), device=DEVICE.type, **how)
