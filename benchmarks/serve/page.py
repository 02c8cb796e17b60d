"""Page of measured serving.

    python -m benchmarks page serve

Reads `serve.json`, `online.json` and `vllm_plugin.json` of every GPU. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, measured_at, stored_records, write_page
from benchmarks.serve import online, vllm_plugin
from benchmarks.serve.latency import known_gpu, latency_table, summary
from benchmarks.serve.tables import tables

PAGE = ROOT / "docs" / "performance" / "serving.md"


def write(results: Path, page: Path) -> None:
    """Write the records of all GPUs between the markers of a page."""
    for name, text in parts(results).items():
        write_page(page, text, name)


def parts(results: Path) -> dict[str, str]:
    """Return the texts between the markers, by the name of the markers."""
    served, streamed, plugged = (
        stored_records(results, f"{name}.json") for name in ("serve", "online", "vllm_plugin")
    )
    return {
        "results": "\n\n".join("\n".join(_served(record)) for record in served),
        "latency": "\n\n".join("\n".join(_predicted(record)) for record in served),
        "online": "\n\n".join("\n".join(_streamed(record)) for record in streamed),
        "vllm_plugin": "\n\n".join(f"{_device(r)}\n\n{vllm_plugin.tables(r)}" for r in plugged)
        or "No GPU has been measured yet.",
    }


def _device(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"Device: {record['device']}; {versions}."


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
