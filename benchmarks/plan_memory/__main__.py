"""Predictions of `dms-plan` beside measurements: memory of every pipeline stage, step times.

    python -m benchmarks.plan_memory [--gpus 1] [--cases NAMES] [--output benchmarks/results]
    python -m benchmarks.plan_memory --fit        # constants of the plan from what was measured

Every case takes steps of the real engine with random weights in processes of its own, and is
written to `plan_memory.json` in the device's folder as soon as it is measured; cases that are not
run again are kept. Two of them calibrate: `--fit` chooses the constants in
`dms_train/assets/planning.json` so that memory and time of those two are right. The others are only
checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, origin
from benchmarks.timing import device_name
from benchmarks.train_step.__main__ import run_case
from benchmarks.train_step.case import parallel_options
from benchmarks.train_step.shapes import SHAPES, Case, parse_layout
from dms_train.cli.errors import run_main
from dms_train.method.spec import PRESETS
from dms_train.planning import gpus
from dms_train.planning.activations import Microbatch
from dms_train.planning.gpus import GPUS, Calibration, read_calibration
from dms_train.planning.memory import PipelineStage, of_stage
from dms_train.planning.step_time import step_time, work_of

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
    "lm": _case("qwen2.5-1.5b", "lm", "dp1", 1, None),
    "tensor_plain": _case("llama3.2-1b", "dms", "tp2", 2, None),
    "copies": _case("qwen2.5-1.5b", "dms", "dp2", 2, None),
    "interleaved": _case("qwen2.5-1.5b", "dms", "pp2_vp2", 4, None),
    "pipeline": _case("qwen2.5-7b", "dms", "pp2", 4, "full"),
    "tensor": _case("qwen2.5-7b", "dms", "tp2_sp", 2, "full"),
    "pipeline_tensor": _case("qwen2.5-7b", "dms", "tp2_pp2_sp", 4, None),
}
TINY = {
    "tiny": replace(CASES["plain"], shape="tiny"),
    "tiny_pipeline": replace(CASES["pipeline"], shape="tiny"),
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 1 when a case failed, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="*", help="run the cases of these GPU counts")
    parser.add_argument("--cases", nargs="*", choices=(*CASES, *TINY), help="run these")
    parser.add_argument("--fit", action="store_true", help="write the constants, measure nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))


def _wanted(args: argparse.Namespace) -> dict[str, Case]:
    if args.cases:
        return {name: case for name, case in {**CASES, **TINY}.items() if name in args.cases}
    if not torch.cuda.is_available():
        return TINY
    counts = args.gpus or [torch.cuda.device_count()]
    return {name: case for name, case in CASES.items() if case.layout.world in counts}


def _run(args: argparse.Namespace) -> int:
    name = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if args.fit:
        path = args.output / "nvidia_h200" / "plan_memory.json"
        name = json.loads(path.read_text())["device"]
    else:
        path = args.output / re.sub(r"\W+", "_", name.lower()) / "plan_memory.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    failed, measured = 0, origin()
    for label, case in {} if args.fit else _wanted(args).items():
        rows[label] = run_case(case, MODULE) | measured
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")
        failed += "failed" in rows[label]
        print(*lines(label, rows[label], gpus.calibration()), sep="\n", flush=True)
    if args.fit:
        write(fit(rows, train_steps(path.parent)), rows)
    constants = Calibration(**json.loads(DATA_FILE.read_text())["constants"])
    print(name, *HEAD, sep="\n")
    for label, row in rows.items():
        print(*lines(label, row, constants), sep="\n")
    print("\n".join(others(train_steps(path.parent), constants)))
    return 1 if failed else 0


def train_steps(folder: Path) -> list[dict[str, Any]]:
    """Our steps that `benchmarks.train_step` measured."""
    path = folder / "train_step.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if "failed" not in row and row["case"]["subject"] == "ours"]


def others(steps: list[dict[str, Any]], c: Calibration) -> Iterator[str]:
    """The plan beside the steps that `benchmarks.train_step` measured, fullest process of each."""
    yield "\n| train_step.py | | allocated GB | planned GB | | step s | planned s | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in steps:
        case = Case.from_dict(row["case"])
        guess = max(of_stage(stage).allocated(c) for stage in stages(case))
        time = step_time(stages(case), _GPU, c).total
        found, took = row["max_memory_allocated"], row["step_s"]
        words = f"{case.shape} {case.layout.label} x {case.microbatches} {case.kind}"
        yield (
            f"| {words} | {case.layers} | {found / 1e9:.2f} | {guess / 1e9:.2f} | "
            f"{guess / found - 1:+.1%} | {took:.3f} | {time:.3f} | {time / took - 1:+.1%} |"
        )


def stages(case: Case) -> list[PipelineStage]:
    """The pipeline stages of a case on a GPU."""
    architecture, length, samples = SHAPES[case.shape]
    microbatch = Microbatch(
        architecture=architecture,
        method=PRESETS["dms"],
        parallel=parallel_options(case, torch.device("cuda")),
        samples=samples,
        length=length,
        distills=case.kind != "lm",
    )
    return [
        PipelineStage(
            microbatch=microbatch,
            rank=rank,
            copies=case.layout.dp,
            microbatches=case.microbatches,
        )
        for rank in range(case.layout.pp)
    ]


HEAD = (
    "| case | | stage | allocated GB | planned GB | | used GB | needed GB | step s | planned s | |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def lines(label: str, row: dict[str, Any], c: Calibration) -> Iterator[str]:
    """Rows of the table under `HEAD`, one for each pipeline stage."""
    case = Case.from_dict(row["case"])
    words = f"{case.shape} {case.layout.label} x {case.microbatches} {case.kind}"
    words += f", recompute {case.recompute}" if case.recompute else ""
    if "failed" in row:
        yield f"| {label} | {words} | {row['failed']} |" + " |" * 8
        return
    if "superseded" in row:
        words += f"; {row['superseded']}"
    planned = step_time(stages(case), _GPU, c).total
    time = f"{row['step_s']:.3f} | {planned:.3f} | {planned / row['step_s'] - 1:+.1%}"
    for stage, found in zip(stages(case), row["stages"], strict=True):
        memory = of_stage(stage)
        guess, needed = memory.allocated(c), memory.needed(c, case.layout.world)
        share = guess / found["allocated"] - 1 if found["allocated"] else 0.0
        yield (
            f"| {label} | {words} | {stage.rank} | {found['allocated'] / 1e9:.2f} | "
            f"{guess / 1e9:.2f} | {share:+.1%} | {found['used'] / 1e9:.2f} | "
            f"{needed / 1e9:.2f} | {time if stage.rank == 0 else ' | |'} |"
        )


def fit(rows: dict[str, Any], steps: list[dict[str, Any]]) -> Calibration:
    """The constants with which both calibrating cases come out as measured.

    Also the speed of links from the steps of `benchmarks.train_step` that used tensor parallelism.
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
    found = [stage for row in rows.values() for stage in row.get("stages", ())]
    fitted = old._replace(
        activation_factor=round(factor, 4),
        constant_bytes=round(constant),
        outside_bytes=round(max(alone)),
        nccl_bytes=round(max(several) - max(alone)),
        reserved_share=round(max(stage["reserved"] / stage["allocated"] for stage in found), 4),
        matmul_efficiency=round(matmul, 4),
        traffic_factor=round(traffic, 4),
    )
    return fitted._replace(link_efficiency=round(_links(steps, fitted), 4))


def _links(steps: list[dict[str, Any]], c: Calibration) -> float:
    """Share of a link's bandwidth with which tensor-parallel steps take as long as they did."""
    found = []
    for row in steps:
        case = Case.from_dict(row["case"])
        if case.layout.tp > 1 and case.kind == "dms":
            planned = step_time(stages(case), _GPU, c._replace(link_efficiency=1.0))
            left = row["step_s"] - planned.total + planned.communication
            found.append(planned.communication / left)
    return sum(found) / len(found) if found else c.link_efficiency


def _outside(row: dict[str, Any]) -> float:
    """Bytes of the fullest process outside torch's allocator; 0 of a case that failed."""
    return max((s["used"] - s["reserved"] for s in row.get("stages", ())), default=0.0)


def _solve(one: tuple[float, float, float], two: tuple[float, float, float]) -> tuple[float, float]:
    """x, y of a x + b y = c, twice."""
    (a, b, c), (d, e, f) = one, two
    determinant = a * e - b * d
    return (c * e - b * f) / determinant, (a * f - c * d) / determinant


def _counted(row: dict[str, Any]) -> tuple[float, float]:
    """Bytes counted of what varies, and bytes measured beyond what is fixed."""
    stage = stages(Case.from_dict(row["case"]))[0]
    memory = of_stage(stage)
    return memory.total - memory.fixed, row["stages"][0]["allocated"] - memory.fixed


def _speeds(first: Any, second: Any, old: Calibration) -> tuple[float, float]:
    """Efficiency of products and traffic factor."""
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
    source = "python -m benchmarks.plan_memory --gpus 1 2; python -m benchmarks.plan_memory --fit"
    values = {
        "source": source,
        "device": first["device"],
        "versions": first["versions"],
        "constants": constants._asdict(),
    }
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n")
    read_calibration.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
