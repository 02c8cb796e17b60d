"""Time of attention in training, prefill and decoding, compared with other kernels.

    python -m benchmarks attention [--sections train,prefill,decode]

The record `attention.json` has versions, shapes, medians and the 20 % and 80 % quantiles. Peers
that were measured on the same device before (`recorded_peers.json`) must come out at most 5 %
slower. Otherwise the run is marked as invalid, because another process used the machine. Without a
GPU all sizes are small, and only the section `train` runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attention import page, train_cases
from benchmarks.benchmark import Args, Benchmark, Page, add_fields, comma_separated, one_of
from benchmarks.records import Table
from benchmarks.timing import ceilings, device_name

SECTIONS = ("train", "prefill", "decode")
RECORDED = Path(__file__).with_name("recorded_peers.json")
_SLACK = 0.05  # a peer this much slower than recorded makes a run invalid


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    sections = comma_separated(one_of(SECTIONS))
    parser.add_argument("--sections", type=sections, default=SECTIONS, help="default: all")


def measure(section: str, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the rows of a section; prefill and decoding need a GPU."""
    if section == "train":
        record: dict[str, Any] = {"device": device_name(args.device)}
        record["train"] = train_cases.measure(args.device)
        yield record | against_recorded(record, json.loads(RECORDED.read_text()))
    elif args.device.type == "cuda":
        cases = importlib.import_module(f"benchmarks.attention.{section}_cases")
        yield {section: cases.measure()}


def tables(record: dict[str, Any]) -> str:
    """Return the tables of all sections, and a line about the speed of the peers."""
    return "\n".join(_lines(record))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield _ceiling_line(record["ceilings"])
    if "train" in record:
        yield "\n## train"
        yield train_cases.table(record["train"], record["ceilings"]["gemm_flops_per_s"])
    yield from _verdict(record)
    for name in SECTIONS[1:]:
        if name in record:  # these modules import triton
            cases = importlib.import_module(f"benchmarks.attention.{name}_cases")
            yield f"\n## {name}\n{cases.table(record[name])}"


def _ceiling_line(ceilings: dict[str, float]) -> str:
    return (
        f"ceilings: copy {ceilings['copy_bytes_per_s'] / 1e12:.3f} TB/s read + written, "
        f"{ceilings['gemm_edge']:.0f}^3 bf16 GEMM {ceilings['gemm_flops_per_s'] / 1e12:.1f} TFLOP/s"
    )


def against_recorded(record: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """Compare the peers of a run with their recorded medians.

    Returns:
        `recorded`: one entry for each peer and direction found in both. `valid`: None where
        nothing is recorded of this device, else whether no peer is more than 5 % slower.
    """
    if record["device"] != recorded["device"]:
        return {"recorded": [], "valid": None}
    compared = list(_compare(record.get("train", []), recorded["train"]))
    valid = all(entry["slower"] <= _SLACK for entry in compared) if compared else None
    return {"recorded": compared, "valid": valid}


def _compare(train: list[dict[str, Any]], recorded: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case in train:
        known = recorded.get(case["label"], {})
        for row in case["rows"]:
            if row["name"] not in known or "skipped" in row:
                continue
            for direction, before in zip(("forward", "backward"), known[row["name"]], strict=True):
                now = row[f"{direction}_ms"]["median"]
                yield {
                    "label": case["label"],
                    "peer": row["name"],
                    "direction": direction,
                    "recorded_ms": before,
                    "ms": now,
                    "slower": now / before - 1,
                }


def _verdict(record: dict[str, Any]) -> Iterator[str]:
    if record["valid"] is None:
        yield "\nno peer was recorded on this device: ratios hold within this run only"
        return
    slow = [entry for entry in record["recorded"] if entry["slower"] > _SLACK]
    worst = max(entry["slower"] for entry in record["recorded"])
    count = len(record["recorded"])
    verdict = "INVALID" if slow else "valid"
    yield f"\n{verdict}: of {count} recorded peer times the worst is {worst:+.1%}"
    for entry in slow:
        yield (
            f"  {entry['label']} {entry['peer']} {entry['direction']}: {entry['ms']:.3f} ms, "
            f"recorded {entry['recorded_ms']:.3f}"
        )


BENCHMARK = Benchmark(
    record="attention",
    options=options,
    cases=lambda args: args.sections,
    measure=measure,
    settings=lambda args: {"ceilings": ceilings(args.device), "recorded": [], "valid": None},
    store=add_fields,
    failed=lambda row: row.get("valid") is False,
    tables=tables,
    stored=(
        Table(
            "*/attention.json",
            "docs/performance/attention.md",
            (
                "dms_train/kernels/train_attention",
                "dms_train/kernels/prefill",
                "dms_train/kernels/decode",
            ),
        ),
    ),
    page=Page(page.PAGE, page.write),
)
