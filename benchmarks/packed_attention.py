"""Training attention of packed documents and of one document of the same length.

    python -m benchmarks packed_attention

The exit code is 1 when a pack of documents takes longer than the one document. Without a GPU all
sizes are small.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.shapes import AttentionInputs, Call, Shape, make_inputs
from benchmarks.benchmark import Args, Benchmark, or_skipped
from benchmarks.records import Table
from benchmarks.tables import field, spread, table
from benchmarks.timing import measure
from dms_train.kernels import dispatch

WINDOW, TINY_WINDOW = 256, 16
SHAPES = (
    Shape(1, 12, 2, 8192, 128, "Qwen2.5-1.5B"),
    Shape(1, 32, 8, 8192, 128, "Llama 3.1 8B"),
    Shape(1, 32, 8, 8192, 64, "Llama 3.2 1B"),
)
TINY_SHAPES = (Shape(1, 4, 2, 256, 32),)
ALONE = "one document"
# Lengths of the documents in 64ths of the sequence.
PACKS = {
    "8 equal documents": (8,) * 8,
    "8 unequal documents": (25, 14, 9, 6, 4, 3, 2, 1),
    "64 equal documents": (1,) * 64,
}


def measure_shape(shape: Shape, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the times of one document and of all packs, for one shape."""
    on_gpu = args.device.type == "cuda"
    dtype, window = (torch.bfloat16, WINDOW) if on_gpu else (torch.float32, TINY_WINDOW)
    inputs = make_inputs(shape, window, args.device, dtype)
    packs = {ALONE: None} | {name: bounds(shape.s, parts) for name, parts in PACKS.items()}
    rows = [
        {"name": name, **or_skipped(functools.partial(_times, inputs, edges))}
        for name, edges in packs.items()
    ]
    for row in rows:
        if "skipped" not in row:
            row["of_one"] = row["total_ms"] / rows[0]["total_ms"]
    label = {"model": shape.model, "label": shape.label, "window": inputs.window}
    yield {**label, "dtype": str(dtype).removeprefix("torch."), "rows": rows}


def _times(inputs: AttentionInputs, edges: list[int] | None) -> dict[str, Any]:
    call = packed(inputs, edges)
    out = call.forward()
    call.backward(out)  # compiles
    device = out.device
    forward, backward = measure(call.forward, device), measure(_backward(call, out), device)
    times = {"forward_ms": forward._asdict(), "backward_ms": backward._asdict()}
    return {**times, "total_ms": forward.median + backward.median}


def slower(case: dict[str, Any]) -> bool:
    """Return whether a pack takes longer than one document; tiny shapes of a CPU do not count."""
    timed = [row for row in case["rows"] if "of_one" in row]
    return case["dtype"] == "bfloat16" and any(row["of_one"] > 1 for row in timed[1:])


def _backward(call: Call, out: Tensor) -> Any:
    return lambda: call.backward(out)


def bounds(length: int, parts: tuple[int, ...]) -> list[int]:
    """Return the starts of documents with these shares of 64 in a sequence, and its end."""
    return [0, *(length * end // 64 for end in accumulate(parts))]


def packed(inputs: AttentionInputs, edges: list[int] | None) -> Call:
    """Bind the training backend to these inputs, with documents between the edges."""
    p, device = inputs, inputs.query.device
    attend = dispatch.train_attention(dispatch.choose_train_attention("auto", device))
    cu_seqlens = None
    if edges is not None:
        cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)

    def forward() -> Tensor:
        return attend(p.query, p.key, p.value, p.log_keep(), p.window, p.scale, cu_seqlens)

    return Call(forward, [p.query, p.key, p.value, p.logits], p.d_out)


COLUMNS = (
    ("", field("name")),
    ("fwd ms", lambda row: spread(row["forward_ms"])),
    ("bwd ms", lambda row: spread(row["backward_ms"])),
    ("fwd+bwd ms", field("total_ms", ".3f")),
    ("/ one document", field("of_one", ".2f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return a table for each shape."""
    return "\n".join(
        f"\n### {case['model'] or 'tiny'}: {case['label']}, window {case['window']}\n\n"
        + table(COLUMNS, case["rows"])
        for case in record["cases"]
    )


BENCHMARK = Benchmark(
    record="packed_attention",
    cases=lambda args: SHAPES if args.device.type == "cuda" else TINY_SHAPES,
    measure=measure_shape,
    settings=lambda args: {"backend": dispatch.choose_train_attention("auto", args.device)},
    failed=slower,
    tables=tables,
    stored=(
        Table(
            "*/packed_attention.json",
            "docs/performance/attention.md",
            ("dms_train/kernels/train_attention",),
        ),
    ),
)
