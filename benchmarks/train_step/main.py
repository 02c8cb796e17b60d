"""A training step: time, memory and parts, compared with megatron-core in the same run.

    python -m benchmarks train_step [--shapes qwen2.5-1.5b] [--cases ours:lm,ours:distill,ours:dms]
        [--layouts dp1,tp2_sp,dp2] [--layers local,transformer_engine] [--peer-layers ...]
        [--cuda-graph auto] [--train lora] [--offload-teacher] [--fp8]
        [--offload-optimizer] [--state-dtype bf16] [--profile]

Every case runs in a separate process (or in torchrun, if the layout takes several GPUs) with the
settings of `launch/env.sh`. Earlier rows of the record are kept unless they are measured again.
`run` is the time at which the command began. Without a GPU, the tiny shape checks that every part
works. model-TFLOP/s counts 6N for the student (4N and the gradients of what `--train` chooses), 2N
for the teacher and causal attention, even if fewer or more operations are computed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark, Page, comma_separated, one_of, replace
from benchmarks.records import Table
from benchmarks.train_step import kernel_times, page, tables
from benchmarks.train_step.shapes import KINDS, LAYERS, SHAPES, SUBJECTS, Case, Layout, parse_layout
from dms_train.hf.options import PRECISIONS
from dms_train.mcore.options import CUDA_GRAPH
from dms_train.method.base import TRAINED_WEIGHTS

ROOT = Path(__file__).resolve().parents[2]
_CASES = "peer:lm,ours:lm,peer:distill,ours:distill,ours:dms"
_PATIENCE_S = 400


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    shape = "qwen2.5-1.5b" if torch.cuda.is_available() else "tiny"
    shapes, layers, peers = (comma_separated(one_of(x)) for x in (SHAPES, LAYERS, LAYERS[1:]))
    pairs, layouts = comma_separated(read_pair), comma_separated(parse_layout)
    add("--shapes", type=shapes, default=[shape], metavar="NAMES", help=f"default: {shape}")
    add("--cases", type=pairs, default=pairs(_CASES), help=f"default: {_CASES}")
    add("--layouts", type=layouts, default=[Layout()], help="such as tp2_sp,pp2_vp2,dp2")
    add("--layers", type=layers, default=["auto"], help="of ours (auto)")
    add("--peer-layers", type=peers, default=["local"], help="of megatron-core (local)")
    add("--recompute", choices=("selective", "mlp", "full"))
    add("--cuda-graph", choices=CUDA_GRAPH, default="auto", help="parallel.cuda_graph of ours")
    add("--train", choices=TRAINED_WEIGHTS, default="all", help="method.train of ours (all)")
    add("--offload-teacher", action="store_true", help="teacher.offload of ours")
    add("--fp8", action="store_true", help="parallel.fp8 of ours")
    add("--offload-optimizer", action="store_true", help="optim.offload of ours")
    add("--state-dtype", choices=PRECISIONS, default="fp32", help="optim.state_dtype of ours")
    add("--microbatches", type=int, default=1, help="of each data-parallel rank (%(default)s)")
    add("--steps", type=int, default=10, help="(%(default)s)")
    add("--profile", action="store_true", help="kernels of one further step")


def read_pair(text: str) -> tuple[str, str]:
    """Read a word such as `ours:dms`.

    Raises:
        ValueError: There is no such case.
    """
    subject, _, kind = text.partition(":")
    if subject not in SUBJECTS or kind not in KINDS:
        raise ValueError(f"{text}: choose from ours:lm, peer:distill, ...")
    return subject, kind


def check(args: Args) -> None:
    """Refuse cases that megatron-core does not support."""
    for case in cases(args):
        if not case.known:
            raise ValueError(f"{case.label} in layout {case.layout.label}: not supported")


def cases(args: Args) -> Iterator[Case]:
    """Yield the cases that the options ask for."""
    for shape in args.shapes:
        for layout in args.layouts:
            for subject, kind in args.cases:
                for layers in args.layers if subject == "ours" else args.peer_layers:
                    yield Case(
                        shape=shape,
                        subject=subject,
                        kind=kind,
                        layout=layout,
                        layers=layers,
                        microbatches=args.microbatches,
                        recompute=args.recompute,
                        cuda_graph=args.cuda_graph,
                        trains=args.train if subject == "ours" else "all",
                        offloads=args.offload_teacher and subject == "ours",
                        fp8=args.fp8 and subject == "ours",
                        offloads_optimizer=args.offload_optimizer and subject == "ours",
                        state_dtype=args.state_dtype if subject == "ours" else "fp32",
                        steps=args.steps,
                        profile=args.profile,
                    )


def measure(case: Case, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the row of a case."""
    yield run_case(case) | {"run": args.began} | args.origin


def run_case(case: Case, module: str = "benchmarks.train_step.case") -> dict[str, Any]:
    """Measure a case in separate processes; return a row with `failed` if it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "case.json", Path(folder) / "result.json"
        given.write_text(json.dumps(case.to_dict()))
        worker = ["-m", module, str(given), str(result)]
        if case.layout.world > 1:
            spread = ["--standalone", "--nproc-per-node", str(case.layout.world)]
            worker = ["-m", "torch.distributed.run", *spread, *worker]
        settings = [
            "bash",
            "-c",
            'source "$0" && exec "$@"',
            str(ROOT / "dms_train" / "launch" / "env.sh"),
        ]
        row: dict[str, Any] = {"case": case.to_dict(), "label": case.label}
        try:
            process = subprocess.run(
                [*settings, sys.executable, *worker],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return row | {"failed": f"not finished within {_PATIENCE_S} s"}
        if not result.exists():
            print(process.stderr[-4000:], file=sys.stderr)
            return row | {"failed": _reason(process.stderr)}
        return row | figures(case, json.loads(result.read_text()))


def _reason(stderr: str) -> str:
    # a rank's lines may begin with its number
    errors = re.findall(r"^(?:\[\w+\]: ?)?([\w.]*(?:Error|Exception)\b.*)", stderr, re.MULTILINE)
    return (errors or stderr.splitlines() or ["no message"])[-1][:200]


def figures(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the measured times, and values for one GPU derived from the median."""
    share = case.layout.world * measured["step_s"]
    return {
        **measured,
        "tokens_per_s_gpu": case.tokens / share,
        "model_tflops_gpu": case.model_flops / share / 1e12,
    }


_MEASURED = (
    "dms_train/mcore",
    "dms_train/method",
    "dms_train/kernels/layers",
    "dms_train/kernels/losses",
    "dms_train/kernels/train_attention",
)
BENCHMARK = Benchmark(
    record="train_step",
    options=options,
    check=check,
    device=False,
    cases=cases,
    measure=measure,
    store=replace("rows", lambda row: json.dumps(Case.from_dict(row["case"]).setting)),
    continues="rows",
    tables=tables.tables,
    views={"kernels": kernel_times.tables},
    stored=(
        Table(
            "*/train_step.json",
            "docs/performance/training_step.md",
            _MEASURED,
        ),
        Table("*/train_step_megatron_*.json", "docs/reference/versions.md", _MEASURED),
    ),
    page=Page(page.PAGE, page.write),
)
