"""Kernels of a decode step: their times, compared with copying the bytes that they read.

    python -m benchmarks serve kernels [SHAPE] [--sequences 1] [--context 8192]

Some steps of the engine run under torch's profiler, with DMS and random weights. Kernels overlap,
because each is launched while the previous one runs. The time of a kernel is therefore counted from
the end of the previous kernel to its own end. The sum is the time of a step without the gaps before
it. Needs a GPU from Hopper on. The record is `kernels_SHAPE_SEQUENCES.json`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.benchmark import Args, Benchmark, add_fields
from benchmarks.records import Table
from benchmarks.serve.case import Case, prompts
from benchmarks.serve.models import ENGINE, KEPT, LONGEST, SERVING_PAGE, SHAPES, random_model
from benchmarks.tables import Column, field, table
from benchmarks.timing import ceilings
from dms_train.hf.architecture import Architecture
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams

_STEPS = 20
_ROOM = 100  # slots for the tokens of these steps and of earlier ones
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
    """Return the microseconds of each part of a step.

    Args:
        step: Kernels of the step in order.

    Raises:
        InferenceError: A kernel does not belong to a step.
    """
    times: dict[str, float] = {}
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
        times[part] = times.get(part, 0.0) + max(0.0, end - begin)
        begin = max(begin, end)
    return times


def bytes_of(a: Architecture, live: float, sequences: int) -> dict[str, float]:
    """Return the bytes that parts of a step read, weights and live tokens in 16 bits."""
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
    num_bytes = {name: 2.0 * a.num_layers * count for name, count in layer.items()}
    return num_bytes | {LOGITS: 2.0 * a.vocab_size * a.hidden_size}


def tables(record: dict[str, Any]) -> str:
    """Return the microseconds of a step by part, and the time of copying the same bytes."""
    parts = record["parts"]
    whole = {key: sum(part[key] for part in parts.values()) for key in ("kernels", "us", "bytes")}

    def copy_us(part: dict[str, Any]) -> float:
        return float(part["bytes"] / record["copy_bytes_s"] * 1e6)

    columns: list[Column] = [
        ("part of a step", field("name")),
        ("kernels", field("kernels")),
        ("us", field("us", ".1f")),
        ("us at the rate of a copy", lambda p: f"{copy_us(p):.1f}" if p["bytes"] else "-"),
        ("ratio", lambda p: f"{p['us'] / copy_us(p):.2f}" if p["bytes"] else "-"),
    ]
    return table(columns, [{"name": n, **part} for n, part in {**parts, "all": whole}.items()])


def measure(shape: str, case: Case, device: torch.device) -> dict[str, Any]:
    """Measure the median of each part over some steps.

    Args:
        shape: Model.
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
    """Step until all prompts decode; return the mean number of tokens that a KV head holds then."""
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
    """Return the kernels of some steps."""
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
    """Return whole steps, each from its first kernel to its last one."""
    steps: list[list[Kernel]] = []
    step: list[Kernel] = []
    for kernel in sorted(kernels, key=lambda k: k.end):
        if kernel.name == "_embed_kernel":
            step = []
        step.append(kernel)
        if kernel.name == "_report_kernel":
            if step[0].name == "_embed_kernel":
                steps.append(step)
            step = []
    return steps


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("shape", nargs="?", default="Llama-3.2-1B", choices=SHAPES, help="(%(default)s)")
    add("--sequences", type=int, default=1, help="(%(default)s)")
    add("--context", type=int, default=8192, help="tokens of each prompt (%(default)s)")


def check(args: Args) -> None:
    """Refuse sizes that do not fit."""
    if args.sequences < 1 or not 1 <= args.context <= LONGEST - _ROOM:
        given = f"--sequences {args.sequences} --context {args.context}"
        raise ValueError(f"{given}: at least 1, and a context of at most {LONGEST - _ROOM}")


def _measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    if args.device.type != "cuda" or torch.cuda.get_device_capability(args.device) < (9, 0):
        raise InferenceError("serve kernels: needs a GPU from Hopper on")
    yield measure(args.shape, Case(args.sequences, args.context), args.device)


BENCHMARK = Benchmark(
    record="kernels_{shape}_{sequences}",
    options=options,
    check=check,
    device=False,
    measure=_measure,
    store=add_fields,
    tables=tables,
    stored=(Table("*/kernels_*.json", SERVING_PAGE, ENGINE),),
)
