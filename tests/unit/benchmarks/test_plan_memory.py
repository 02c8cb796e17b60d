"""The plan against what was measured, and the constants against the measurements they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan_memory import main as plan_memory
from benchmarks.train_step.shapes import Case
from dms_train.planning.gpus import GPUS, calibration, read_calibration
from dms_train.planning.memory import of_stage
from dms_train.planning.step_time import step_time

RESULTS = Path(plan_memory.__file__).parents[1] / "results" / "nvidia_h200" / "plan_memory.json"
ROWS = json.loads(RESULTS.read_text())["rows"]
# Allocations of code that has changed since are shown, but not compared with the plan.
VALID = [name for name, row in ROWS.items() if "superseded" not in row]
CHECKED = sorted(set(VALID) - set(plan_memory.CALIBRATING))
STEPS = plan_memory.train_steps(RESULTS.parent)


@pytest.mark.parametrize("name", CHECKED)
def test_memory_is_within_a_tenth_of_what_a_gpu_allocated(name):
    stages = plan_memory.stages(Case.from_dict(ROWS[name]["case"]))
    for stage, found in zip(stages, ROWS[name]["stages"], strict=True):
        memory = of_stage(stage)
        assert memory.allocated(calibration()) == pytest.approx(found["allocated"], rel=0.1)


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['label']}-{row['case']['layout']}")
def test_memory_is_within_a_tenth_in_the_steps_of_the_other_benchmark(row):
    stages = plan_memory.stages(Case.from_dict(row["case"]))
    fullest = max(of_stage(stage).allocated(calibration()) for stage in stages)
    assert fullest == pytest.approx(row["max_memory_allocated"], rel=0.1)


def waits_for_the_host(case):
    """Eager steps of small models, and an update on a host that did other work."""
    small = case["shape"] == "qwen2.5-1.5b"
    if small and case.get("offloads_optimizer"):
        return True
    small = case["shape"] == "smollm2-135m" or (small and case.get("fp8"))
    return small and case["cuda_graph"] == "never"


@pytest.mark.parametrize(
    "row",
    [row for row in STEPS if not waits_for_the_host(row["case"])],
    ids=lambda row: f"{row['label']}-{row['case']['layout']}",
)
def test_seconds_are_within_a_fifth_where_no_step_waits_for_the_host(row):
    stages = plan_memory.stages(Case.from_dict(row["case"]))
    time = step_time(stages, GPUS["h200"], calibration()).total
    assert time == pytest.approx(row["step_s"], rel=0.2)


@pytest.mark.parametrize("name", VALID)
def test_no_gpu_used_more_than_planned(name):
    case = Case.from_dict(ROWS[name]["case"])
    stages = plan_memory.stages(case)
    for stage, found in zip(stages, ROWS[name]["stages"], strict=True):
        needed = of_stage(stage).needed(calibration(), case.layout.world)
        assert found["used"] <= 1.01 * needed


def test_the_measurements_cover_enough_cases():
    cases = [ROWS[name]["case"] for name in CHECKED] + [row["case"] for row in STEPS]
    recomputed = [case for case in cases if case["recompute"]]
    pipelined = [case for case in cases if case["layout"]["pp"] > 1]
    assert len(cases) >= 4
    assert recomputed
    assert pipelined


def test_the_constants_are_those_of_the_measurements():
    assert plan_memory.fit(ROWS, STEPS) == calibration()
    assert read_calibration()["device"] == "NVIDIA H200"


def test_attention_is_as_fast_as_it_was_measured_to_be():
    record = json.loads(RESULTS.with_name("attention.json").read_text())
    (case,) = (case for case in record["train"] if case["label"] == "1x32/8x8192x128")
    (row,) = (row for row in case["rows"] if row["name"] == "ours: triton")
    # causal: 2 S^2 D a head forward, 2.5 times that backward
    flops = 3.5 * 2 * 32 * 8192**2 * 128
    measured = flops / (row["total_ms"] / 1e3) / (GPUS["h200"].tflops * 1e12)
    assert calibration().attention_efficiency == pytest.approx(measured, rel=0.05)


def test_the_fit_finds_the_constants_that_were_put_in():
    put = calibration()._replace(activation_factor=1.1, constant_bytes=3 * 10**8)
    rows = {}
    for name in plan_memory.CALIBRATING:
        row = dict(ROWS[name])
        (stage,) = plan_memory.stages(Case.from_dict(row["case"]))
        size = of_stage(stage).allocated(put)
        row["stages"] = [{"allocated": size, "reserved": 1.05 * size, "used": 1.05 * size + 2e9}]
        rows[name] = row
    found = plan_memory.fit(rows, STEPS)
    assert found.activation_factor == pytest.approx(1.1, abs=1e-3)
    assert found.constant_bytes == pytest.approx(3e8, rel=1e-2)
    assert found.reserved_share == pytest.approx(1.05, abs=1e-3)
    assert found.outside_bytes == pytest.approx(2e9, abs=2)
