"""Description of a model, checkpoint or run folder from its metadata; no weights are read."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

from dms_train.hf.directory import read_architecture
from dms_train.hf.formats import Stated, read_provenance, read_stated
from dms_train.hf.formats.registry import MARKER_FILE
from dms_train.hf.gguf_directory import is_gguf, read_gguf_record
from dms_train.hf.gguf_model import GgufModel
from dms_train.hf.json_files import read_json
from dms_train.hf.selftest import REFERENCE
from dms_train.hf.typed import typed
from dms_train.hf.weight_reader import WeightReader

RUN_STATE = "run_state.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_EXPORT_PARTS = ("hf", "megatron")
_RUN_FOLDERS = ("checkpoints", "weights", "exports")
_RUN_PARTS = ("config.yaml", "metrics.jsonl", *_RUN_FOLDERS)


def tokenizer_hash(directory: Path) -> str | None:
    """Return SHA-256 (16 hex digits) over the vocabulary files, None without any."""
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def describe_model(directory: Path) -> dict[str, Any]:
    """Describe a Hugging Face directory; ValueError or FileNotFoundError if it is broken."""
    reader = WeightReader(directory)
    names = reader.names()
    export = read_stated(directory)
    architecture = read_architecture(directory)
    leftovers = reader.require(architecture)
    facts: dict[str, Any] = {
        "kind": f"Hugging Face {'dense model' if export is None else _export_of(export[1])}",
        "family": architecture.family,
        "parameters": sum(math.prod(reader.shape(name)) for name in names),
        "tensors": len(names),
        "dtype": dict(Counter(reader.dtype(name) for name in names)),
        "tokenizer_sha256": tokenizer_hash(directory),
    }
    if leftovers is not None:
        facts["warning"] = leftovers
    converted = read_gguf_record(directory)
    if converted is not None:
        facts["gguf"] = converted
    if export is not None:
        facts["format"], stated = export
        facts["cr_factor"], facts["target_cr"] = stated.cr_factor, stated.target_cr
        facts["spec"] = stated.spec.to_dict()
        facts["selftest"] = (directory / REFERENCE).is_file()
    if (directory / MARKER_FILE).is_file():
        facts["provenance"] = read_provenance(directory)
    return facts


def describe_gguf(path: Path) -> dict[str, Any]:
    """Describe a GGUF file; HFError or FileNotFoundError if it is broken or not supported."""
    model = GgufModel(path)
    return {
        "kind": "GGUF file",
        "family": model.architecture.family,
        "parameters": model.parameters,
        "tensors": sum(model.tensor_types.values()),
        "tensor_types": model.tensor_types,
    }


def _export_of(stated: Stated) -> str:
    return f"{stated.spec.label} export"


def describe_checkpoint(directory: Path) -> dict[str, Any]:
    """Describe a Megatron checkpoint folder: its run state and the size of its shards."""
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    state = read_json(directory / RUN_STATE)
    return {"kind": "Megatron checkpoint", "bytes": size, "run_state": state}


def describe_run(directory: Path) -> dict[str, Any]:
    """Describe a run folder: checkpoints, weights of stages, exports, number of metric lines."""
    facts: dict[str, Any] = {"kind": "run folder"}
    facts["config"] = (directory / "config.yaml").is_file()
    for part in _RUN_FOLDERS:
        folder = directory / part
        facts[part] = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    metrics = directory / "metrics.jsonl"
    facts["metrics_lines"] = 0
    if metrics.is_file():
        with metrics.open("rb") as lines:
            facts["metrics_lines"] = sum(1 for _ in lines)
    return facts


def describe_pair(directory: Path) -> dict[str, Any]:
    """Describe one export of a run: the same model for transformers and for Megatron."""
    present = [part for part in _EXPORT_PARTS if (directory / part).is_dir()]
    return {"kind": "export folder"} | {part: describe(directory / part) for part in present}


@typed
def describe(path: Path) -> dict[str, Any]:
    """Describe a folder or a GGUF file.

    Returns:
        Plain JSON values; `kind` is always present.

    Raises:
        FileNotFoundError: If it is absent.
        ValueError: If it is damaged or none of the known kinds.
    """
    if is_gguf(path):
        return describe_gguf(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: neither a directory nor a GGUF file; correct the path")
    if (path / RUN_STATE).is_file():
        return describe_checkpoint(path)
    if (path / "config.json").is_file():
        return describe_model(path)
    if any((path / part).exists() for part in _RUN_PARTS):
        return describe_run(path)
    if any((path / part).is_dir() for part in _EXPORT_PARTS):
        return describe_pair(path)
    raise ValueError(
        f"{path}: neither a model (config.json), a checkpoint ({RUN_STATE}) nor a run folder "
        f"({', '.join(_RUN_PARTS)})"
    )
