"""The training step: time, memory and its parts, beside peers in the same run.

    python -m benchmarks.train_step [--shapes qwen2.5-1.5b] [--cases ours:lm,ours:distill,ours:dms]
        [--layouts dp1,tp2_sp,dp2] [--layers local,transformer_engine] [--peer-layers ...]
        [--cuda-graph auto] [--profile] [--output benchmarks/results]

Every case runs in a process of its own (or in torchrun, where the layout takes several GPUs) with
the settings of `launch/env.sh`, and is written to `train_step.json` in the device's folder as soon
as it is measured, with the time at which the command began; cases that the file already has and
that are not run again are kept. Without a GPU the tiny shape checks that every part works.
model-TFLOP/s counts 6N for the student, 2N for the teacher and causal attention, even if fewer or
more operations are computed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, origin
from benchmarks.timing import device_name
from benchmarks.train_step import kernel_times
from benchmarks.train_step.shapes import KINDS, LAYERS, SHAPES, SUBJECTS, Case, Layout, parse_layout
from dms_train.cli.errors import run_main
from dms_train.mcore.options import CUDA_GRAPH

ROOT = Path(__file__).resolve().parents[2]
_CASES = "peer:lm,ours:lm,peer:distill,ours:distill,ours:dms"
_GIB = 2**30
_PATIENCE_S = 400


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 1 when a case failed, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    default = "qwen2.5-1.5b" if on_gpu else "tiny"
    parser.add_argument("--shapes", type=_words(SHAPES), default=[default], metavar="NAMES")
    parser.add_argument("--cases", type=_cases, default=_cases(_CASES), help=f"default: {_CASES}")
    parser.add_argument("--layouts", type=_layouts, default=[Layout()], help="tp2_sp,pp2_vp2,dp2")
    parser.add_argument("--layers", type=_words(LAYERS), default=["auto"], help="of ours")
    parser.add_argument("--peer-layers", type=_words(LAYERS[1:]), default=["local"])
    parser.add_argument("--recompute", choices=("selective", "full"))
    parser.add_argument(
        "--cuda-graph", choices=CUDA_GRAPH, default="auto", help="parallel.cuda_graph of ours"
    )
    parser.add_argument("--microbatches", type=int, default=1, help="of each data-parallel rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="kernels of one further step")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    for case in _wanted(args):
        if not case.known:
            parser.error(f"{case.label} in layout {case.layout.label}: not supported")
    return run_main(lambda: _run(args))


def _words(known: Any) -> Any:
    def read(text: str) -> list[str]:
        unknown = [word for word in text.split(",") if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: choose from {', '.join(known)}")
        return text.split(",")

    return read


def _cases(text: str) -> list[tuple[str, str]]:
    pairs = [tuple(word.split(":")) for word in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in SUBJECTS or pair[1] not in KINDS:
            raise argparse.ArgumentTypeError(
                f"{':'.join(pair)}: choose from ours:lm, peer:distill, ..."
            )
    return [(pair[0], pair[1]) for pair in pairs]


def _layouts(text: str) -> list[Layout]:
    try:
        return [parse_layout(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _wanted(args: argparse.Namespace) -> Iterator[Case]:
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
                        steps=args.steps,
                        profile=args.profile,
                    )


def _run(args: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = device_name(device)
    path = args.output / re.sub(r"\W+", "_", name.lower()) / "train_step.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = origin()
    failed, began = 0, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(name, *HEAD, sep="\n", flush=True)
    for case in _wanted(args):
        row = run_case(case) | {"run": began} | measured
        rows = [r for r in rows if Case.from_dict(r["case"]).setting != case.setting]
        rows.append(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")
        print(line(row), flush=True)
        if "profile" in row:
            print("\n".join(kernel_times.lines(row["profile"])), flush=True)
        failed += "failed" in row
    print("\n".join(["", *ratio_lines(rows)]))
    print(f"\nwritten: {path}")
    return 1 if failed else 0


def run_case(case: Case, module: str = "benchmarks.train_step.case") -> dict[str, Any]:
    """Measure a case in processes of its own; a row with `failed` when it does not finish."""
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
            done = subprocess.run(
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
            print(done.stderr[-4000:], file=sys.stderr)
            return row | {"failed": _reason(done.stderr)}
        return row | figures(case, json.loads(result.read_text()))


def _reason(stderr: str) -> str:
    # a rank's lines may begin with its number
    errors = re.findall(r"^(?:\[\w+\]: ?)?([\w.]*(?:Error|Exception)\b.*)", stderr, re.MULTILINE)
    return (errors or stderr.splitlines() or ["no message"])[-1][:200]


def figures(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Measured times, and values for one GPU derived from the median."""
    share = case.layout.world * measured["step_s"]
    return {
        **measured,
        "tokens_per_s_gpu": case.tokens / share,
        "model_tflops_gpu": case.model_flops / share / 1e12,
    }


HEAD = (
    "| shape | layout | | step ms | tokens/s/GPU | model-TFLOP/s/GPU | peak GB |",
    "|---|---|---|---|---|---|---|",
)


def line(row: dict[str, Any]) -> str:
    """A row of the table under `HEAD`."""
    case = Case.from_dict(row["case"])
    words = [case.shape, case.layout.label, case.label]
    if case.recompute:
        words[2] += f", {case.recompute} recompute"
    if case.microbatches > 1:
        words[1] += f" x {case.microbatches}"
    if "failed" in row:
        return "| " + " | ".join([*words, row["failed"]]) + " | | | |"
    step, low, high = (1e3 * row[key] for key in ("step_s", "low_s", "high_s"))
    cells = [
        *words,
        f"{step:.1f} [{low:.1f}, {high:.1f}]",
        f"{row['tokens_per_s_gpu']:,.0f}",
        f"{row['model_tflops_gpu']:.0f}",
        f"{row['max_memory_allocated'] / 1e9:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def ratio_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """DMC over DMS, DMS over distillation and that over LM, of ours in the same setting."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        case = Case.from_dict(row["case"])
        if case.subject == "ours" and "failed" not in row:
            setting = {key: value for key, value in case.setting.items() if key != "kind"}
            times.setdefault(json.dumps(setting), {})[case.kind] = row["step_s"]
    for text, found in times.items():
        case = Case.from_dict({**json.loads(text), "kind": "lm"})
        eager = ", eager" if case.cuda_graph == "never" else ""
        where = f"{case.shape} {case.layout.label} ({case.layers}{eager})"
        for over, under in (("dmc", "dms"), ("dms", "distill"), ("distill", "lm")):
            if over in found and under in found:
                yield f"{where}: {over} / {under} = {found[over] / found[under]:.3f}"


if __name__ == "__main__":
    sys.exit(main())
