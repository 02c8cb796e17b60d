"""The training attention, forward and backward: our backends beside every peer, for each shape.

Run by `python -m benchmarks attention --sections train`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor
from torch import Tensor

from benchmarks import tables, timing
from benchmarks.attention import peers
from benchmarks.attention.shapes import AttentionInputs, Call, Shape, make_inputs
from benchmarks.tables import field, spread
from benchmarks.timing import Timing
from dms_train.kernels import dispatch
from dms_train.kernels.options import KERNELS

WINDOW = 256
SHAPES = (
    Shape(1, 12, 2, 8192, 128, "Qwen2.5-1.5B"),
    Shape(1, 32, 8, 8192, 128, "Llama 3.1 8B"),
    Shape(4, 32, 8, 4096, 64, "Llama 3.2 1B"),
    Shape(1, 32, 8, 32768, 128, "Qwen3 8B"),
)
# Shapes of a CPU, which check that every part works; the times mean little.
TINY_WINDOW = 16
TINY_SHAPES = (Shape(1, 4, 2, 256, 32), Shape(2, 3, 3, 130, 16))
_CPU_BACKENDS = ("blockwise", "reference")
_GIB = 2**30


class Entry(NamedTuple):
    """One implementation.

    Attributes:
        name: Name of its row.
        kind: `dense` (no DMS), `peer` (DMS by torch alone) or `ours`.
        make: Function that binds the implementation to its inputs.
        bytes_per_score: Bytes that it keeps for each (query, key) pair.
    """

    name: str
    kind: str
    make: Callable[[AttentionInputs], Call]
    bytes_per_score: int = 0


def entries(device: torch.device) -> list[Entry]:
    """Return the implementations that can run on a device: peers first."""
    dense_bytes = {"materialised": 6}
    if device.type != "cuda":
        return [
            Entry("SDPA causal", "dense", functools.partial(peers.sdpa, backend=None)),
            Entry("materialised", "peer", peers.materialised),
            *(Entry(name, "ours", functools.partial(ours, name=name)) for name in _CPU_BACKENDS),
        ]
    return [
        *(Entry(name, "dense", make) for name, make in peers.WITHOUT_DMS.items()),
        *(Entry(n, "peer", make, dense_bytes.get(n, 0)) for n, make in peers.WITH_DMS.items()),
        *(
            Entry(f"ours: {n}", "ours", functools.partial(ours, name=n), 24 * (n == "reference"))
            for n in KERNELS
            if n
            not in ("auto", "blockwise")  # blockwise is for CPUs; it takes seconds per pass here
        ),
    ]


def ours(inputs: AttentionInputs, name: str) -> Call:
    """Bind a backend of this package, from the logits on."""
    attend, p = dispatch.train_attention(name), inputs

    def forward() -> Tensor:
        return attend(p.query, p.key, p.value, p.log_keep(), p.window, p.scale)

    return Call(forward, [p.query, p.key, p.value, p.logits], p.d_out)


def compile_ahead(workers: int) -> None:
    """Fill the compiler's cache on disk, several FlexAttention templates at a time.

    Compiled in sequence, they take minutes, nearly all on one processor.
    """
    jobs = [
        (shape, entry.name)
        for shape in SHAPES
        for entry in entries(torch.device("cuda"))
        if "flex" in entry.name
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[Shape, str]) -> None:
    shape, name = job
    device = torch.device("cuda")
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # this process is one of many
    inputs = make_inputs(shape, WINDOW, device, torch.bfloat16)
    call = next(entry for entry in entries(device) if entry.name == name).make(inputs)
    call.backward(call.forward())
    torch._dynamo.reset()


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Measure one record for each shape: its rows, and the ratios of ours to the peers."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        compile_ahead(max(1, (os.cpu_count() or 1) - 1))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    records = []
    for shape in SHAPES if on_gpu else TINY_SHAPES:
        window = WINDOW if on_gpu else TINY_WINDOW
        inputs = make_inputs(shape, window, device, dtype)
        rows = [_row(entry, inputs, shape) for entry in entries(device)]
        records.append(
            {
                "shape": shape._asdict(),
                "label": shape.label,
                "window": window,
                "dtype": str(dtype).removeprefix("torch."),
                "rows": rows,
                "ratios": ratios(rows),
            }
        )
    return records


def _row(entry: Entry, inputs: AttentionInputs, shape: Shape) -> dict[str, Any]:
    device = inputs.query.device
    row: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
    needed = entry.bytes_per_score * shape.b * shape.hq * shape.s**2
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            return row | {"skipped": f"needs {needed / _GIB:.0f} GiB, {free / _GIB:.0f} are free"}
    call = entry.make(inputs)
    times = _times(call, device)
    extra = timing.extra_bytes(lambda: call.backward(call.forward()), device)
    return row | _figures(*times, shape) | {"extra_bytes": extra}


def _times(call: Call, device: torch.device) -> tuple[Timing, Timing]:
    out = call.forward()
    call.backward(out)  # compiles
    forward = timing.measure(call.forward, device)
    return forward, timing.measure(lambda: call.backward(out), device)


def _figures(forward: Timing, backward: Timing, shape: Shape) -> dict[str, Any]:
    flops = shape.flops()
    return {
        "forward_ms": forward._asdict(),
        "backward_ms": backward._asdict(),
        "total_ms": forward.median + backward.median,
        "forward_flops_per_s": flops[0] / forward.median * 1e3,
        "backward_flops_per_s": flops[1] / backward.median * 1e3,
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare ours with the best FlexAttention with DMS and with cuDNN without it, in total time.

    Without a GPU they are replaced by the materialised bias and torch's own choice.
    """
    timed = [row for row in rows if "skipped" not in row]
    with_dms = [r for r in timed if r["kind"] == "peer" and r["name"].startswith("flex")] or [
        r for r in timed if r["kind"] == "peer"
    ]
    best = min(with_dms, key=lambda row: row["total_ms"])
    dense = next(row for row in timed if row["kind"] == "dense")
    return [
        {
            "name": row["name"],
            "peer": best["name"],
            "speedup": best["total_ms"] / row["total_ms"],
            "dense": dense["name"],
            "time_over_dense": row["total_ms"] / dense["total_ms"],
        }
        for row in timed
        if row["kind"] == "ours"
    ]


def table(records: list[dict[str, Any]], gemm_flops_per_s: float) -> str:
    """Return a table for each shape; the last argument is the ceiling of the run."""
    sections = []
    for record in records:
        shape = record["shape"]
        title = f"\n### {shape['model'] or 'tiny'}: {record['label']}, window {record['window']}\n"
        columns = _columns({ratio["name"]: ratio for ratio in record["ratios"]}, gemm_flops_per_s)
        sections += [title, tables.table(columns, record["rows"])]
    return "\n".join(sections)


def _columns(ratios: dict[str, dict[str, Any]], gemm: float) -> list[tables.Column]:
    def of_peers(name: str) -> Callable[[tables.Row], str]:
        return lambda row: field(name, ".2f")(ratios.get(row["name"], {}))

    return [
        ("", field("name")),
        ("fwd ms", lambda row: spread(row["forward_ms"])),
        ("bwd ms", lambda row: spread(row["backward_ms"])),
        ("fwd TFLOP/s", field("forward_flops_per_s", ".1f", 1e-12)),
        ("bwd TFLOP/s", field("backward_flops_per_s", ".1f", 1e-12)),
        ("bwd of GEMM", field("backward_flops_per_s", ".0%", 1 / gemm)),
        ("fwd+bwd ms", field("total_ms", ".3f")),
        ("x best DMS peer", of_peers("speedup")),
        ("/ dense", of_peers("time_over_dense")),
        ("extra MiB", field("extra_bytes", ".0f", 2**-20)),
    ]
