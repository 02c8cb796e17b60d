"""Speed tables of README.md from stored records.

    python -m benchmarks summary

Takes the newest record of each kind. The text between the markers of the page is replaced. Nothing
is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, newest, stored_records, write_page
from benchmarks.serve.tables import COLUMNS, best, by_case, ratio
from benchmarks.train_step.shapes import Case
from dms_train.tables import markdown_table

PAGE = ROOT / "README.md"
_MODEL = "Llama 3.1 8B"
_SERVING = "docs/performance/serving.md"
_CONTEXT, _LONG, _SEQUENCES = 8192, 32768, (1, 8, 32)
_ENGINE_GIVES, _DMS_GIVES = ("dense", "vLLM, bf16"), ("DMS", "dense")
Record = dict[str, Any]


def write(results: Path, page: Path) -> None:
    """Write both tables between the markers of a page."""
    write_page(page, text(results), "speed")


def text(results: Path) -> str:
    """Return two tables: serving, and comparisons with one peer."""
    engine, dms = "engine: dense / vLLM, bf16", "DMS: DMS / dense"
    served = stored_records(results, "serve.json")
    shapes = sorted({row["shape"] for record in served for row in record["cases"]})
    rows = [cells for shape in shapes for cells in _served(shape, _newest_of(served, shape))]
    serving = markdown_table(["serving", *COLUMNS, engine, dms, "CR", "measured on"], rows)
    head = ["training and attention", "peer", "ours, dense", "ours with DMS", "measured on"]
    attention = _attention(stored_records(results, "attention.json"))
    training = _training(stored_records(results, "train_step.json"))
    return f"{serving}\n\n{markdown_table(head, [*attention, *training])}"


def _newest_of(served: list[Record], shape: str) -> Record:
    """Return the first record that has rows of a shape, reduced to these rows."""
    mine = (
        {**record, "cases": [row for row in record["cases"] if row["shape"] == shape]}
        for record in served
    )
    return next(record for record in mine if record["cases"])


def _served(shape: str, record: Record) -> Iterator[list[str]]:
    cases = by_case(record["cases"])
    where = f"{record['device']}, {newest(record)}: [serving]({_SERVING})"
    short = [cases.get((shape, _CONTEXT, count), []) for count in _SEQUENCES]
    counts = ", ".join(map(str, _SEQUENCES[:-1])) + f" and {_SEQUENCES[-1]}"
    name = f"{shape}, ms of a decode step, {counts} sequences of {_CONTEXT:,} tokens"
    yield [name, *_cells(short, "step_ms"), where]
    long = [cases.get((shape, _LONG, 1), [])]
    name = f"{shape}, tokens/s of a prompt of {_LONG:,} tokens"
    yield [name, *_cells(long, "prefill_tok_s"), where]


def _cells(cases: list[list[Record]], value: str) -> Iterator[str]:
    """Yield the cells of all columns, of both ratios and of CR, with one number for each case."""
    for column in COLUMNS:
        values = [best(rows, column, value).get(value) for rows in cases]
        shown = [f"{x:.2f}" if isinstance(x, float) else f"{x:,}" for x in values if x is not None]
        yield ", ".join(shown) if len(shown) == len(values) else "not measured"
    for over, under in (_ENGINE_GIVES, _DMS_GIVES):
        yield ", ".join(ratio(rows, over, under, value) or "-" for rows in cases)
    yield ", ".join(ratio(rows, "dense", "DMS", "live") or "-" for rows in cases)


def _attention(records: list[Record]) -> Iterator[list[str]]:
    """Yield training attention, and the prefill that evicts most, of one layer of an 8B model."""
    for record in records[:1]:
        where = f"{record['device']}, {newest(record)}: [attention](docs/performance/attention.md)"
        case = next(c for c in record["train"] if c["shape"]["model"] == _MODEL)
        ms = {row["name"]: row.get("total_ms") for row in case["rows"]}
        flex = min(value for name, value in ms.items() if name.startswith("flex DMS"))
        cudnn, ours = ms["cuDNN causal"], ms["ours: triton"]
        yield [
            f"attention of {_MODEL}, {_CONTEXT:,} tokens, forward and backward",
            f"{flex:.2f} ms (FlexAttention with DMS)",
            f"{cudnn:.2f} ms (cuDNN)",
            f"{ours:.2f} ms",
            where,
        ]
        prompts = [row for row in record["prefill"] if row.get("label") == f"{_MODEL}, {_LONG}"]
        row = max(prompts, key=lambda row: float(row["ratio"]))
        title = f"prefill attention of {_MODEL}, {_LONG:,} tokens, CR {row['ratio']:g}"
        dense, ours = (f"{row[name]['median']:.2f} ms" for name in ("cudnn_ms", "ms"))
        yield [title, "", f"{dense} (cuDNN)", ours, where]


def _training(records: list[Record]) -> Iterator[list[str]]:
    """Yield the step of Qwen2.5 1.5B on one GPU, with the faster layers of each.

    It is that of the GPU where the peer was measured last.
    """
    for record in sorted(records, key=_newest_peer)[-1:]:
        rows = [r for r in record["rows"] if "failed" not in r and _one_gpu(r["case"])]
        peer, dense, dms = (
            min((r for r in rows if (r["case"]["subject"], r["case"]["kind"]) == wanted), key=_step)
            for wanted in (("peer", "distill"), ("ours", "distill"), ("ours", "dms"))
        )
        cells = [f"{1e3 * _step(row):.1f} ms" for row in (peer, dense, dms)]
        page = "[training step](docs/performance/training_step.md)"
        yield [
            "distillation step of Qwen2.5 1.5B, 8,192 tokens",
            f"{cells[0]} (megatron-core)",
            *cells[1:],
            f"{record['device']}, {dms['date']}: {page}",
        ]


def _newest_peer(record: Record) -> str:
    return max((r["date"] for r in record["rows"] if r["case"]["subject"] == "peer"), default="")


def _step(row: Record) -> float:
    return float(row["step_s"])


def _one_gpu(case: Record) -> bool:
    """Return whether all weights of the shape train on one GPU."""
    known = Case.from_dict(case)
    return (known.shape, known.layout.world, known.trains) == ("qwen2.5-1.5b", 1, "all")
