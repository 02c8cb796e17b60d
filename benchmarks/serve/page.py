"""Write the measurements of all devices into docs/performance/serving.md.

    python -m benchmarks.serve.page

Reads `serve.json` and `online.json` of every device; the text between the markers of the page is
replaced. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT, measured_at, write_page
from benchmarks.serve import online
from benchmarks.serve.latency import known_gpu, latency_table, summary
from benchmarks.serve.tables import tables
from dms_train.cli.errors import run_main

PAGE = ROOT / "docs" / "performance" / "serving.md"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folders of devices")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)
    return run_main(lambda: _write(args.results, args.page))


def _write(results: Path, page: Path) -> None:
    for name, text in parts(results).items():
        write_page(page, text, name)


def parts(results: Path) -> dict[str, str]:
    """Return the texts between the markers, by the name of the markers."""
    served, streamed = records(results, "serve.json"), records(results, "online.json")
    return {
        "results": "\n\n".join("\n".join(_served(record)) for record in served),
        "latency": "\n\n".join("\n".join(_predicted(record)) for record in served),
        "online": "\n\n".join("\n".join(_streamed(record)) for record in streamed),
    }


def records(results: Path, name: str) -> list[dict[str, Any]]:
    """Records of this name of all GPUs: those that name their commits first, then the newest."""
    found = [json.loads(file.read_text()) for file in results.glob(f"*/{name}")]
    on_gpus = [record for record in found if not record["device"].startswith("CPU")]
    return sorted(
        on_gpus, key=lambda record: (_names_commits(record), newest(record)), reverse=True
    )


def _names_commits(record: dict[str, Any]) -> bool:
    entries = (record, *(record.get("cases") or record.get("rows") or []))
    return any("commit" in each and "commit_from" not in each for each in entries)


def newest(record: dict[str, Any]) -> str:
    """Date of a record or of its newest row."""
    rows = record.get("cases") or record.get("rows") or []
    return max(str(each.get("date", "")) for each in (record, *rows))


def _device(record: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"Device: {record['device']}; {found}."


def _served(record: dict[str, Any]) -> Iterator[str]:
    yield f"### {record['device']}\n"
    yield _device(record) + "\n"
    yield tables(record)


def _predicted(record: dict[str, Any]) -> Iterator[str]:
    gpu = known_gpu(record["device"])
    yield f"{record['device']}:\n"
    yield latency_table(record["cases"], gpu)
    yield ""
    yield from (f"- {line}" for line in summary(record["cases"], gpu))


def _streamed(record: dict[str, Any]) -> Iterator[str]:
    yield f"{_device(record)} {record['seconds']:g} seconds of arrivals at each rate. "
    yield f"Measured at: {measured_at(record)}.\n"
    yield online.tables(record)


if __name__ == "__main__":
    raise SystemExit(main())
