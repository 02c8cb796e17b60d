"""Kernel rules: who inherits them, and what becomes of a policy without one."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference import cache_builder
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies import registry
from dms_train.inference.policies.base import CachePolicy, PolicyKind, find_kernel_rule
from dms_train.inference.policies.h2o import H2OOptions, H2OPolicy
from dms_train.inference.policies.kernel_rules import COLUMN_SUMS, LEAST, NEVER, OLDEST, BudgetRule
from dms_train.inference.policies.keydiff import KeyDiffPolicy
from dms_train.inference.policies.score_policy import ScoreOptions
from dms_train.inference.policies.tova import TOVAOptions, TOVAPolicy
from dms_train.kernels import dispatch
from tests.support import policy_cases as cases
from tests.support.query_statistics import tiny_statistics
from tests.unit.inference.conftest import random_ids, small_spec
from tests.unit.inference.policies.test_requests import built, trained_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
OWN = {
    "dmc": {},
    "dms": {},
    "kvzap": {},
    "keep_all": {},
    "window": {"window": 4},
    "h2o": {"budget": 5},
    "tova": {"cr": 2.0},
    "streaming_llm": {"budget": 5, "sinks": 2},
    "snapkv": {"budget": 4, "window": 2, "kernel": 3},
    "pyramidkv": {"budget": 6, "window": 2, "kernel": 3, "beta": 4},
    "knorm": {"budget": 4, "interval": 2},
    "keydiff": {"budget": 4, "block": 4},
    "r_kv": {"budget": 5, "window": 2, "kernel": 3, "interval": 3},
    "triattention": {"budget": 5, "interval": 3, "statistics": tiny_statistics()},
    "quest": {"budget": 4, "page": 4},
    "trim_kv": {"budget": 4},
}
# `test_paged_policies.py` and `test_paged.py` compare these rules by default.
ELSEWHERE = {
    "dms",
    "keep_all",
    "h2o",
    "tova",
    "streaming_llm",
    "snapkv",
    "knorm",
    "keydiff",
    "r_kv",
}
WITHOUT = {"cam", "d2o", "hard_kv", "memory_pooling", "roco"}


def empty_subclass(policy: CachePolicy) -> CachePolicy:
    empty = copy.copy(policy)
    empty.__class__ = type(f"My{type(policy).__name__}", (type(policy),), {})
    return empty


def test_every_policy_with_a_rule_is_tested():
    own = {name: {"cr": 2} for name in registry.policy_names() if name != "auto"} | OWN
    rules = {name: find_kernel_rule(built(name, options)) for name, options in own.items()}
    assert {name for name, rule in rules.items() if isinstance(rule, str)} == WITHOUT
    assert set(rules) - WITHOUT == set(OWN)


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ELSEWHERE else ()) for name in OWN],
)
def test_an_empty_subclass_runs_through_the_kernels_like_its_parent(folder, monkeypatch, name):
    """The parent runs in torch operations; prompts are read while others decode, two steps each."""
    directory, kind = folder("llama", trained_for(name)), registry.policy_kind(name)
    sizes = {"page_slots": 4, "prefill_chunk": 5, "max_num_seqs": 2, "decode_steps": 2}
    found = []
    for kernels in ("reference", "triton"):
        options = EngineOptions(
            policy=name, policy_options=OWN[name], kernels=kernels, device=DEVICE.type, **sizes
        )
        engine = InferenceEngine(directory, options)
        assert isinstance(engine._runner.cache, PagedKVCache) == (kernels == "triton")
        assert type(engine._runner.cache.policy).__name__.startswith("My") == bool(found)
        for n in (9, 1, 6, 7):
            engine.add_request(random_ids(n, seed=n), GREEDY, final_only=True)
        done = []
        while engine.has_unfinished_requests():
            done += [(o.request_id, o.outputs[0]) for o in engine.step() if o.finished]
        done.sort()
        found.append([(o.token_ids, o.kv.kv_reads, o.kv.live_tokens) for _, o in done])
        mine = PolicyKind(kind.options, lambda o, s: empty_subclass(kind.build(o, s)), kind.trained)
        monkeypatch.setattr(registry, "_registered", {name: mine})
    assert found[0] == found[1]


class DoubleH2O(H2OPolicy):
    def budget(self, sequences):
        return 2 * super().budget(sequences)


class DoubleTOVA(TOVAPolicy):
    def budget(self, sequences):
        return 2 * super().budget(sequences)


@needs_kernels
@pytest.mark.parametrize("cls", [DoubleH2O, DoubleTOVA])
def test_the_kernels_hold_the_budget_of_a_subclass(cls):
    """More tokens than the options of the parent say; the torch operations are the truth."""
    options = H2OOptions if cls is DoubleH2O else TOVAOptions
    cases.check_scenario(cls(options(budget=3)), DEVICE)


class Halved(H2OPolicy):
    def observe(self, slots, received):
        return super().observe(slots, received) / 2


class Halving:
    def observe(self, slots, received):
        return super().observe(slots, received) / 2


class Mixed(Halving, H2OPolicy):
    pass


class Declared(Halved):
    def kernel_rule(self):
        return super().kernel_rule()


class Watching(KeyDiffPolicy):
    def observe(self, slots, received):
        return slots.state


class OtherScores(KeyDiffPolicy):
    def score(self, keys, values, attention):
        return -super().score(keys, values, attention)


def test_a_rule_holds_for_the_hooks_of_its_class_only():
    options, scores = H2OOptions(budget=4), ScoreOptions(budget=4)
    without = "overrides observe without a kernel_rule of its own"
    assert find_kernel_rule(Halved(options)) == f"Halved {without}"
    assert find_kernel_rule(Mixed(options)) == f"Mixed {without}"
    assert find_kernel_rule(Watching(scores)) == f"Watching {without}"
    assert find_kernel_rule(Declared(options)) == H2OPolicy(options).kernel_rule()
    assert find_kernel_rule(OtherScores(scores)) == KeyDiffPolicy(scores).kernel_rule()
    assert find_kernel_rule(CachePolicy()) == "CachePolicy declares no kernel rule"


@pytest.mark.parametrize("cls", [Halved, Mixed])
def test_a_subclass_with_hooks_of_its_own_is_refused_by_the_kernels(folder, monkeypatch, cls):
    kind = PolicyKind(H2OOptions, lambda options, spec: cls(options))
    monkeypatch.setattr(registry, "_registered", {"mine": kind})
    how = {"policy": "mine", "policy_options": {"budget": 4}, "kernels": "triton"}
    directory = folder("llama", small_spec("dms"))
    with pytest.raises(InferenceError, match=f"{cls.__name__} overrides observe"):
        InferenceEngine(directory, EngineOptions(device=DEVICE.type, **how))


def test_one_line_says_why_a_gpu_decodes_without_kernels(folder, monkeypatch):
    """Asked as on a GPU; the host has none."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dms_train")
    cache_builder._log_once.cache_clear()
    monkeypatch.setattr(logger, "handlers", [handler])
    model = InferenceEngine(folder("llama", None), EngineOptions())._runner.model
    options = EngineOptions(device="cuda")
    mine = empty_subclass(H2OPolicy(H2OOptions(budget=4)))
    assert cache_builder._uses_kernels(model, mine, options)
    assert not lines
    for _ in range(2):
        assert not cache_builder._uses_kernels(model, Halved(H2OOptions(budget=4)), options)
    (line,) = lines
    assert line == (
        "decoding with torch operations, which are slower than the kernels: "
        "Halved overrides observe without a kernel_rule of its own"
    )
    assert not cache_builder._uses_kernels(model, CachePolicy(), EngineOptions())  # a CPU
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evicts": LEAST}, "give a score with evicts='least', and only there"),
        ({"evicts": NEVER, "score": COLUMN_SUMS}, "give a score with evicts='least'"),
        ({"evicts": OLDEST, "interval": 4}, "interval=4 and evicts='oldest': an interval needs"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(values, message):
    with pytest.raises(InferenceError, match=message):
        BudgetRule(**values)


def test_a_subclass_that_evicts_at_another_time_has_no_rule():
    policy = empty_subclass(built("window", OWN["window"]))
    type(policy).scored = True
    assert (
        find_kernel_rule(policy)
        == "MyWindowPolicy overrides scored without a kernel_rule of its own"
    )
