"""Reservations: a pass takes at most its planned pages, and the host bounds the free pages."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference import prompt_graphs
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.scheduler import Scheduler
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import random_ids, small_spec
from tests.unit.inference.test_paged import feed, paged, text

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(torch.device(DEVICE)), reason="needs triton's interpreter"
)
SIZES = {"kernels": "triton", "device": DEVICE, "max_model_len": 96, "page_slots": 4}
SIZES |= {"prefill_chunk": 16, "max_num_batched_tokens": 48}


@pytest.fixture
def planned(monkeypatch) -> list[list[int]]:
    """Record for every step the planned pages and the pages reserved from then on."""
    steps: list[list[int]] = []
    schedule, reserve = Scheduler.schedule, DevicePool.reserve

    def watched(self, *args, **kwargs):
        plan = schedule(self, *args, **kwargs)
        steps.append([plan.pages, 0])
        return plan

    def counted(self, count):
        if steps:
            steps[-1][1] += count
        reserve(self, count)

    monkeypatch.setattr(Scheduler, "schedule", watched)
    monkeypatch.setattr(DevicePool, "reserve", counted)
    return steps


def step(engine: InferenceEngine) -> dict[str, list[list[int]]]:
    """Run a step, check the host's bound of free pages, and return tokens of finished requests."""
    found = {
        done.request_id: [each.token_ids for each in done.outputs]
        for done in engine.step()
        if done.finished
    }
    pool = engine._runner.cache.pool
    assert pool._left <= int(pool.free.left)
    return found


@pytest.mark.parametrize(
    ("policy", "options", "most"),
    [
        ("auto", {}, 24),
        ("auto", {}, 0),
        ("snapkv", {"budget": 16}, 24),
        ("h2o", {"budget": 16}, 24),
        pytest.param("tova", {"budget": 16}, 24, marks=pytest.mark.slow),
    ],
)
def test_a_pass_of_prompts_and_single_tokens(folder, planned, monkeypatch, policy, options, most):
    monkeypatch.setattr(prompt_graphs, "_MOST", most)
    directory = folder("llama", small_spec("dms") if policy == "auto" else None)
    how = SIZES | {"policy": policy, "policy_options": options, "max_num_seqs": 2}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    outputs = []
    for steps in (0, 3):  # between the requests; 0 runs one after the other
        engine, found = InferenceEngine(directory, EngineOptions(**how)), {}
        engine.add_request(random_ids(30, 1), params)
        while steps == 0 and engine.has_unfinished_requests():
            found |= step(engine)
        for _ in range(steps):
            found |= step(engine)
        engine.add_request(random_ids(50, 2), params)
        while engine.has_unfinished_requests():
            found |= step(engine)
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert all(reserved <= pages for pages, reserved in planned)
    assert sum(reserved for _, reserved in planned) > 0


@pytest.mark.parametrize(
    "prompts_pass",
    ["chunk after chunk", pytest.param("one pass", marks=pytest.mark.slow)],
    indirect=True,
)
@pytest.mark.usefixtures("prompts_pass")
def test_shared_prompts_in_a_cache_that_is_nearly_full(folder, planned):
    draw = random.Random(1)
    directory = folder("llama", small_spec("dms"))
    how = SIZES | {"max_num_seqs": 4, "enable_prefix_caching": True}
    cache = InferenceEngine(directory, EngineOptions(**how))._runner.cache
    layers, _, heads = cache.lists_shape
    pages = layers * heads * 30
    engine = InferenceEngine(
        directory, EngineOptions(**how, cache_bytes=(pages + 1) * cache.pool.page_bytes)
    )
    common = [random_ids(40, seed=seed) for seed in range(2)]
    for number in range(7):
        prompt = [*draw.choice(common)[: draw.randint(17, 40)], *random_ids(9, seed=number)]
        if number % 2:
            engine.add_scoring(prompt, [random_ids(4, seed=seed) for seed in range(2)])
        else:
            params = SamplingParams(n=2, max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
            engine.add_request(prompt, params)
        step(engine)
    while engine.has_unfinished_requests():
        step(engine)
    assert all(reserved <= most for most, reserved in planned)
    lists = engine._runner.cache.lists
    assert lists.shared_pages == [0] * 4
    while engine._cache_manager.reclaim():
        pass
    assert lists.pool.used_pages == 0


def test_pages_whose_snapshot_is_gone_are_not_copied():
    cache = paged(KeepAllPolicy())
    data = text(18)
    feed(cache, data, (18,))
    rows = torch.tensor([1])
    first = cache.snapshot(0, 18)
    assert cache.most_copies(0, tokens=4) > 0
    assert cache.most_copies(0, tokens=1) == 0
    first.release()
    assert cache.pool.used_pages > 0  # the host learns that nothing is shared
    assert cache.most_copies(0, tokens=4) == 0
    other = cache.snapshot(0, 18)
    other.restore(1)
    assert cache.most_copies(0, tokens=4) == cache.most_copies(1, tokens=4) > 0
    cache.free(rows)
    other.release()
