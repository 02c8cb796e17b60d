"""Policies with a budget through the decode kernels: the tokens and costs of the readable cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.base import RequestSizes, find_kernel_rule
from dms_train.inference.policies.kernel_rules import LEAST, RETENTION, BudgetRule
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.trim_kv import TrimKVPolicy, TrimKVPolicyOptions
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import HeadNorms, Step
from dms_train.method.spec import PRESETS
from tests.support import policy_cases as cases
from tests.unit.inference.conftest import random_ids, small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
LENGTHS = (6, 1, 9)


@pytest.mark.parametrize(("policy", "own"), cases.POLICIES, ids=cases.IDS)
def test_every_pass_equals_the_readable_cache(policy, own):
    cases.check_scenario(build_policy(policy, own, None), DEVICE)


@pytest.mark.parametrize(
    ("own", "offset"),
    [
        ({"budget": 5}, 1.0),
        ({"cr": 1.6, "budget_mode": "growing"}, 1.0),
        ({"budget": 5, "block": 3}, 1.0),
        ({"budget": 4}, 90.0),  # every retention is 1, so that all scores are equal
    ],
    ids=str,
)
def test_every_pass_keeps_the_tokens_of_the_highest_retention(own, offset):
    spec = PRESETS["trim_kv"].override(alpha_scale=1.0, alpha_offset=offset).spec
    cases.check_scenario(build_policy("trim_kv", own, spec), DEVICE, spec)


class Squared(TrimKVPolicy):
    """A policy of one's own with the rule of the kernels."""

    def kernel_rule(self):
        return BudgetRule(evicts=LEAST, score=RETENTION)

    def retention(self, channel):
        return -super().retention(channel).square()

    def on_store(self, slots, arrival):
        return super().on_store(slots, arrival._replace(signal=-arrival.signal.square()))


def test_a_policy_states_retention_of_its_own():
    spec = PRESETS["trim_kv"].override(alpha_scale=1.0).spec
    options = TrimKVPolicyOptions(budget=5)
    cases.check_scenario(Squared(options, spec), DEVICE, spec)
    with pytest.raises(InferenceError, match="Squared: reads eviction channels"):
        cases.scenario(cases.paged(Squared(options, spec), DEVICE), DEVICE)


@pytest.mark.parametrize("name", ["kept", "retention", "slot_scores"])
def test_a_subclass_that_scores_otherwise_runs_in_torch_operations(name):
    spec = PRESETS["trim_kv"].spec
    body = {name: lambda self, *given: getattr(TrimKVPolicy, name)(self, *given)}
    other = type("Other", (TrimKVPolicy,), body)(TrimKVPolicyOptions(budget=5), spec)
    assert find_kernel_rule(other) == (
        f"Other overrides {name}, and the kernels score as the parent does"
    )


def test_protected_tokens_stay_at_any_retention():
    spec = PRESETS["trim_kv"].override(alpha_scale=1.0).spec
    policy = type("Recent", (TrimKVPolicy,), {"protected": 3})(TrimKVPolicyOptions(budget=4), spec)
    cases.check_scenario(policy, DEVICE, spec)


def test_numbers_of_each_head_have_no_common_choice():
    with pytest.raises(InferenceError, match="every KV head has its own number"):
        BudgetRule(evicts=LEAST, score=RETENTION, together=True)


def test_hooks_act_at_the_end_of_a_prompt_alone(monkeypatch):
    """Before it nothing is due, and the host waits for no layer."""
    spec = PRESETS["trim_kv"].override(alpha_scale=1.0).spec
    policy, due = build_policy("trim_kv", {"budget": 3}, spec), []
    seen = policy.evict_mask
    monkeypatch.setattr(policy, "evict_mask", lambda s, at: due.append(s.sequences) or seen(s, at))
    passes = cases.Passes(cases.paged(policy, DEVICE), DEVICE, spec)
    passes.assign(2, cases.REQUESTS[2])
    passes.go({2: 10})  # three chunks
    assert [int(sequences.end) for sequences in due] == [10]
    assert due[0].held == [10]


@pytest.mark.parametrize(
    "how", [{"interval": 2}, {"interval": None}, {"decode_only": True}], ids=str
)
def test_retention_at_other_times_runs_in_torch_operations(how):
    spec = PRESETS["trim_kv"].spec
    rule = find_kernel_rule(build_policy("trim_kv", {"budget": 5} | how, spec))
    assert rule == (
        "TrimKVPolicy needs interval=1 and no decode_only for the kernels, which evict token by "
        "token"
    )


def test_a_decode_step_reads_retention_from_normed_queries():
    """Captured steps get queries before their norm; `step` gets them after it."""
    spec, count = PRESETS["trim_kv"].override(alpha_scale=3.0, alpha_offset=1.0).spec, 12
    draw = torch.Generator().manual_seed(3)
    raw = torch.randn(1, count, cases.HEADS, cases.GROUP, cases.SIZE, generator=draw)
    key, value = torch.randn(2, 1, count, cases.HEADS, 1, cases.SIZE, generator=draw)
    weight, one = torch.rand(cases.SIZE, generator=draw) + 0.5, torch.ones(cases.SIZE)
    normed = raw * (raw.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    key = key * (key.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # as its norm leaves it
    cos, rows = torch.ones(1, count, 1, 1, cases.SIZE), torch.zeros(1, dtype=torch.int64)
    norms = HeadNorms(weight.to(DEVICE), one.to(DEVICE), 1e-6)
    kept = []
    for captured in (False, True):
        cache = cases.paged(build_policy("trim_kv", {"budget": 4}, spec), DEVICE)
        cache.assign(0, RequestSizes(1, count, 0))
        for t in range(count):
            query = raw if captured and t else normed
            fields = (query, key, value, cos, torch.zeros_like(cos))
            here = [x[:, t : t + 1].to(DEVICE) for x in fields]
            position = torch.full((1, 1), t, device=DEVICE)
            if captured and t:
                cache.prepare(1)
                flat = (here[0].flatten(1, 3), here[1].flatten(1, 3), here[2].flatten(1, 3))
                token = Step(
                    *flat, here[3].flatten(1), here[4].flatten(1), position[:, 0], rows.to(DEVICE)
                )
                cache.decode(0, token, spec, norms)
            else:
                cache.step(0, AttentionStep(*here, position, rows.to(DEVICE), spec=spec))
        kept.append([head.tolist() for head in cache.positions(0)[0]])
    assert kept[0] == kept[1]
    assert kept[0] != [list(range(count - 4, count))] * cases.HEADS


@pytest.mark.parametrize(("policy", "own"), cases.SELECTING, ids=["last", "any"])
def test_every_pass_reads_what_the_readable_cache_reads(policy, own):
    cases.check_scenario(build_policy(policy, own, None), DEVICE)


def options(policy, own, **how) -> EngineOptions:
    how = {"prefill_chunk": 5, "max_num_seqs": 2, "decode_steps": 2, "device": DEVICE.type} | how
    return EngineOptions(policy=policy, policy_options=own, page_slots=4, **how)


@pytest.mark.parametrize(
    ("policy", "own", "family"),
    [
        ("streaming_llm", {"cr": 2.0, "sinks": 2}, "llama"),
        ("snapkv", {"cr": 2.0, "window": 2, "kernel": 3}, "llama"),
        ("h2o", {"cr": 1.5}, "llama"),
        ("tova", {"budget": 5}, "llama"),
        ("trim_kv", {"budget": 5}, "qwen3"),  # its heads have norms
        pytest.param(
            *("quest", {"budget": 4, "page": 4, "dense_layers": 1}, "llama"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_engine_continues_with_the_same_tokens(folder, policy, own, family):
    """More requests of unequal lengths than rows, in groups of steps; both caches agree."""
    spec = small_spec("dms")
    if policy == "trim_kv":
        spec = PRESETS["trim_kv"].override(alpha_scale=1.0).spec
    found = []
    for kernels in ("triton", "reference"):
        directory = folder(family, spec)
        engine = InferenceEngine(directory, options(policy, own, kernels=kernels))
        ids = [engine.add_request(random_ids(n, seed=n), GREEDY, final_only=True) for n in LENGTHS]
        done, grouped = {}, 0
        while engine.has_unfinished_requests():
            before = engine.decoded_steps
            done |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
            grouped += engine.decoded_steps > before + 1
        assert (grouped > 0) == (kernels == "triton")
        assert isinstance(engine._runner.cache, PagedKVCache) == (kernels == "triton")
        assert engine._runner.cache.used_pages == 0
        outputs = [done[i] for i in ids]
        found.append(
            [(o.token_ids, o.kv.kv_reads, o.kv.prefill_reads, o.kv.live_tokens) for o in outputs]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("policy", "own", "how"),
    [
        ("h2o", {"budget": 8}, {"cache_dtype": "fp8"}),
        ("streaming_llm", {"budget": 8, "positions": "cache"}, {"kernels": "triton"}),
        ("roco", {"budget": 8}, {"kernels": "triton"}),
        ("quest", {"budget": 8, "page": 6}, {"kernels": "triton"}),
    ],
    ids=["fp8", "moved", "roco", "pages"],
)
def test_what_the_kernels_do_not_support_is_refused(folder, policy, own, how):
    with pytest.raises(InferenceError, match=r"kernels=\w+ cache_dtype=\w+: .*[Pp]olicy"):
        InferenceEngine(folder("llama", small_spec("dms")), options(policy, own, **how))


def test_a_prompt_near_the_limit_is_read_beside_the_longer_part_of_another():
    """Tokens held by one and arriving in the other are together more than a sequence has."""
    policy = build_policy("streaming_llm", {"budget": 40, "sinks": 2}, None)

    def read(cache, device):
        passes = cases.Passes(cache, device)
        passes.assign(0, RequestSizes(20, 22, 0))
        passes.assign(2, RequestSizes(10, 14, 0))
        passes.go({0: 16}, chunk=16)
        passes.go({0: 20, 2: 10}, chunk=10)
        return passes.seen

    expected = read(cases.readable(policy), torch.device("cpu"))
    for (output, facts), (true, known) in zip(
        read(cases.paged(policy, DEVICE), DEVICE), expected, strict=True
    ):
        assert facts == known
        torch.testing.assert_close(output, true, rtol=1e-5, atol=1e-5)
