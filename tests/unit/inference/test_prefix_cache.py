"""Sequences that share a prefix compute it once, and generate the same tokens as fresh runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.prefix_cache import PrefixCache
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import WINDOW, random_ids, small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"device": DEVICE.type, "page_slots": 4, "slab_pages": 8, "prefill_chunk": 16}
NEEDS_TRITON = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
COMPACT, DENSE = {"cache": "compact"}, {"cache": "dense"}
PAGED = pytest.param("dms", {"kernels": "triton"}, marks=NEEDS_TRITON, id="dms-triton")
FP8 = pytest.param(
    "dms", {"kernels": "triton", "cache_dtype": "fp8"}, marks=NEEDS_TRITON, id="dms-fp8"
)
CACHES = [
    pytest.param("dms", COMPACT, id="dms"),
    pytest.param("keep_all", COMPACT, id="keep_all"),
    pytest.param("window", COMPACT, id="window"),
    pytest.param("dms", DENSE, id="dms-dense"),
    PAGED,
]
WHOLE_PROMPTS = [
    pytest.param("snapkv", {"cr": 2.0, "window": 4, "kernel": 3}, COMPACT, id="snapkv"),
    pytest.param("r_kv", {"cr": 2.0, "window": 2, "interval": 3}, COMPACT, id="r_kv"),
    pytest.param("knorm", {"cr": 2.0, "interval": 2, "decode_only": True}, COMPACT, id="knorm"),
    pytest.param("h2o", {"cr": 2.0, "prefill": "dense"}, COMPACT, id="h2o"),
    pytest.param("tova", {"cr": 2.0, "prefill": "dense"}, COMPACT, id="tova"),
    pytest.param("quest", {"budget": 8, "page": 4}, COMPACT, id="quest"),
    *(
        pytest.param(
            policy, values, {"kernels": "triton"}, marks=NEEDS_TRITON, id=f"{policy}-triton"
        )
        for policy, values in (
            ("snapkv", {"cr": 2.0, "window": 4, "kernel": 3}),
            ("h2o", {"cr": 2.0, "prefill": "dense"}),
            ("quest", {"budget": 8, "page": 4}),
        )
    ),
]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


class Recorded:
    """Snapshot that records the calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.released = False

    def restore(self, row: int) -> None:
        assert not self.released
        self.rows.append(row)

    def release(self) -> None:
        assert not self.released
        self.released = True


def computed(engine: InferenceEngine) -> list[int]:
    """Record the number of tokens of every later forward pass of an engine."""
    counts: list[int] = []

    def counting(run):
        def counted(batch, *steps):
            counts.append(len(batch) if steps else sum(count for _, count in batch))
            return run(batch, *steps)

        return counted

    runner = engine._runner
    runner._forward, runner.launch = counting(runner._forward), counting(runner.launch)
    return counts


def finished(engine: InferenceEngine) -> Iterator[RequestOutput]:
    """Run all requests; yield each when it has finished."""
    while engine.has_unfinished_requests():
        yield from (output for output in engine.step() if output.finished)


def drain(engine: InferenceEngine) -> dict[str, list[list[int]]]:
    """Run all requests; return the tokens of their continuations, by request."""
    return {o.request_id: [done.token_ids for done in o.outputs] for o in finished(engine)}


def engine_options(policy: str, **how) -> EngineOptions:
    own = {"window": WINDOW} if policy == "window" else {}
    return EngineOptions(policy=policy, policy_options=own, **how, **SIZES)


def leaks(engine: InferenceEngine) -> int:
    """Release every snapshot, and return the number of pages in use."""
    while engine._cache_manager.reclaim():
        pass
    return engine._runner.cache.used_pages


@pytest.mark.parametrize(("policy", "how"), CACHES)
@pytest.mark.parametrize("length", [1, 2, 45])
def test_continuations_compute_their_prompt_once(folder, policy, how, length):
    options = engine_options(policy, **how)
    engine = InferenceEngine(folder("llama", small_spec("dms")), options)
    if "kernels" in how and length < 45:
        pytest.skip("the interpreter is slow")
    chains, most = (3, 4) if "kernels" in how else (5, 30)
    prompt, several = (
        random_ids(length),
        SamplingParams(n=chains, seed=3, max_tokens=most, ignore_eos=True),
    )
    counts = computed(engine)
    request_id = engine.add_request(prompt, several)
    (together,) = drain(engine).values()
    generated = sum(len(tokens) - 1 for tokens in together)
    assert sum(counts) == (length - 1) + chains + generated
    request_id = engine.add_request(prompt, several)
    for sequence in engine._requests[request_id].sequences:
        sequence.prefix_leader = None  # each computes its own prompt
    engine._cache_manager._snapshot_points = lambda sequence: ()
    assert drain(engine)[request_id] == together
    assert sum(counts) == (length - 1) + chains + generated + chains * length + generated
    assert leaks(engine) == 0


@pytest.mark.parametrize(("policy", "how"), [("dms", COMPACT), ("keep_all", COMPACT), PAGED, FP8])
def test_right_after_the_fork_the_prompt_is_held_once(folder, policy, how):
    """Four chains hold one prompt plus the pages that their own tokens changed."""
    options = EngineOptions(policy=policy, **how, **SIZES)
    engine = InferenceEngine(folder("llama", small_spec("dms")), options)
    length = 40 if "kernels" in how else 400
    engine.add_request(random_ids(length), SamplingParams(n=4, max_tokens=9, ignore_eos=True))
    one = 0
    while True:
        engine.step()
        chains = engine._requests["0"].sequences
        if chains[0].num_computed_tokens >= length - 1 and not one:
            one = engine._runner.cache.used_pages
        if all(chain.output for chain in chains):
            break
    limits = engine._runner.limits
    changed = 2 * limits.kv_lists  # of a chain: a page with the new token, one with a mark
    assert one < engine._runner.cache.used_pages <= one + 4 * changed
    assert sum(chain.pages for chain in chains) > 3.9 * one
    drain(engine)
    assert leaks(engine) == 0


@pytest.mark.parametrize(("policy", "how"), CACHES)
def test_a_restored_row_goes_on_like_the_row_it_was_taken_of(folder, policy, how):
    """Scores through snapshots at random tokens equal those of a text that is read at once."""
    spec = small_spec("dms")
    options = engine_options(policy, enable_prefix_caching=True, **how)
    engine = InferenceEngine(folder("llama", spec), options)
    text = random_ids(45 if "kernels" in how else 120, seed=4)
    whole = engine.logits(text).log_softmax(-1).cpu()
    draw, counts = random.Random(1), computed(engine)
    for _ in range(3):
        cut = draw.randint(18, len(text) - 1)  # snapshots begin at 16 tokens
        engine.add_request(text[:cut], SamplingParams(max_tokens=1))
        drain(engine)
        del counts[:]
        engine.add_scoring(text[:cut], [text[cut:]])
        (output,) = finished(engine)
        assert sum(counts) == len(text) - cut
        expected = whole[range(cut - 1, len(text) - 1), text[cut:]].tolist()
        assert output.outputs[0].scores.logprobs == pytest.approx(expected, abs=1e-4)
    assert leaks(engine) == 0


def test_a_conversation_in_single_requests_computes_only_what_is_added(folder):
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, EngineOptions(enable_prefix_caching=True, **SIZES))
    plain, counts = LLM(directory, **SIZES), computed(engine)
    tokens: list[int] = []
    for turn in range(4):
        added = random_ids(9, seed=turn)
        tokens += added
        cached = max(0, len(tokens) - len(added) - 1)
        del counts[:]
        request_id = engine.add_request(tokens, GREEDY)
        (continuation,) = drain(engine)[request_id]
        assert continuation == plain.generate(tokens, GREEDY)[0].outputs[0].token_ids
        assert sum(counts) == len(tokens) - cached + len(continuation) - 1
        tokens += continuation


def test_prompts_that_begin_alike_share_their_beginning(folder):
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, EngineOptions(enable_prefix_caching=True, **SIZES))
    plain, system = LLM(directory, **SIZES), random_ids(60, seed=9)
    for number in range(5):
        prompt = [*system, number, *random_ids(10, seed=number)]
        (expected,) = plain.generate(prompt, GREEDY)
        engine.add_request(prompt, GREEDY)
        (output,) = [o for _ in range(40) for o in engine.step() if o.finished]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        # the second prompt shows how far they agree; from the third on that part is known
        assert output.kv.cached_tokens == (60 if number >= 2 else 0)


def sharing(policy: str, values: dict, how: dict) -> EngineOptions:
    return EngineOptions(
        policy=policy, policy_options=values, enable_prefix_caching=True, **how, **SIZES
    )


@pytest.mark.parametrize(("policy", "values", "how"), WHOLE_PROMPTS)
def test_policies_that_evict_after_a_prompt_share_its_beginning(folder, policy, values, how):
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, sharing(policy, values, how))
    plain = LLM(directory, policy=policy, policy_options=values, kernels="reference", **SIZES)
    system, answer = random_ids(24, seed=9), SamplingParams(max_tokens=6, temperature=0.0)
    for number in range(4):
        prompt = [*system, number, *random_ids(3 + number, seed=number)]
        (expected,) = plain.generate(prompt, answer)
        engine.add_request(prompt, answer)
        (output,) = finished(engine)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.kv.cached_tokens == (24 if number >= 2 else 0)
        assert output.kv.kv_reads == expected.kv.kv_reads
        assert output.kv.live_tokens == expected.kv.live_tokens
    assert leaks(engine) == 0


@pytest.mark.parametrize(("policy", "values", "how"), WHOLE_PROMPTS[:6])  # the interpreter is slow
def test_answers_are_shared_inside_later_prompts_only(folder, policy, values, how):
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, sharing(policy, values, how))
    plain = LLM(directory, policy=policy, policy_options=values, kernels="reference", **SIZES)
    question, answer = random_ids(20, seed=4), SamplingParams(max_tokens=8, temperature=0.0)
    engine.add_request(question, answer)
    (first,) = finished(engine)
    given = [*question, *first.outputs[0].token_ids]
    for number in range(3):
        prompt = [*given, number, 1]
        engine.add_request(prompt, answer)
        (output,) = finished(engine)
        (expected,) = plain.generate(prompt, answer)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.kv.cached_tokens == (0, 20, 28)[number]
    # without its answer, the question alone has evicted tokens at the end of such a snapshot
    longer = replace(answer, max_tokens=14)
    (expected,) = plain.generate(question, longer)
    engine.add_request(question, longer)
    output, done = None, set()
    while output is None:
        for sequence in list(engine._scheduler.admitted):
            length = len(sequence.tokens)
            if length in (25, 30) and length not in done:
                done.add(length)
                engine._scheduler.remove(sequence)  # as a full pool would
                engine._scheduler.add(sequence)
        output = next((o for o in engine.step() if o.finished), None)
    assert done == {25, 30}
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.kv.kv_reads == expected.kv.kv_reads


@pytest.mark.parametrize(("policy", "values", "how"), WHOLE_PROMPTS[:1])
def test_prompts_that_arrive_together_wait_for_their_beginning(folder, policy, values, how):
    engine = InferenceEngine(folder("llama", small_spec("dms")), sharing(policy, values, how))
    system = random_ids(24, seed=8)
    ids = [engine.add_request([*system, number, 1, 2], GREEDY) for number in range(4)]
    outputs = {output.request_id: output for output in finished(engine)}
    assert [outputs[i].kv.cached_tokens for i in ids] == [0, 0, 24, 24]


def with_pages(directory, pages: int, **how) -> InferenceEngine:
    """Return an engine of three sequences whose cache has this number of pages."""
    size, most = 80_000, {"max_num_seqs": 3, "max_model_len": 64}
    while True:
        engine = InferenceEngine(directory, EngineOptions(cache_bytes=size, **most, **how, **SIZES))
        missing = pages - engine._runner.limits.pages
        if not missing:
            return engine
        size += missing * engine._runner.cache.pool.page_bytes


@NEEDS_TRITON
@pytest.mark.parametrize("prefill", ["dense", "stream"])
def test_memory_is_kept_for_the_state_of_snapshots_that_a_policy_shares(folder, prefill):
    how = {"policy": "h2o", "policy_options": {"cr": 2.0, "prefill": prefill}, "kernels": "triton"}
    how |= {"max_num_seqs": 3, "max_model_len": 64, "cache_bytes": 60_000, **SIZES}
    pages = [
        InferenceEngine(
            folder("llama", small_spec("dms")), EngineOptions(enable_prefix_caching=caching, **how)
        )._runner.limits.pages
        for caching in (True, False)
    ]
    assert (pages[0] < pages[1]) == (prefill == "dense")


@NEEDS_TRITON
def test_a_request_that_fits_alone_fits_after_a_snapshot_of_its_beginning(folder):
    how = {"policy": "h2o", "policy_options": {"cr": 2.0, "prefill": "dense"}, "kernels": "triton"}
    how["enable_prefix_caching"] = True
    engine = with_pages(folder("llama", small_spec("dms")), 40, **how)  # a request takes 36
    few = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for number in range(3):
        engine.add_request([*random_ids(24, seed=9), number, *random_ids(7, seed=number)], few)
        (output,) = finished(engine)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("policy", "how"),
    [("dms", COMPACT), pytest.param("keep_all", COMPACT, marks=pytest.mark.slow), PAGED],
)
def test_a_small_pool_releases_snapshots_and_changes_no_token(folder, policy, how):
    directory, draw = folder("llama", small_spec("dms")), random.Random(2)
    count, system, longest = (4, 16, 8) if "kernels" in how else (12, 40, 25)
    systems = [random_ids(system, seed=100 + i) for i in range(3)]
    work = [
        (
            systems[draw.randrange(3)] + random_ids(draw.randint(1, longest), seed=i),
            SamplingParams(
                n=draw.choice([1, 1, 3]),
                seed=i,
                temperature=float(i % 2),
                max_tokens=draw.randint(1, longest),
                ignore_eos=True,
            ),
        )
        for i in range(count)
    ]
    alone = LLM(directory, policy=policy, kernels="reference", **SIZES)
    single = [alone.generate(prompt, params)[0] for prompt, params in work]
    held = [sum(done.kv.peak_allocated_bytes for done in output.outputs) for output in single]
    options = EngineOptions(
        policy=policy,
        max_num_seqs=12,
        cache_bytes=int(0.8 * max(held)),
        enable_prefix_caching=True,
        **how,
        **SIZES,
    )
    engine = InferenceEngine(directory, options)
    ids = [engine.add_request(prompt, params) for prompt, params in work]
    found = drain(engine)
    assert [found[i] for i in ids] == [[d.token_ids for d in output.outputs] for output in single]
    assert engine.preemptions > 0 or "kernels" in how
    assert len(engine._cache_manager._prefixes) <= 12
    assert leaks(engine) == 0


def test_an_aborted_request_releases_its_snapshot(folder):
    engine = InferenceEngine(folder("llama", small_spec("dms")), EngineOptions(**SIZES))
    request_id = engine.add_request(random_ids(40), SamplingParams(n=3, max_tokens=50))
    for _ in range(8):
        engine.step()
    assert len(engine._cache_manager._prefixes) == 1
    engine.abort(request_id)
    assert len(engine._cache_manager._prefixes) == 0
    assert engine._runner.cache.used_pages == 0


def test_the_longest_usable_snapshot_is_taken_and_the_oldest_is_released():
    cache = PrefixCache(2)
    snapshots = [Recorded() for _ in range(4)]
    cache.add([1, 2], lambda: snapshots[0], None)
    cache.add([1, 2, 3], lambda: snapshots[1], None)
    cache.add([1, 2, 3, 4], lambda: snapshots[2], "other")
    assert cache.length([1, 2, 3, 4, 5], "mine") == 3
    assert cache.length([1, 2, 3, 4, 5], "other") == 4
    assert cache.length([1, 2, 3], "mine") == 2  # one token is left to compute
    assert cache.length([2, 1], "mine") == 0
    assert cache.restore([1, 2, 9], "mine", row=7) == 2
    assert snapshots[0].rows == [7]
    cache.add([1, 2], lambda: pytest.fail("taken again"), None)  # known already
    cache.add([5], lambda: snapshots[3], None)
    assert [s.released for s in snapshots[:3]] == [False, True, False]
    cache.forget("other")
    assert snapshots[2].released
    assert cache.reclaim([5, 6], "mine")
    assert [snapshots[0].released, snapshots[3].released] == [True, False]
    assert not cache.reclaim([5, 6], "mine")
    assert cache.reclaim(None, None)
    assert len(cache) == 0


@pytest.mark.parametrize("agree", [0, 15, 16, 40])
def test_a_common_prefix_is_that_of_a_recent_prompt(agree):
    cache = PrefixCache(1)
    first, second = random_ids(50, seed=1), random_ids(50, seed=2)
    second[:agree] = first[:agree]
    second[agree] = first[agree] + 1
    assert cache.common_prefix(first) == 0
    assert cache.common_prefix(second) == (agree if agree >= 16 else 0)
    assert cache.common_prefix(first) == 49  # all but the token that gives the logits
