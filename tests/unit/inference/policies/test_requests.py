"""Properties of every registered policy, through the engine: batches, forks, turns.

A policy that is registered later is tested with a small budget; options of interest are listed.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.base import CachePolicy
from dms_train.inference.policies.registry import build_policy, policy_kind, policy_names
from dms_train.method.spec import PRESETS
from tests.support.matrix import FULL_MATRIX
from tests.support.query_statistics import tiny_statistics
from tests.unit.inference.conftest import random_ids, small_spec

SNAP = {"window": 4, "kernel": 3}
HARD = {"window": 4, "interval": 3, "p": 0.5}
QUERIES = {"statistics": tiny_statistics()}
LISTED = [
    ("window", {"window": 8}),
    ("streaming_llm", {"cr": 2.0, "sinks": 2}),
    ("streaming_llm", {"cr": 2.0, "sinks": 2, "positions": "cache"}),
    ("memory_pooling", {"cr": 2}),
    ("h2o", {"cr": 2.0}),
    ("h2o", {"budget": 12, "prefill": "dense"}),
    ("cam", {"cr": 2.0, "targets": 4}),
    ("d2o", {"cr": 2.0}),
    ("d2o", {"cr": 2.0, "reference_compat": True}),
    ("roco", {"cr": 2.0}),
    ("tova", {"cr": 2.0}),
    ("snapkv", {"cr": 2.0, **SNAP}),
    ("pyramidkv", {"cr": 2.0, **SNAP, "beta": 4}),
    ("r_kv", {"budget": 10, **SNAP, "interval": 3}),
    ("hard_kv", {"budget": 14, **HARD}),
    ("hard_kv", {"cr": 3.0, **HARD, "base": "r_kv", "merge": "fixed_budget"}),
    ("knorm", {"cr": 2.0}),
    ("keydiff", {"budget": 12}),
    ("keydiff", {"budget": 10, "interval": 3, "block": 8}),
    ("triattention", {"budget": 12, "interval": 3, **QUERIES}),
    ("triattention", {"cr": 2.0, "block": 8, **QUERIES}),
    ("quest", {"budget": 8, "page": 4}),
]
SMALL = {"budget": 12, "cr": 2, "window": 8}  # what a policy has of these, the first one
WHOLE = {"budget": 100, "cr": 1, "window": 100}  # likewise, so that nothing is evicted


def first_of(sizes, name):
    """The first of the sizes that is an option of a policy."""
    known = {item.name for item in fields(policy_kind(name).options)}
    return next(({key: value} for key, value in sizes.items() if key in known), {})


OTHERS = set(policy_names()) - {"auto", *(name for name, _ in LISTED)}
POLICIES = LISTED + [(name, first_of(SMALL, name)) for name in sorted(OTHERS)]
# without the path of a temporary file, which differs between the workers of pytest-xdist
IDS = [
    "-".join([name, *(str(value) for key, value in options.items() if key != "statistics")])
    for name, options in POLICIES
]
EVERY = pytest.mark.parametrize(("policy", "own"), POLICIES, ids=IDS)
# What the engine does alike with every policy and its options: each policy once.
ONCE = EVERY
if not FULL_MATRIX:
    NAMED = dict(reversed(POLICIES))  # the first options that are listed
    ONCE = pytest.mark.parametrize(("policy", "own"), NAMED.items(), ids=NAMED)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=3)
LENGTHS = (19, 1, 26)


def options(policy, own, **how) -> EngineOptions:
    return EngineOptions(
        policy=policy, policy_options=own, page_slots=4, slab_pages=4, **{"prefill_chunk": 16} | how
    )


def trained_for(policy):
    """Return the method that the model must be trained with; DMS if the policy does not say."""
    kind = policy if policy in policy_names() and policy_kind(policy).trained else "dms"
    return (
        small_spec(kind)
        if kind in ("dms", "kvzap")
        else PRESETS[kind].override(alpha_offset=0.0).spec
    )


def built(policy, own):
    return build_policy(policy, own, trained_for(policy))


def has(policy, own, hook) -> bool:
    """Return True if a policy has a hook of its own."""
    return getattr(type(built(policy, own)), hook) is not getattr(CachePolicy, hook)


@pytest.fixture
def model(request, folder):
    callspec = getattr(request.node, "callspec", None)
    policy = callspec.params.get("policy") if callspec else None
    return folder("llama", trained_for(policy))


def facts(outputs):
    """Tokens and costs of every request."""
    return [(o.outputs[0].token_ids, o.kv.kv_reads, o.kv.peak_live_tokens) for o in outputs]


def test_every_registered_policy_is_tested():
    assert {name for name, _ in POLICIES} == set(policy_names()) - {"auto"}


@ONCE
def test_batches_chunks_and_caches_give_the_results_of_runs_alone(model, policy, own):
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    alone = [
        LLM(model, options(policy, own, max_num_seqs=1)).generate(prompt, GREEDY)[0]
        for prompt in prompts
    ]
    for how in (
        {"max_num_seqs": 4, "max_num_batched_tokens": 40},
        {"prefill_chunk": 5},
        {"cache": "dense"},
    ):
        if has(policy, own, "merge") and "cache" in how:
            continue  # a masked cache merges nothing
        found = LLM(model, options(policy, own, **how)).generate(prompts, GREEDY)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in alone]
        assert [o.kv.kv_reads for o in found] == [o.kv.kv_reads for o in alone]
        live = [o.kv.live_tokens for o in found]
        assert live == [o.kv.live_tokens for o in alone]


@EVERY
def test_reads_and_peak_are_those_of_the_tokens_held_and_none_comes_back(model, policy, own):
    engine, rule = InferenceEngine(model, options(policy, own)), built(policy, own)
    request = engine.add_request(random_ids(20), GREEDY)
    before, reads, peak, steps = None, 0.0, 0.0, 0
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        if output.finished:
            break
        held = [set(head.tolist()) for layer in engine.live_positions(request) for head in layer]
        generated = len(output.outputs[0].token_ids)
        computed = 20 + generated - 1
        if before is not None and generated > 1:
            new, steps = {computed - 1}, steps + 1
            assert all(now <= old | new for now, old in zip(held, before, strict=True))
            # scored policies evict behind the attention, others before it
            read = [old | new for old in before] if rule.scored else held
            reads += sum(map(len, read)) / len(read)
        peak = max(peak, sum(map(len, held)) / len(held))
        before = held
        if has(policy, own, "select"):  # reads less than it holds
            assert output.kv.kv_reads <= reads
        else:
            assert output.kv.kv_reads == pytest.approx(reads)
        assert output.kv.peak_live_tokens == pytest.approx(peak)
    assert steps == GREEDY.max_tokens - 2


@ONCE
def test_a_budget_of_the_whole_request_gives_the_logits_of_the_model(model, policy, own):
    whole = first_of(WHOLE, policy)
    if not whole and policy != "keep_all":
        pytest.skip("has no budget")
    scored = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=3, logprobs=3)
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    own = {key: value for key, value in own.items() if key not in WHOLE} | whole
    found = LLM(model, options(policy, own)).generate(prompts, scored)
    dense = LLM(model, options("keep_all", {})).generate(prompts, scored)
    assert facts(found) == facts(dense)
    assert max(logprobs(found) - logprobs(dense), key=abs) == pytest.approx(0, abs=1e-5)


def logprobs(outputs):
    """Return log-probabilities of the likeliest tokens at every position."""
    entries = [entry for o in outputs for entry in o.outputs[0].logprobs]
    return torch.tensor([list(entry.top.values()) for entry in entries]).flatten()


@ONCE
def test_forks_continue_like_sequences_that_share_nothing(model, policy, own):
    several = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    engine = InferenceEngine(model, options(policy, own))
    engine.add_request(random_ids(19), several)
    (together,) = [o for o in drained(engine) if o.finished]
    engine = InferenceEngine(model, options(policy, own))
    request = engine.add_request(random_ids(19), several)
    for sequence in engine._requests[request].sequences:
        sequence.prefix_leader = None  # each computes its own prompt
    engine._cache_manager._snapshot_points = lambda sequence: ()
    (apart,) = [o for o in drained(engine) if o.finished]
    assert [o.token_ids for o in together.outputs] == [o.token_ids for o in apart.outputs]
    assert [o.kv.kv_reads for o in together.outputs] == [o.kv.kv_reads for o in apart.outputs]


@ONCE
def test_what_is_preempted_is_computed_again_with_the_same_result(model, policy, own):
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    wide = LLM(model, options(policy, own)).generate(prompts, GREEDY)
    engine = InferenceEngine(model, options(policy, own))
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps in (6, 15, 30):
            evict(engine)
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert [done[i].outputs[0].token_ids for i in ids] == [o.outputs[0].token_ids for o in wide]
    assert [done[i].kv.kv_reads for i in ids] == [o.kv.kv_reads for o in wide]
    assert engine.preemptions > 0
    assert engine._runner.cache.used_pages == 0


def evict(engine) -> None:
    """Take the cache of the last sequence that has one, as a full pool would."""
    scheduler = engine._scheduler
    placed = [s for s in scheduler.admitted if s.finish_reason is None]
    if placed:
        victim = max(placed, key=lambda s: s.order)
        scheduler.remove(victim)
        scheduler.add(victim)
        scheduler.preemptions += 1


def drained(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@ONCE
def test_prefixes_are_shared_where_the_request_does_not_matter(model, policy, own):
    """A prompt that continues an earlier request; budgets of other requests would be others."""
    engine = LLM(model, options(policy, own, enable_prefix_caching=True))
    first = random_ids(20)
    first += engine.generate(first, GREEDY)[0].outputs[0].token_ids
    prompt = first + random_ids(9, seed=1)
    found = engine.generate(prompt, GREEDY)[0]
    fresh = LLM(model, options(policy, own)).generate(prompt, GREEDY)[0]
    assert found.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert found.kv.kv_reads == fresh.kv.kv_reads
    assert (found.kv.cached_tokens > 0) == built(policy, own).shareable
    third = first[:20] + random_ids(9, seed=2)
    found = engine.generate(third, GREEDY)[0]
    fresh = LLM(model, options(policy, own)).generate(third, GREEDY)[0]
    assert found.outputs[0].token_ids == fresh.outputs[0].token_ids
    if not built(policy, own).shareable:
        assert (found.kv.cached_tokens > 0) == built(policy, own).shareable_prompts


def test_a_fixed_budget_that_prompts_keep_to_is_shared(model):
    how = options("h2o", {"budget": 12}, enable_prefix_caching=True)
    engine, first = LLM(model, how), random_ids(20)
    first += engine.generate(first, GREEDY)[0].outputs[0].token_ids
    prompt = first + random_ids(9, seed=1)
    found = engine.generate(prompt, GREEDY)[0]
    fresh = LLM(model, options("h2o", {"budget": 12})).generate(prompt, GREEDY)[0]
    assert found.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert found.kv.cached_tokens > 0


@ONCE
def test_the_second_turn_of_a_conversation_equals_both_caches(model, policy, own):
    if has(policy, own, "merge"):
        pytest.skip("a masked cache merges nothing")
    tokens = []
    for cache in ("compact", "dense"):
        engine = InferenceEngine(model, options(policy, own, cache=cache))
        request = engine.open_conversation()
        turns = []
        for seed in (1, 2):
            engine.add_turn(request, random_ids(11, seed=seed), GREEDY)
            turns += [o.outputs[0].token_ids for o in drained(engine)]
        tokens.append(turns)
    assert tokens[0] == tokens[1]
    assert torch.tensor(tokens[0]).shape == (2, 8)


def test_a_seed_may_be_any_integer(model):
    for seed in (2**64, 2**63, -(2**70)):
        params = SamplingParams(max_tokens=2, seed=seed)
        assert LLM(model, options("cam", {"budget": 4})).generate([1, 2, 3], params)[0].finished


@pytest.mark.parametrize(("policy", "held"), [("h2o", [9, 19]), ("snapkv", [9 + 7, 19 + 7])])
def test_a_turn_has_a_budget_of_its_own(model, policy, held):
    """Half of 11 + 8 tokens, then half of 19 + 11 + 8; SnapKV adds what is generated."""
    engine = InferenceEngine(model, options(policy, {"cr": 2.0}))
    request, found = engine.open_conversation(), []
    for seed in (1, 2):
        engine.add_turn(request, random_ids(11, seed=seed), GREEDY)
        found += [o.kv.live_tokens for o in drained(engine)]
    assert found == held
