"""Bursts of sequences that share a prompt: shared pages are copied beforehand."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.paged_local import LocalPagedCache
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.base import NewTokens
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.local_layers import LocalLayers
from dms_train.inference.policies.window import WindowPolicy
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible
from tests.unit.inference import test_cache as readable
from tests.unit.inference.conftest import random_ids, small_spec
from tests.unit.inference.test_paged import DEVICE, WINDOW, needs_triton, paged, text

pytestmark = needs_triton
PROMPT, LENGTH, ROWS = 14, 26, 4


def shared_texts(share: float):
    """Return texts whose first tokens are equal."""
    data = text(LENGTH, rows=ROWS, share=share)
    for x in data:
        x[1:, :, :PROMPT] = x[:1, :, :PROMPT]
    return data


def step(cache, data, rows, part: slice):
    """Compute tokens of rows in all layers; return the output of each layer."""
    query, key, value, decisions = (x[rows, :, part].to(DEVICE) for x in data)
    position = torch.arange(part.start, part.stop, device=DEVICE).repeat(len(rows), 1)
    arrival = NewTokens(position, key, value, decisions)
    unturned = readable.unturned(torch.tensor(rows, device=DEVICE), query, arrival)
    return [cache.step(n, unturned).output.cpu() for n in range(cache.lists_shape[0])]


def forked(cache, data, rows):
    """Put the prompt of the texts into row 0 and, from a snapshot of it, into `rows`."""
    step(cache, data, [0], slice(0, PROMPT))
    snapshot = cache.snapshot(0, PROMPT)
    for row in rows:
        snapshot.restore(row)
    return snapshot


def with_policy(policy):
    return paged(policy, rows=ROWS, pages=400)


def all_tokens(data):
    return with_policy(KeepAllPolicy()), [causal()]


def newest_tokens(data):
    return with_policy(WindowPolicy(WINDOW)), [near()]


def unmarked_tokens(data):
    spec = PRESETS["dms"].override(window=WINDOW, decision_shift=0, eviction="delayed")
    return with_policy(DMSPolicy(WINDOW, 0)), [visible(data[3], spec)]


def with_windows(policy, name):
    layers = LocalLayers(policy, name, [WINDOW + 1, None, None, WINDOW + 1])
    sizes = CacheSizes(4, ROWS, readable.HEADS, group=1, longest=64)
    return LocalPagedCache(paged(KeepAllPolicy(), pages=1600).pool, layers, sizes)


def all_tokens_or_a_window(data):
    cache = with_windows(KeepAllPolicy(), "keep_all")
    return cache, [near(), causal(), causal(), near()]


def unmarked_tokens_or_a_window(data):
    _, (marked,) = unmarked_tokens(data)
    return with_windows(DMSPolicy(WINDOW, 0), "auto"), [near(), marked, marked, near()]


def causal():
    i = torch.arange(LENGTH)
    return (i <= i[:, None]).expand(ROWS, readable.HEADS, LENGTH, LENGTH)


def near():
    i = torch.arange(LENGTH)
    return causal() & (i[:, None] - i <= WINDOW)


@pytest.mark.parametrize(
    ("build", "share"),
    [
        (all_tokens, 0.5),
        (newest_tokens, 0.5),
        (unmarked_tokens, 0.5),
        (unmarked_tokens, 1.0),
        (all_tokens_or_a_window, 0.5),
        (unmarked_tokens_or_a_window, 0.5),
    ],
)
def test_steps_take_pages_for_new_tokens_alone(build, share):
    """Their number is that of the growth of the lists; without copies beforehand it is larger."""
    data = shared_texts(share)
    cache, allowed = build(data)
    expected = [readable.masked(data, mask) for mask in allowed]
    snapshot, lists, free = forked(cache, data, (1, 2)), cache.lists, cache.pool.free
    assert lists.copying == {0, 1, 2}
    cache.own_changing_pages([0, 1, 2], spare=10**6)
    assert lists.copying == set()
    for position in range(PROMPT, LENGTH):
        before, left = lists.pages(lists.lengths).sum(), int(free.left)
        outputs = step(cache, data, [0, 1, 2], slice(position, position + 1))
        grown = int(lists.pages(lists.lengths).sum() - before)
        assert left - int(free.left) == grown
        assert cache.pool._left <= int(free.left)
        for output, layer in zip(outputs, expected, strict=True):
            torch.testing.assert_close(
                output[:, :, 0], layer[:3, :, position], rtol=1e-5, atol=1e-5
            )
    snapshot.restore(3)  # the steps of the others have not changed its pages
    outputs = step(cache, data, [3], slice(PROMPT, PROMPT + 1))
    for output, layer in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output[0, :, 0], layer[3, :, PROMPT], rtol=1e-5, atol=1e-5)


WAITING = {"tolist", "item", "cpu", "to", "numpy", "nonzero", "masked_select"}
WAITING |= {"__int__", "__bool__", "__float__", "__index__"}


class HostReads(TorchFunctionMode):
    """Counter of operations for which the host waits for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in WAITING
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("build", "tokens", "waits"),
    [
        (all_tokens, PROMPT, False),
        (newest_tokens, WINDOW + 1, False),
        (unmarked_tokens, WINDOW + 1, False),
        (newest_tokens, WINDOW + 2, True),
        (unmarked_tokens, WINDOW + 2, True),
        (all_tokens_or_a_window, WINDOW, True),
    ],
)
def test_a_snapshot_waits_for_the_device_if_tokens_may_be_gone(build, tokens, waits):
    data, reads = shared_texts(0.5), HostReads()
    cache, _ = build(data)
    step(cache, data, [0], slice(0, tokens))
    with reads:
        snapshot = cache.snapshot(0, tokens)
    assert (reads.count > 0) == waits
    pages = cache.lists.pages(cache.lists.lengths[:, 0])
    assert cache.lists.shared_pages[0] == int(pages.sum())
    assert snapshot._tables[0].shape[-1] == int(pages.max())


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preset", ["dms", None])
def test_the_engine_says_how_many_tokens_a_snapshot_has(folder, preset, caching, monkeypatch):
    """In prompts and, with prefix caching, at the end of sequences; no page is lost."""
    directory, seen = folder("llama", preset and small_spec(preset)), []
    how = {"kernels": "triton", "device": DEVICE.type, "max_model_len": 48, "page_slots": 4}
    how |= {"enable_prefix_caching": caching}
    engine = InferenceEngine(directory, EngineOptions(prefill_chunk=5, **how))
    cache = engine._runner.cache
    taken = cache.snapshot

    def snapshot(row, tokens):
        lengths, found = cache.lists.lengths[:, row], taken(row, tokens)
        seen.append((tokens, int(lengths.max())))
        assert int((found._tables[0] != 0).sum()) == int(cache.lists.pages(lengths).sum())
        return found

    monkeypatch.setattr(cache, "snapshot", snapshot)
    params = SamplingParams(n=2, max_tokens=7, temperature=1.0, seed=1)
    for number in (9, 14):
        engine.add_request(random_ids(number, seed=number), params, final_only=True)
    while engine.has_unfinished_requests():
        engine.step()
    assert {tokens for tokens, _ in seen} >= {8, 13}
    assert caching == any(tokens > 14 for tokens, _ in seen)
    assert all(held <= tokens for tokens, held in seen)
    assert preset or all(held == tokens for tokens, held in seen)


def test_without_copies_beforehand_a_step_may_take_more():
    data = shared_texts(1.0)
    cache = with_policy(DMSPolicy(WINDOW, 0))
    forked(cache, data, (1, 2))
    lists = cache.lists
    before = int(lists.pages(lists.lengths).sum()), int(cache.pool.free.left)
    for position in range(PROMPT, LENGTH):
        step(cache, data, [0, 1, 2], slice(position, position + 1))
    grown = int(lists.pages(lists.lengths).sum()) - before[0]
    assert before[1] - int(cache.pool.free.left) > grown


@pytest.mark.parametrize(("build", "most"), [(all_tokens, 3), (unmarked_tokens, 12)])
def test_only_spare_pages_are_taken(build, most):
    """Three lists of 14 tokens, in four pages each. Without eviction only the last one changes."""
    data = shared_texts(0.0)
    cache, _ = build(data)
    snapshot = forked(cache, data, (1, 2))
    for spare, copying in ((most - 1, {0, 1, 2}), (2 * most, {2}), (10**6, set())):
        left = int(cache.pool.free.left)
        cache.own_changing_pages([0, 1, 2], spare)
        assert cache.lists.copying == copying
        assert left - int(cache.pool.free.left) <= spare
    assert [cache.pages_of_steps(row, 8) for row in range(3)] == [3 * 2] * 3
    snapshot.restore(3)
    assert cache.pages_of_steps(3, 8) == 3 * 8  # any step may copy a page
    cache.own_changing_pages([0, 1, 2], spare=10**6)
    assert cache.lists.copying == {3}
    cache.free(torch.tensor([3], device=DEVICE))
    cache.note_empty(3)
    assert cache.lists.copying == set()


def test_a_chunk_of_a_prompt_may_leave_shared_pages_at_the_end():
    data = shared_texts(0.5)
    cache = with_policy(DMSPolicy(WINDOW, 0))
    forked(cache, data, (1,))
    cache.own_changing_pages([0, 1], spare=10**6)
    with cache.reserved([(0, 1), (1, 5)]):
        pass
    assert cache.lists.copying == {1}


@pytest.mark.parametrize("preset", ["dms", None])
def test_chains_of_a_prompt_run_in_bursts_in_a_full_cache(folder, preset):
    """Three chains fit, and the cache has fewer free pages than steps that may copy would need."""
    directory = folder("llama", None if preset is None else small_spec(preset))
    how = {"kernels": "triton", "device": DEVICE.type, "max_model_len": 48, "page_slots": 4}
    how |= {"max_num_seqs": 3, "decode_steps": 4}
    cache = InferenceEngine(directory, EngineOptions(**how))._runner.cache
    (layers, _, heads), page = cache.lists_shape, cache.pool.page_bytes
    params = SamplingParams(n=3, max_tokens=17, temperature=1.0, seed=1, ignore_eos=True)
    found = []
    for pages in (100, 24):
        limit = {"cache_bytes": (layers * heads * pages + 1) * page}
        engine = InferenceEngine(directory, EngineOptions(**how, **limit))
        engine.add_request(random_ids(10), params, final_only=True)
        passes = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            passes += 1
        found.append([chain.token_ids for chain in outputs[0].outputs])
        assert engine.decoded_steps > 1.8 * passes
        assert engine.preemptions == 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "preset", "options"),
    [
        ("llama", "dms", {}),
        ("gemma3_text", "dms", {}),
        ("llama", "dmc", {}),
        ("llama", None, {"policy": "quest", "policy_options": {"budget": 12, "page": 4}}),
        ("llama", None, {"policy": "h2o", "policy_options": {"budget": 24}}),
        ("llama", None, {"policy": "streaming_llm", "policy_options": {"budget": 24}}),
    ],
)
def test_bursts_give_the_tokens_of_single_steps(folder, family, preset, options):
    """Steps of budgets and of Quest copy shared pages themselves."""
    spec = PRESETS["dmc"].spec if preset == "dmc" else preset and small_spec(preset)
    directory = folder(family, spec)
    how = {"kernels": "triton", "device": DEVICE.type, "max_model_len": 48, "page_slots": 4}
    params = SamplingParams(n=3, max_tokens=11, temperature=1.0, seed=1, ignore_eos=True)
    found = []
    for steps in (1, 8):
        engine = InferenceEngine(directory, EngineOptions(decode_steps=steps, **how, **options))
        engine.add_request(random_ids(22), params, final_only=True)
        passes, pool = 0, engine._runner.cache.pool
        while engine.has_unfinished_requests():
            outputs = engine.step()
            passes += 1
            assert pool._left <= int(pool.free.left)
        found.append([chain.token_ids for chain in outputs[0].outputs])
        assert (engine.decoded_steps > passes) == (steps == 8)
    assert found[0] == found[1]


def test_the_manager_limits_the_copies(folder, monkeypatch):
    options = EngineOptions(kernels="triton", device=DEVICE.type, max_model_len=48, page_slots=4)
    manager, asked = InferenceEngine(folder("llama", None), options)._cache_manager, []
    monkeypatch.setattr(manager._cache, "own_changing_pages", lambda *given: asked.append(given))
    lists = 4 * manager._cache.lists_shape[0] * manager._cache.lists_shape[2]
    assert manager.prepare_burst([0, 2], 5, 7.0) == lists
    assert asked == [([0, 2], 7.0)]
