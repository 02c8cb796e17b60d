"""What the kernels of a decode step take, beside their bytes at the rate of a copy.

    python -m benchmarks.serve.kernels [SHAPE] [--sequences 1] [--context 8192]

Some steps of the engine run under torch's profiler, with DMS and random weights. Kernels overlap:
each is launched while the one before it runs. The time of a kernel is therefore from the end of the
one before it to its own end, and the times add up to that of a step without gaps before it. Needs a
GPU from Hopper on. Prints a table, and writes `kernels_SHAPE_SEQUENCES.json` into the folder of the
device.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.records import RESULTS, origin, show
from benchmarks.serve.case import Case, prompts
from benchmarks.serve.models import KEPT, LONGEST, SHAPES, random_model
from benchmarks.timing import ceilings, device_name, versions
from dms_train.cli.errors import run_main
from dms_train.hf.architecture import Architecture
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams

_STEPS = 20
_ROOM = 100  # for the tokens of these steps, and of those before them
_PRODUCTS = ("queries, keys, values", "output projection", "gate and up", "down")
_OTHERS = {
    "_embed_kernel": "embedding",
    "_append_kernel": "append",
    "_decode_kernel": "attention",
    "_sample_kernel": "sampling",
    "_report_kernel": "report to the host",
}
LOGITS = "logits"


class Kernel(NamedTuple):
    """A kernel that has run: its name, and when it began and ended, in microseconds."""

    name: str
    start: float
    end: float


def by_part(step: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds of each part of a step.

    Args:
        step: Its kernels in their order.

    Raises:
        InferenceError: A kernel is none of a step.
    """
    found: dict[str, float] = {}
    products = sum(kernel.name == "_linear_kernel" for kernel in step)
    seen, begin = 0, step[0].start
    for name, _, end in step:
        if name == "_linear_kernel":
            last = seen == products - 1
            part = LOGITS if last else _PRODUCTS[seen % len(_PRODUCTS)]
            seen += 1
        elif name in _OTHERS:
            part = _OTHERS[name]
        else:
            raise InferenceError(f"{name}: not a kernel of a decode step")
        found[part] = found.get(part, 0.0) + max(0.0, end - begin)
        begin = max(begin, end)
    return found


def bytes_of(a: Architecture, live: float, sequences: int) -> dict[str, float]:
    """Bytes that parts of a step read, weights and live tokens in 16 bits."""
    heads = (a.num_attention_heads + 2 * a.num_query_groups) * a.kv_channels
    attended = a.num_attention_heads * a.kv_channels
    held = sequences * live * a.num_query_groups * 2 * a.kv_channels
    layer = {
        _PRODUCTS[0]: heads * a.hidden_size,
        "attention": held,
        _PRODUCTS[1]: attended * a.hidden_size,
        _PRODUCTS[2]: 2 * a.ffn_hidden_size * a.hidden_size,
        _PRODUCTS[3]: a.ffn_hidden_size * a.hidden_size,
    }
    found = {name: 2.0 * a.num_layers * count for name, count in layer.items()}
    return found | {LOGITS: 2.0 * a.vocab_size * a.hidden_size}


def table(record: dict[str, Any]) -> str:
    """Markdown: microseconds of a step, and of its bytes at the rate of a copy."""
    rows = [
        "| part of a step | kernels | us | us at the rate of a copy | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, part in record["parts"].items():
        copy = part["bytes"] / record["copy_bytes_s"] * 1e6
        times = f"{copy:.1f} | {part['us'] / copy:.2f}" if copy else "- | -"
        rows.append(f"| {name} | {part['kernels']} | {part['us']:.1f} | {times} |")
    total = sum(part["us"] for part in record["parts"].values())
    copy = sum(part["bytes"] for part in record["parts"].values()) / record["copy_bytes_s"] * 1e6
    kernels = sum(part["kernels"] for part in record["parts"].values())
    rows.append(f"| all | {kernels} | {total:.1f} | {copy:.1f} | {total / copy:.2f} |")
    return "\n".join(rows)


def measure(shape: str, case: Case, device: torch.device) -> dict[str, Any]:
    """The median of each part over some steps.

    Args:
        shape: Of the model.
        case: Sequences and tokens of their prompts.
        device: A GPU.
    """
    model = random_model(shape, KEPT, device, torch.bfloat16)
    engine = InferenceEngine(
        model,
        EngineOptions(
            device=str(device), policy="dms", max_num_seqs=case.sequences, max_model_len=LONGEST,
            prefill_chunk=8192, gpu_memory_utilization=0.6, decode_steps=1,
        ),
    )  # fmt: skip
    live = _fill(engine, case)
    steps = [by_part(step) for step in _profiled(engine)]
    read = bytes_of(engine.architecture, live, case.sequences)
    per_layer = engine.architecture.num_layers
    inside = {*_PRODUCTS, "append", "attention"}
    return {
        "shape": shape,
        "sequences": case.sequences,
        "context": case.context,
        "live": round(live),
        "copy_bytes_s": ceilings(device)["copy_bytes_per_s"],
        "parts": {
            name: {
                "kernels": per_layer if name in inside else 1,
                "us": statistics.median(step[name] for step in steps),
                "bytes": read.get(name, 0.0),
            }
            for name in steps[0]
        },
    }


def _fill(engine: InferenceEngine, case: Case) -> float:
    """Have all prompts decode; tokens that a KV head holds then, on average."""
    new = engine.longest - case.context
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for prompt in prompts(case, engine.architecture.vocab_size):
        engine.add_request(prompt, params)
    live, more = [0.0], 8
    while more:
        outputs = engine.step()
        if engine.unfinished < case.sequences:
            raise InferenceError(
                f"--sequences {case.sequences} --context {case.context}: the first sequence ends "
                "before the last prompt is computed; take fewer or shorter ones"
            )
        more -= engine.decoding == case.sequences
        live = [o.outputs[0].kv.live_tokens for o in outputs if o.outputs[0].kv] or live
    return statistics.fmean(live)


def _profiled(engine: InferenceEngine) -> Iterable[list[Kernel]]:
    """The kernels of some steps."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(engine.options.device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize(engine.options.device)
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.name.startswith("Mem")  # copies
    ]
    return steps_of(kernels)


def steps_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Whole steps, each from its first kernel to its last one."""
    found: list[list[Kernel]] = []
    step: list[Kernel] = []
    for kernel in sorted(kernels, key=lambda k: k.end):
        if kernel.name == "_embed_kernel":
            step = []
        step.append(kernel)
        if kernel.name == "_report_kernel":
            if step[0].name == "_embed_kernel":
                found.append(step)
            step = []
    return found


def _run(args: argparse.Namespace) -> int:
    device = torch.device("cuda")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (9, 0):
        raise InferenceError("benchmarks.serve.kernels: needs a GPU from Hopper on")
    record = {"device": device_name(device), "versions": versions(device), **origin()}
    record |= measure(args.shape, Case(args.sequences, args.context), device)
    folder = args.output / re.sub(r"\W+", "_", str(record["device"]).lower())
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "_", f"kernels_{args.shape.lower()}_{args.sequences}")
    file = folder / f"{name}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    print(f"written: {file}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("shape", nargs="?", default="Llama-3.2-1B", choices=SHAPES, help="(%(default)s)")
    add("--sequences", type=int, default=1, help="(%(default)s)")
    add("--context", type=int, default=8192, help="tokens of each prompt (%(default)s)")
    add("--output", type=Path, default=RESULTS)
    add("--table", type=Path, metavar="JSON", help="print a stored record and end")
    args = parser.parse_args(arguments)
    if args.table is not None:
        return run_main(lambda: show(args.table, table))
    if args.sequences < 1 or not 1 <= args.context <= LONGEST - _ROOM:
        given = f"--sequences {args.sequences} --context {args.context}"
        parser.error(f"{given}: at least 1, and a context of at most {LONGEST - _ROOM}")
    return run_main(lambda: _run(args))


if __name__ == "__main__":
    raise SystemExit(main())
