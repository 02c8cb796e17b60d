"""Policies with a budget through the decode kernels: the tokens and costs of the readable cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels import dispatch
from tests.support import policy_cases as cases
from tests.unit.inference.conftest import small_spec

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
    with pytest.raises(InferenceError, match=r"kernels=\w+ cache_dtype=\w+: .*Policy"):
        InferenceEngine(folder("llama", small_spec("dms")), options(policy, own, **how))
