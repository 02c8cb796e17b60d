"""Training attention of packed documents beside that of one document of the same length.

    python -m benchmarks.packed_attention [--output benchmarks/results]

Prints a table and writes `packed_attention.json` into the folder of the device. The exit code is 1
when a pack of documents takes longer than the one document. Without a GPU all sizes are small.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.shapes import AttentionInputs, Call, Shape, make_inputs
from benchmarks.records import RESULTS, origin
from benchmarks.timing import Timing, device_name, measure, versions
from dms_train.cli.errors import run_main
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


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 1 when packing costs time, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    record = {
        "device": device_name(device),
        "versions": versions(device),
        "command": "python -m benchmarks.packed_attention",
        **origin(),
        "backend": dispatch.choose_train_attention("auto", device),
    }
    print(f"{record['device']}, {record['versions']}, {record['backend']}")
    shapes, window = (SHAPES, WINDOW) if on_gpu else (TINY_SHAPES, TINY_WINDOW)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cases = [_case(make_inputs(shape, window, device, dtype), shape) for shape in shapes]
    print("\n".join(_table(cases)))
    folder = args.output / re.sub(r"\W+", "_", device_name(device).lower())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "packed_attention.json"
    file.write_text(json.dumps(record | {"cases": cases}, indent=1) + "\n")
    print(f"\nwritten: {file}")
    slower = any(row["of_one"] > 1 for case in cases for row in case["rows"][1:])
    return 1 if slower and on_gpu else 0


def _case(inputs: AttentionInputs, shape: Shape) -> dict[str, Any]:
    packs = {ALONE: None} | {name: bounds(shape.s, parts) for name, parts in PACKS.items()}
    rows: list[dict[str, Any]] = []
    for name, edges in packs.items():
        call = packed(inputs, edges)
        out = call.forward()
        call.backward(out)  # compiles
        device = inputs.query.device
        forward = measure(call.forward, device)
        backward = measure(_backward(call, out), device)
        total = forward.median + backward.median
        alone = rows[0]["total_ms"] if rows else total
        times = {"forward_ms": forward._asdict(), "backward_ms": backward._asdict()}
        rows.append({"name": name, **times, "total_ms": total, "of_one": total / alone})
    label = {"model": shape.model, "label": shape.label, "window": inputs.window}
    return {**label, "dtype": str(inputs.query.dtype).removeprefix("torch."), "rows": rows}


def _backward(call: Call, out: Tensor) -> Any:
    return lambda: call.backward(out)


def bounds(length: int, parts: tuple[int, ...]) -> list[int]:
    """Where documents with these shares of 64 start in a sequence, and its end."""
    return [0, *(length * end // 64 for end in accumulate(parts))]


def packed(inputs: AttentionInputs, edges: list[int] | None) -> Call:
    """The backend of a training on these inputs, with documents between the edges."""
    p, device = inputs, inputs.query.device
    attend = dispatch.train_attention(dispatch.choose_train_attention("auto", device))
    cu_seqlens = None
    if edges is not None:
        cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)

    def forward() -> Tensor:
        return attend(p.query, p.key, p.value, p.log_keep(), p.window, p.scale, cu_seqlens)

    return Call(forward, [p.query, p.key, p.value, p.logits], p.d_out)


def _table(cases: list[dict[str, Any]]) -> Iterator[str]:
    for case in cases:
        yield f"\n### {case['model'] or 'tiny'}: {case['label']}, window {case['window']}\n"
        yield "| | fwd ms | bwd ms | fwd+bwd ms | / one document |"
        yield "|---|---|---|---|---|"
        for row in case["rows"]:
            spread = [_spread(Timing(**row[f"{name}_ms"])) for name in ("forward", "backward")]
            total, ratio = f"{row['total_ms']:.3f}", f"{row['of_one']:.2f}"
            yield f"| {' | '.join([row['name'], *spread, total, ratio])} |"


def _spread(times: Timing) -> str:
    return f"{times.median:.3f} [{times.low:.3f}, {times.high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
