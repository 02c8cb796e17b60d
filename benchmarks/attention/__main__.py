"""Time and accuracy of attention kernels: ours and their peers, measured in one run.

    python -m benchmarks.attention [--sections train,prefill,decode] [--output benchmarks/results]
    python -m benchmarks.attention --accuracy

Prints tables and writes `attention.json` (`accuracy.json`) into the folder of the device, with
versions, shapes, medians and the 20 % and 80 % quantiles. Peers that were measured on the same
device before (`recorded_peers.json`) must come out at most 5 % slower, or the run is marked as
invalid, because another process used the machine. Without a GPU all sizes are small.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import accuracy as attention_accuracy
from benchmarks.attention import train_cases
from benchmarks.records import RESULTS, origin
from benchmarks.timing import ceilings, device_name, versions
from dms_train.cli.errors import run_main

SECTIONS = ("train", "prefill", "decode")
RECORDED = Path(__file__).with_name("recorded_peers.json")
_SLACK = 0.05  # a peer this much slower than recorded makes a run invalid


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 1 for an invalid or inaccurate run, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", type=_sections, default=SECTIONS, help="default: all")
    parser.add_argument("--accuracy", action="store_true", help="errors instead of times")
    parser.add_argument("--cases", type=int, default=200, help="random shapes of --accuracy")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    return run_main(lambda: _accuracy(args) if args.accuracy else _speed(args))


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: choose from {', '.join(SECTIONS)}")
    return names


def _device(args: argparse.Namespace) -> torch.device:
    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _speed(args: argparse.Namespace) -> int:
    device = _device(args)
    record = _header(device) | {"ceilings": ceilings(device)}
    print(f"{record['device']}, {record['versions']}")
    print(_ceiling_line(record["ceilings"]))
    if "train" in args.sections:
        record["train"] = train_cases.measure(device)
        print("\n## train")
        print(train_cases.table(record["train"], record["ceilings"]["gemm_flops_per_s"]))
    record |= against_recorded(record, json.loads(RECORDED.read_text()))
    print("\n".join(_verdict(record)))
    _write(args.output, "attention.json", record)  # a later section may be interrupted
    for name in args.sections:
        if name != "train" and device.type == "cuda":
            record[name] = _other_section(name)
            _write(args.output, "attention.json", record)
    return 0 if record["valid"] is not False else 1


def _other_section(name: str) -> list[dict[str, Any]]:
    """Rows of `prefill_cases` or `decode_cases`; both need a GPU, and triton to be imported."""
    cases = importlib.import_module(f"benchmarks.attention.{name}_cases")
    rows: list[dict[str, Any]] = cases.measure()
    print(f"\n## {name}\n{cases.table(rows)}")
    return rows


def _accuracy(args: argparse.Namespace) -> int:
    device = _device(args)
    record = _header(device) | attention_accuracy.measure(device, args.cases)
    print(attention_accuracy.table(record))
    _write(args.output, "accuracy.json", record)
    return 0 if record["within"] else 1


def _header(device: torch.device) -> dict[str, Any]:
    words = re.sub(r"--output[ =]\S+", "", " ".join(sys.argv[1:])).split()
    command = " ".join(["python -m benchmarks.attention", *words])
    record = {"device": device_name(device), "versions": versions(device), "command": command}
    return record | origin()


def _ceiling_line(found: dict[str, float]) -> str:
    return (
        f"ceilings: copy {found['copy_bytes_per_s'] / 1e12:.3f} TB/s read + written, "
        f"{found['gemm_edge']:.0f}^3 bf16 GEMM {found['gemm_flops_per_s'] / 1e12:.1f} TFLOP/s"
    )


def against_recorded(record: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """Peers of a run beside their recorded medians.

    Returns:
        `recorded`: one entry for each peer and direction found in both; `valid`: None where
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


def _write(output: Path, name: str, record: dict[str, Any]) -> None:
    folder = output / re.sub(r"\W+", "_", record["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten: {folder / name}")


if __name__ == "__main__":
    sys.exit(main())
