"""safetensors files of a model directory: names, headers and writing.

Weights are safetensors only; nothing here unpickles.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dms_train.hf.errors import HFError
from dms_train.hf.json_files import read_json
from dms_train.hf.text_files import refuse_pointer
from dms_train.hf.typed import typed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@typed
def weight_files(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """List the weight files; with shards, also return the index's `weight_map`."""
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None
    if (directory / INDEX_FILE).is_file():
        mapping = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise HFError(f"{directory / INDEX_FILE}: no weight_map; copy the file again")
        for name, file in mapping.items():
            if not isinstance(file, str):
                raise HFError(
                    f"{directory / INDEX_FILE}: weight_map gives {file!r} for {name}, not a file "
                    "name; copy the file again"
                )
        return sorted(set(mapping.values())), mapping
    if any((directory / name).is_file() for name in _PICKLES):
        raise HFError(
            f"{directory}: has only pytorch_model.bin, which is not read (pickle runs code); "
            "convert it with transformers' save_pretrained(..., safe_serialization=True)"
        )
    raise FileNotFoundError(
        f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; copy the directory again"
    )


@typed
def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file and check that the file is complete.

    Returns:
        `{name: {"dtype", "shape", "data_offsets"}}`, without the `__metadata__` entry.

    Raises:
        FileNotFoundError: If the file is absent.
        ValueError: If its header is unreadable, or the length of the file differs from the header.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: weight file is missing; copy the directory again")
    size = path.stat().st_size
    with path.open("rb") as file:
        refuse_pointer(path, file.read(64))
        file.seek(0)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise HFError(f"{path}: truncated inside its header; copy the file again")
        try:
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((_checked_entry(entry) for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise HFError(
                f"{path}: not a safetensors file (unreadable header); copy the file again"
            ) from None
    expected = 8 + length + end
    if size != expected:
        raise HFError(f"{path}: {size} bytes, its header states {expected}; copy the file again")
    return header


def _checked_entry(entry: dict[str, Any]) -> int:
    """Return the end of a tensor's bytes; ValueError, TypeError or KeyError if malformed."""
    begin, end = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (begin, end, *entry["shape"])):
        raise ValueError("malformed entry")
    if not isinstance(entry["dtype"], str):
        raise TypeError("malformed dtype")
    return int(end)


@typed
def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file; HFError when that fails, for example on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata=dict(metadata))
        path.chmod(mode)  # safetensors makes files that only their owner can read
    except SafetensorError as error:
        raise HFError(
            f"{path}: cannot be written ({error}); free disk space and try again"
        ) from None
