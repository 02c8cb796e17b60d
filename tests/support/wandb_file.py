"""Reads what Weights & Biases wrote into a run folder, without its server.

A `.wandb` file is a 7-byte header and then a LevelDB log: blocks of 32 KiB holding records, each
a checksum, a length and a kind (whole, first, middle, last part). A record is a protobuf message
whose classes ship with wandb.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7
_WHOLE, _FIRST, _LAST = 1, 2, 4
_PATIENCE_SECONDS = 30.0


@dataclass
class WandbFile:
    run_id: str = ""
    name: str = ""
    project: str = ""
    entity: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    ended: bool = False


def find(run_dir: Path) -> list[Path]:
    """The files of all segments, oldest first."""
    return sorted(run_dir.glob("wandb/*run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns)


def read(path: Path) -> WandbFile:
    """The file of a finished run; its writer may still be busy when `finish` has returned."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = _read(path)
        if found.ended or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _read(path: Path) -> WandbFile:
    from wandb.proto.wandb_internal_pb2 import Record

    result = WandbFile()
    for payload in _payloads(path.read_bytes()):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            result.run_id, result.name = record.run.run_id, record.run.display_name
            result.project, result.entity = record.run.project, record.run.entity
            result.config |= _values(record.run.config.update)
        elif kind == "history":
            result.rows.append(_values(record.history.item))
        elif kind == "summary":
            result.summary |= _values(record.summary.update)
        elif kind == "exit":
            result.ended = True
        elif kind == "metric":
            metric = record.metric
            result.step_metrics[metric.name or metric.glob_name] = metric.step_metric
    return result


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _payloads(data: bytes) -> Iterator[bytes]:
    if not data.startswith(b":W&B"):
        return
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0 or at + _HEADER + size > len(data):
            return
        body = data[at + _HEADER : at + _HEADER + size]
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind in (_WHOLE, _LAST):
            yield parts
        at += _HEADER + size
