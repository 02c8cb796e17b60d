"""Policies with a budget through the decode kernels: the tokens and costs of the readable cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.base import RequestSizes
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels import dispatch
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


@pytest.mark.parametrize(("policy", "own"), cases.SELECTING, ids=["last", "any"])
def test_every_pass_reads_what_the_readable_cache_reads(policy, own):
    cases.check_scenario(build_policy(policy, own, None), DEVICE)


def options(policy, own, **how) -> EngineOptions:
    how = {"prefill_chunk": 5, "max_num_seqs": 2, "decode_steps": 2, "device": DEVICE.type} | how
    return EngineOptions(policy=policy, policy_options=own, page_slots=4, **how)


@pytest.mark.parametrize(
    ("policy", "own"),
    [
        ("streaming_llm", {"cr": 2.0, "sinks": 2}),
        ("snapkv", {"cr": 2.0, "window": 2, "kernel": 3}),
        ("h2o", {"cr": 1.5}),
        ("tova", {"budget": 5}),
        pytest.param("quest", {"budget": 4, "page": 4, "dense_layers": 1}, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_engine_continues_with_the_same_tokens(folder, policy, own):
    """More requests of unequal lengths than rows, in groups of steps; both caches agree."""
    found = []
    for kernels in ("triton", "reference"):
        directory = folder("llama", small_spec("dms"))
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
