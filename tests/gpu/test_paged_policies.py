"""Policies with a budget on a GPU: captured steps beside torch operations, forks, preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.registry import build_policy
from tests.gpu.test_paged_engine import model
from tests.support import policy_cases as cases
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
EVERY = pytest.mark.parametrize(
    ("policy", "own"), cases.POLICIES + cases.SELECTING, ids=[*cases.IDS, "quest", "quest-8"]
)


def engine_of(policy: str, own: dict, kernels: str, **how: int) -> InferenceEngine:
    options = EngineOptions(
        device="cuda", policy=policy, policy_options=own, kernels=kernels, page_slots=4,
        **{"max_num_seqs": 4, "prefill_chunk": 16} | how,
    )  # fmt: skip
    return InferenceEngine(model(None), options)


def prompt(length: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(0, tiny.VOCAB, (length,), generator=draw).tolist()


def drained(engine: InferenceEngine, steps: tuple[int, ...] = ()) -> dict:
    """Finished requests; before some steps the last sequence loses its cache."""
    done, step = {}, 0
    while engine.has_unfinished_requests():
        step += 1
        scheduler = engine._scheduler
        placed = [s for s in scheduler.admitted if s.finish_reason is None]
        if step in steps and placed:
            victim = max(placed, key=lambda s: s.order)
            scheduler.remove(victim)
            scheduler.add(victim)
        done |= {o.request_id: o for o in engine.step() if o.finished}
    return done


@EVERY
def test_every_pass_equals_the_readable_cache(policy: str, own: dict) -> None:
    cases.check_scenario(build_policy(policy, own, None), torch.device("cuda"))


@EVERY
@pytest.mark.parametrize("steps", [(), (12, 30)], ids=["plain", "preempted"])
def test_captured_steps_generate_the_same_tokens(policy: str, own: dict, steps: tuple) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    found = []
    for kernels in ("auto", "reference"):
        engine = engine_of(policy, own, kernels)
        ids = [engine.add_request(prompt(n), greedy) for n in (40, 3, 21, 33, 8)]
        done = drained(engine, steps)
        assert isinstance(engine._runner.cache, PagedKVCache) == (kernels == "auto")
        assert engine._runner.cache.used_pages == 0
        outputs = [done[i].outputs[0] for i in ids]
        costs = [(o.kv.kv_reads, o.kv.prefill_reads, o.kv.live_tokens) for o in outputs]
        found.append(([o.token_ids for o in outputs], costs))
    assert found[0] == found[1]


@EVERY
def test_forks_and_turns_generate_the_same_tokens(policy: str, own: dict) -> None:
    several = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for kernels in ("auto", "reference"):
        engine = engine_of(policy, own, kernels)
        engine.add_request(prompt(37), several)
        tokens = [o.token_ids for output in drained(engine).values() for o in output.outputs]
        talk = engine.open_conversation()
        for length in (25, 9):
            engine.add_turn(talk, prompt(length), greedy)
            tokens.append(drained(engine)[talk].outputs[0].token_ids)
        found.append(tokens)
    assert found[0] == found[1]


LONG = [
    ("streaming_llm", {"budget": 60, "sinks": 7}),
    ("h2o", {"budget": 60}),
    ("tova", {"budget": 60}),
]


@pytest.mark.parametrize(("policy", "own"), LONG, ids=[name for name, _ in LONG])
def test_long_searches_behind_short_prompts_generate_the_same_tokens(
    policy: str, own: dict
) -> None:
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=400, ignore_eos=True)
    found = []
    for kernels in ("auto", "reference"):
        engine = engine_of(policy, own, kernels, max_num_seqs=96, decode_steps=8)
        ids = [
            engine.add_request(prompt(7 + n % 2), replace(params, seed=n), final_only=True)
            for n in range(96)
        ]
        done = {}
        while engine.has_unfinished_requests():
            done |= {o.request_id: o for o in engine.step()}
            held = engine.live_positions(ids[0]) if engine.has_request(ids[0]) else None
            if policy == "streaming_llm" and held is not None:
                _require_sinks_and_newest(held, sinks=7, budget=60)
        found.append([done[i].outputs[0].token_ids for i in ids])
    assert found[0] == found[1]


def _require_sinks_and_newest(held: list[list[torch.Tensor]], sinks: int, budget: int) -> None:
    for layer in held:
        for position in layer:
            newest = position[-1].item() if len(position) else -1
            last = range(max(sinks, newest + 1 - (budget - sinks)), newest + 1)
            kept = [*range(min(sinks, newest + 1)), *last]
            assert position.tolist() == kept
