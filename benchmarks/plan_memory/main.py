"""Predictions of `dms-plan` and measurements: memory of every pipeline stage, step times.

    python -m benchmarks plan_memory [--gpus 1] [--cases NAMES]
    python -m benchmarks plan_memory --fit RECORD     # constants of the plan from what was measured

Every case takes steps of the real engine with random weights in separate processes. Cases that are
not measured again are kept. Two cases calibrate: `--fit` chooses the constants in
`dms_train/assets/planning.json` so that memory and time of these two are right. The others only
check the prediction.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark
from benchmarks.records import Table, folder_of
from benchmarks.train_step.case import parallel_options
from benchmarks.train_step.main import run_case
from benchmarks.train_step.shapes import SHAPES, Case, parse_layout
from dms_train.mcore.options import Trainable
from dms_train.method.spec import PRESETS
from dms_train.planning import gpus
from dms_train.planning.activations import Microbatch
from dms_train.planning.gpus import GPUS, Calibration, read_calibration
from dms_train.planning.memory import of_stage
from dms_train.planning.pipeline_stage import PipelineStage
from dms_train.planning.step_time import step_time, work_of
from dms_train.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
DATA_FILE = ROOT / "dms_train" / "assets" / "planning.json"
MODULE = "benchmarks.plan_memory.case"
_GPU = GPUS["h200"]


def _case(shape: str, kind: str, layout: str, microbatches: int, recompute: str | None) -> Case:
    return Case(
        shape=shape,
        subject="ours",
        kind=kind,
        layout=parse_layout(layout),
        microbatches=microbatches,
        recompute=recompute,
        warmup=2,
        steps=3,
    )


CALIBRATING = ("plain", "long_recompute")
CASES = {
    "plain": _case("qwen2.5-1.5b", "dms", "dp1", 2, None),
    "long_recompute": _case("llama3.2-1b", "dms", "dp1", 4, "full"),
    "selective": _case("llama3.2-1b", "dms", "dp1", 1, "selective"),
    "mlp": _case("qwen2.5-1.5b", "dms", "dp1", 2, "mlp"),
    "lm": _case("qwen2.5-1.5b", "lm", "dp1", 1, None),
    "tensor_plain": _case("llama3.2-1b", "dms", "tp2", 2, None),
    "copies": _case("qwen2.5-1.5b", "dms", "dp2", 2, None),
    "interleaved": _case("qwen2.5-1.5b", "dms", "pp2_vp2", 4, None),
    "uneven": _case("qwen2.5-1.5b", "dms", "pp2_last12", 4, None),
    "context": _case("llama3.2-1b-64k", "dms", "cp2", 1, "mlp"),
    "pipeline": _case("qwen2.5-7b", "dms", "pp2", 4, "full"),
    "tensor": _case("qwen2.5-7b", "dms", "tp2_sp", 2, "full"),
    "pipeline_tensor": _case("qwen2.5-7b", "dms", "tp2_pp2_sp", 4, None),
}
TINY = {
    "tiny": replace(CASES["plain"], shape="tiny"),
    "tiny_pipeline": replace(CASES["pipeline"], shape="tiny"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--gpus", type=int, nargs="*", help="run the cases of these GPU counts (default: all GPUs)")
    add("--cases", nargs="*", choices=(*CASES, *TINY), help="run these instead")


def cases(args: Args) -> Iterator[tuple[str, Case]]:
    """Yield the cases that the options ask for, with their names."""
    if not args.cases and not torch.cuda.is_available():
        yield from TINY.items()
        return
    counts = args.gpus or [torch.cuda.device_count()]
    for name, case in {**CASES, **TINY}.items():
        chosen = name in args.cases if args.cases else name in CASES and case.layout.world in counts
        if chosen:
            yield name, case


def measure(case: tuple[str, Case], args: Args) -> Iterator[dict[str, Any]]:
    """Yield the row of a case, by its name."""
    name, sizes = case
    yield {name: run_case(sizes, MODULE) | args.origin}


def store(record: dict[str, Any], rows: dict[str, Any]) -> None:
    """Put rows into the record, by the names of their cases."""
    record.setdefault("rows", {}).update(rows)


def fitted(record: dict[str, Any]) -> str:
    """Write the constants of the plan from a stored record, and print its tables."""
    write(fit(record["rows"], _steps(record)), record["rows"])
    return tables(record)


def _steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    return train_steps(folder_of(record["device"]))


def train_steps(folder: Path) -> list[dict[str, Any]]:
    """Return our steps that the benchmark `train_step` measured."""
    path = folder / "train_step.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if "failed" not in row and row["case"]["subject"] == "ours"]


def stages(case: Case) -> list[PipelineStage]:
    """Return the pipeline stages of a case on a GPU."""
    architecture, length, samples = SHAPES[case.shape]
    trainable = Trainable(weights=case.trains)
    microbatch = Microbatch(
        architecture=architecture,
        method=PRESETS["dms"],
        parallel=parallel_options(case, torch.device("cuda")),
        samples=samples,
        length=length,
        distills=case.kind != "lm",
        trainable=trainable,
        shares=case.kind != "lm" and case.trains != "all",
        offloads=case.offloads,
    )
    return [
        PipelineStage(
            microbatch=microbatch,
            rank=rank,
            copies=case.layout.dp * case.layout.cp,
            microbatches=case.microbatches,
            optimizer_on_host=case.offloads_optimizer,
            moment_width=2 if case.state_dtype == "bf16" else 4,
        )
        for rank in range(case.layout.pp)
    ]


HEAD = (
    *("case", "", "stage", "allocated GB", "planned GB", "", "used GB", "needed GB"),
    *("step s", "planned s", ""),
)
STEP_HEAD = ("train_step.py", "", "allocated GB", "planned GB", "", "step s", "planned s", "")


def tables(record: dict[str, Any]) -> str:
    """Return the plan next to every pipeline stage, and next to the steps of `train_step`."""
    constants = Calibration(**json.loads(DATA_FILE.read_text())["constants"])
    stage_rows = [
        cells for name, row in record["rows"].items() for cells in stage_cells(name, row, constants)
    ]
    step_rows = [step_cells(row, constants) for row in _steps(record)]
    parts = (markdown_table(HEAD, stage_rows), markdown_table(STEP_HEAD, step_rows))
    return f"{record['device']}\n{parts[0]}\n\n{parts[1]}"


def stage_cells(name: str, row: dict[str, Any], c: Calibration) -> Iterator[list[object]]:
    """Yield the cells under `HEAD`, for each pipeline stage."""
    case = Case.from_dict(row["case"])
    words = _words(case) + (f", recompute {case.recompute}" if case.recompute else "")
    if "failed" in row:
        yield [name, words, row["failed"]]
        return
    if "superseded" in row:
        words += f"; {row['superseded']}"
    planned = step_time(stages(case), _GPU, c).total
    for stage, measured in zip(stages(case), row["stages"], strict=True):
        memory = of_stage(stage)
        guess, needed = memory.allocated(c), memory.needed(c, case.layout.world)
        share = guess / measured["allocated"] - 1 if measured["allocated"] else 0.0
        sizes = [_gb(measured["allocated"]), _gb(guess), f"{share:+.1%}", _gb(measured["used"])]
        times = _times(row["step_s"], planned) if stage.rank == 0 else [""]
        yield [name, words, stage.rank, *sizes, _gb(needed), *times]


def step_cells(row: dict[str, Any], c: Calibration) -> list[object]:
    """Return the cells under `STEP_HEAD`: the plan next to the fullest process of a step."""
    case = Case.from_dict(row["case"])
    guess = max(of_stage(stage).allocated(c) for stage in stages(case))
    measured, time = row["max_memory_allocated"], step_time(stages(case), _GPU, c).total
    share = f"{guess / measured - 1:+.1%}"
    return [
        _words(case),
        case.layers,
        _gb(measured),
        _gb(guess),
        share,
        *_times(row["step_s"], time),
    ]


def _words(case: Case) -> str:
    trains = "" if case.trains == "all" else f", train={case.trains}"
    words = f"{case.shape} {case.layout.label} x {case.microbatches} {case.kind}{trains}"
    return words + ", FP8" * case.fp8 + case.memory


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _times(measured: float, planned: float) -> list[str]:
    return [f"{measured:.3f}", f"{planned:.3f}", f"{planned / measured - 1:+.1%}"]


def fit(rows: dict[str, Any], steps: list[dict[str, Any]]) -> Calibration:
    """Choose constants that make the prediction equal the measurement for both calibrating cases.

    The speed of links comes from the steps of the benchmark `train_step` with tensor parallelism.
    """
    rows = {name: row for name, row in rows.items() if "superseded" not in row}
    first, second = (rows[name] for name in CALIBRATING)
    (varying_1, rest_1), (varying_2, rest_2) = _counted(first), _counted(second)
    # factor * varying + constant = measured - fixed, for both
    factor, constant = _solve((varying_1, 1.0, rest_1), (varying_2, 1.0, rest_2))
    if constant < 0 or factor <= 0:
        constant, factor = 0.0, (rest_1 + rest_2) / (varying_1 + varying_2)
    old = gpus.calibration()
    matmul, traffic = _speeds(first, second, old)
    alone = [
        _outside(row) for row in rows.values() if Case.from_dict(row["case"]).layout.world == 1
    ]
    several = [_outside(row) for row in rows.values()]
    measured_stages = [stage for row in rows.values() for stage in row.get("stages", ())]
    fitted = old._replace(
        activation_factor=round(factor, 4),
        constant_bytes=round(constant),
        outside_bytes=round(max(alone)),
        nccl_bytes=round(max(several) - max(alone)),
        reserved_share=round(
            max(stage["reserved"] / stage["allocated"] for stage in measured_stages), 4
        ),
        matmul_efficiency=round(matmul, 4),
        traffic_factor=round(traffic, 4),
    )
    return fitted._replace(link_efficiency=round(_links(steps, fitted), 4))


def _links(steps: list[dict[str, Any]], c: Calibration) -> float:
    """Return the share of a link's bandwidth that explains the measured tensor-parallel steps."""
    efficiencies = []
    for row in steps:
        case = Case.from_dict(row["case"])
        fits = case.layout.tp > 1 and case.cuda_graph == "never"  # later rows only check
        if fits and case.kind == "dms":
            planned = step_time(stages(case), _GPU, c._replace(link_efficiency=1.0))
            left = row["step_s"] - planned.total + planned.communication
            efficiencies.append(planned.communication / left)
    return sum(efficiencies) / len(efficiencies) if efficiencies else c.link_efficiency


def _outside(row: dict[str, Any]) -> float:
    """Return the bytes of the fullest process outside torch's allocator; 0 if the case failed."""
    return max((s["used"] - s["reserved"] for s in row.get("stages", ())), default=0.0)


def _solve(one: tuple[float, float, float], two: tuple[float, float, float]) -> tuple[float, float]:
    """Solve a x + b y = c, given twice, for x and y."""
    (a, b, c), (d, e, f) = one, two
    determinant = a * e - b * d
    return (c * e - b * f) / determinant, (a * f - c * d) / determinant


def _counted(row: dict[str, Any]) -> tuple[float, float]:
    """Return the counted varying bytes, and the measured bytes beyond the fixed ones."""
    stage = stages(Case.from_dict(row["case"]))[0]
    memory = of_stage(stage)
    return memory.total - memory.fixed, row["stages"][0]["allocated"] - memory.fixed


def _speeds(first: Any, second: Any, old: Calibration) -> tuple[float, float]:
    """Return the efficiency of products and the traffic factor."""
    equations = []
    for row in (first, second):
        work = work_of(stages(Case.from_dict(row["case"]))[0])
        known = work.attention_flops / (_GPU.tflops * 1e12 * old.attention_efficiency)
        known += work.update_bytes / (_GPU.memory_tbs * 1e12)
        equations.append(
            (
                work.matmul_flops / (_GPU.tflops * 1e12),
                work.traffic_bytes / (_GPU.memory_tbs * 1e12),
                row["step_s"] - known,
            )
        )
    inverse, traffic = _solve(*equations)
    if inverse <= 1 or traffic <= 0:
        traffic = old.traffic_factor
        left = sum(rest - traffic * b for _, b, rest in equations)
        inverse = left / sum(a for a, _, _ in equations)
    return 1 / inverse, traffic


def write(constants: Calibration, rows: dict[str, Any]) -> None:
    """Write the data file, with its origin."""
    first = rows[CALIBRATING[0]]
    command = "python -m benchmarks plan_memory"
    values = {
        "source": f"{command} --gpus 1 2; {command} --fit RECORD",
        "device": first["device"],
        "versions": first["versions"],
        "constants": constants._asdict(),
    }
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n")
    read_calibration.cache_clear()


BENCHMARK = Benchmark(
    record="plan_memory",
    options=options,
    device=False,
    cases=cases,
    measure=measure,
    store=store,
    continues="rows",
    failed=lambda rows: any("failed" in row for row in rows.values()),
    tables=tables,
    views={"fit": fitted},
    stored=(
        Table(
            "*/plan_memory.json",
            "docs/guides/planning.md",
            ("dms_train/mcore", "dms_train/kernels/train_attention", "dms_train/kernels/losses"),
        ),
    ),
)
