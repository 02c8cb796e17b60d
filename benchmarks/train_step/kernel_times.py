"""Profile of one training step: kernels of the GPU and their times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_step.shapes import Case

# The first pattern found in a kernel's name gives its kind.
KINDS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|barrier_kernel|memcpy ptop"),
    ("attention", r"attend|attention|flash|fmha|cudnn.*sdpa|sdpa|row_dots|finish_dq|prepare_bias"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("optimizer", r"adam|multi_tensor|l2norm|fused_?optim"),
    ("loss", r"softmax|cross_entropy|nll|_kl_|divergence|sum_exponentials"),
    ("RoPE and eviction channel", r"rotate_eviction_channel|decide_eviction"),
    ("activation", r"gate_forward|gate_backward|silu"),
    ("norm", r"layer_?norm|rms_?norm|vectorized_layer_norm|cuComputeGrad|GammaBeta|rmsnorm"),
    ("copy", r"memcpy|memset|copy"),
    ("reduction", r"reduce|scan|cumsum"),
    ("elementwise", r"elementwise|triton_|vectorized|unrolled|CatArray|index|fill|where"),
)
_TOP, _TOP_WAITS = 30, 6


def profile_step(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Measure the milliseconds of one step by kind and by kernel, on this rank.

    Returns:
        `wall_ms` of the step under the profiler; `busy_ms`, the time with any kernel running;
        `exposed_ms`, the part of it with communication only; `kinds`; `kernels`, the longest, each
        with its kind, its total and its calls; `waits`, the longest times without a kernel, each
        with its neighbours.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    step()
    with profile(activities=activities) as recorded:
        since = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - since
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [
        e
        for e in recorded.events()
        if e.device_type == wanted and not getattr(e, "is_user_annotation", False)
    ]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    busy, waits = _covered(spans)
    apart, _ = _covered([span for span in spans if kind_of(span[2]) != "communication"])
    longest = sorted(waits, key=lambda wait: -wait["ms"])[:_TOP_WAITS] if on_gpu else []
    times = {"wall_ms": wall * 1e3, "busy_ms": busy / 1e3, "exposed_ms": (busy - apart) / 1e3}
    return {**times, "waits": longest, **_summed(events)}


def _covered(spans: list[tuple[float, float, str]]) -> tuple[float, list[dict[str, Any]]]:
    """Return the length of the union of sorted intervals, and its gaps with their neighbours."""
    covered, waits = 0.0, []
    end, before = float("-inf"), ""
    for first, last, name in spans:
        if before and first > end:
            waits.append({"ms": (first - end) / 1e3, "after": before, "before": name})
        covered += max(0.0, last - max(first, end))
        if last > end:
            end, before = last, name
    return covered, waits


def _summed(events: list[Any]) -> dict[str, Any]:
    kernels: dict[str, list[float]] = {}
    for event in events:
        entry = kernels.setdefault(event.name, [0.0, 0.0])
        entry[0] += event.time_range.elapsed_us() / 1e3
        entry[1] += 1
    kinds: dict[str, float] = {}
    for name, (ms, _) in kernels.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + ms
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:_TOP]
    return {
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": [
            {"name": name, "kind": kind_of(name), "ms": ms, "calls": int(calls)}
            for name, (ms, calls) in longest
        ],
    }


def kind_of(kernel: str) -> str:
    """Return the group of `KINDS` that the name of a kernel belongs to."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "other"


def lines(times: dict[str, Any]) -> list[str]:
    """Return the result of `profile_step` as lines of text."""
    text = [
        f"wall {times['wall_ms']:.1f} ms under the profiler, GPU busy {times['busy_ms']:.1f} ms",
        "  ".join(f"{kind} {ms:.1f}" for kind, ms in times["kinds"].items()),
    ]
    if "exposed_ms" in times:  # not in older records
        text.insert(1, f"communication alone {times['exposed_ms']:.1f} ms")
    for kernel in times["kernels"]:
        name = kernel["name"][:110]
        text.append(f"{kernel['ms']:9.2f} ms {kernel['calls']:5d}x {kernel['kind']:13s} {name}")
    waits = times["waits"]
    text += [f"{w['ms']:9.2f} ms idle: {w['after'][:60]} -> {w['before'][:60]}" for w in waits]
    return text


def tables(record: dict[str, Any]) -> str:
    """Print the kernels of the profiled steps of a stored record."""
    profiled = [row for row in record["rows"] if "profile" in row]
    return "\n\n".join("\n".join([_title(row), *lines(row["profile"])]) for row in profiled)


def _title(row: dict[str, Any]) -> str:
    case = Case.from_dict(row["case"])
    return f"{case.shape} {case.layout.label}, {row['label']}"
