"""vLLM's scheduler and metrics with prompts whose pages follow a formula; no model runs."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.export.writer import write_export
from tests.unit.inference.conftest import small_spec, tiny_architecture, varied_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STATED, SHARE = 8.0, 0.5  # the export states less than half of what prompts really keep
LONGEST, PAGE, CHUNK = 1024, 16, 512
LEAST = LONGEST // PAGE + 3  # blocks with which both versions of vLLM start
OPTIONS = {"max_model_len": LONGEST, "max_num_seqs": 32, "max_num_batched_tokens": CHUNK}
OUTPUT = 30
ROOT = Path(__file__).resolve().parents[3]
SYNCHRONOUS = {"async_scheduling": False}
PRIORITIES = {"scheduling_policy": "priority", "long_prefill_token_threshold": 64}
# name: requests, blocks, share of tokens that are kept, parts left out, options
CASES: dict[str, tuple[int, int, float, list[str], dict[str, Any]]] = {
    "measured": (60, 150, SHARE, [], {}),
    "stated": (60, 150, SHARE, ["measured prompts"], {}),
    "small": (200, LEAST, SHARE, [], {}),
    "small, whole chunks": (200, LEAST, SHARE, ["shrink and wait"], {}),
    "small, synchronous": (200, LEAST, SHARE, [], SYNCHRONOUS),
    "small, priorities": (200, LEAST, SHARE, [], PRIORITIES),
    "small, nothing evicted": (200, LEAST, 1.0, [], {}),
}


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("scheduling") / "export"
    a = tiny_architecture("llama")
    write_export(
        path,
        architecture=a,
        spec=replace(small_spec("dms"), window=31),
        cr_factor=None,
        target_cr=STATED,
        dtype=torch.float32,
        export_format="dms",
        weights=varied_weights(a, 0).items(),
        source_dir=None,
        selftest=None,
        block_size=4,
        provenance={},
    )
    return str(path)


def job(export: str, case: str) -> dict[str, Any]:
    requests, blocks, keep, without, options = CASES[case]
    draw = random.Random(0)
    return {
        "model": export,
        "prompts": [draw.randrange(50, LONGEST - OUTPUT) for _ in range(requests)],
        "max_tokens": [OUTPUT] * requests,
        "blocks": blocks,
        "keep": keep,
        "spread": 0.0 if keep == 1 else 0.3,
        "without": without,
        "options": {**OPTIONS, **options},
    }


@pytest.fixture(scope="module")
def scheduled(in_vllm, export) -> dict[str, dict[str, Any]]:
    jobs = [job(export, case) for case in CASES]
    return dict(zip(CASES, in_vllm("vllm_pages.schedule", jobs), strict=True))


def preemptions(result: dict[str, Any]) -> int:
    return sum(len(step["preempted"]) for step in result["steps"])


def computed(result: dict[str, Any]) -> int:
    return sum(sum(step["counts"].values()) for step in result["steps"])


@pytest.mark.parametrize("case", CASES)
def test_all_requests_finish_and_all_blocks_come_back(scheduled, case):
    result, (requests, blocks, *_) = scheduled[case], CASES[case]
    print(f"{case}: {preemptions(result)} preemptions, {len(result['steps'])} steps")
    assert result["lengths"] == [OUTPUT] * requests
    assert result["free_blocks"] == blocks - 1  # vLLM never grants one


def test_measured_prompts_correct_what_the_export_states(scheduled):
    measured, stated = scheduled["measured"], scheduled["stated"]
    assert preemptions(stated) >= 5
    assert preemptions(measured) * 2 <= preemptions(stated)
    assert computed(measured) < computed(stated)


def test_chunks_that_fit_save_preemptions(scheduled):
    fitting, whole = scheduled["small"], scheduled["small, whole chunks"]
    assert preemptions(whole) >= 100
    assert preemptions(fitting) * 10 <= preemptions(whole)
    assert computed(fitting) * 2 <= computed(whole)


def test_a_chunk_that_does_not_fit_is_reduced(scheduled):
    def reduced(result: dict[str, Any]) -> int:
        """Steps that leave a prompt unfinished although they compute less than a full chunk."""
        count, done = 0, dict[str, int]()
        for step in result["steps"]:
            for name in step["preempted"]:
                done.pop(name, None)
            for name, tokens in step["counts"].items():
                done[name] = done.get(name, 0) + tokens
            unfinished = any(done[name] < step["prompts"][name] for name in step["counts"])
            count += unfinished and sum(step["counts"].values()) < CHUNK
        return count

    assert reduced(scheduled["small"]) >= 20
    assert reduced(scheduled["small, whole chunks"]) == 0


def test_a_step_with_many_free_blocks_asks_no_request_and_has_the_exact_limit(scheduled):
    for case, result in scheduled.items():
        if "shrink and wait" in CASES[case][3]:
            continue
        chosen, exact, asked = zip(*result["limits"], strict=True)
        assert chosen == exact, case
        assert 0 in asked, case
        assert 1 in asked, case


def test_a_step_that_does_not_fit_waits_for_reports_in_flight(scheduled):
    def waits(case: str) -> int:
        steps = scheduled[case]["steps"][:-1]  # the last one tells workers who has finished
        return sum(not step["counts"] and step["running"] > 0 for step in steps)

    assert waits("small") >= 10
    assert waits("small, synchronous") == 0  # no report is in flight


def test_a_pool_too_small_for_the_longest_request_is_refused_at_start(in_vllm, export):
    enough, short = ({**job(export, "small"), "blocks": n} for n in (LEAST, LEAST - 3))
    started, error = in_vllm("vllm_pages.refuse", [enough, short])
    assert started == ""
    assert f"at least one request with the model's max seq len ({LONGEST})" in error
    assert "estimated maximum model length is" in error
    assert "\n" not in error


@pytest.fixture(scope="module")
def measured(in_vllm, export, declared_loggers) -> dict[str, Any]:
    """75 steps, after one preemption, with the statistics loggers that the package declares."""
    draw = random.Random(0)
    changes = {
        "prompts": [draw.randrange(50, 900) for _ in range(8)],
        "max_tokens": [60] * 8,
        "steps": 75,
        "site": str(declared_loggers),
        "options": {**OPTIONS, **SYNCHRONOUS, "disable_log_stats": False},
    }
    (result,) = in_vllm("vllm_pages.measure", [{**job(export, "small"), **changes}])
    return result


def expected(measured: dict[str, Any]) -> tuple[float, float, int]:
    """Fill, compression ratio and preemptions of what the requests hold."""
    lengths = [lengths for _, lengths in measured["held"]]
    pages = sum(-(-n // PAGE) for request in lengths for n in request)
    dense = sum(computed * len(request) for computed, request in measured["held"])
    return pages / measured["pool"], dense / (pages * PAGE), measured["preempted"]


def test_metrics_state_what_requests_hold(measured):
    def value(name: str) -> float:
        (found,) = re.findall(rf"^{name}\{{.*\}} (\S+)$", measured["metrics"], re.MULTILINE)
        return float(found)

    fill, ratio, preempted = expected(measured)
    assert 0.5 < fill < 1
    assert ratio > 1.5
    assert preempted > 0
    assert value("dms:page_usage_perc") == fill
    assert value("dms:compression_ratio") == ratio
    assert value("vllm:num_preemptions_total") == preempted


def test_the_log_has_one_line_with_the_same_values(measured):
    fill, ratio, preempted = expected(measured)
    assert measured["lines"] == [  # nothing more at the next interval, in which no step ran
        f"Engine 000: DMS page usage: {fill:.1%}, compression ratio: {ratio:.2f}, "
        f"preemptions: {preempted}"
    ]
