"""GGUF files as Hugging Face directories.

A file is dequantised once into a directory that every command reads. Quantised weights do not
become exact again: they keep the error of their quantisation.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dms_train.hf import durable
from dms_train.hf.json_files import read_config, read_json, write_json
from dms_train.hf.typed import typed

GGUF_RECORD = "gguf.json"
"""File of a converted directory: `file`, `sha256`, `tensor_types` and `dtype`."""
_MAGIC = b"GGUF"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_UNQUANTISED = ("F32", "F16", "BF16")
_CONVERSION = 3  # raised with every change of what a file is converted to
_SHARD_BYTES = 2 * 1024**3  # held in memory while a directory is written


@typed
def is_gguf(path: str | Path) -> bool:
    """Return whether a path is a GGUF file, or names one that does not exist."""
    path = Path(path).expanduser()
    if not path.is_file():
        return path.suffix == ".gguf" and not path.is_dir()
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@typed
def convert_gguf(
    path: Path,
    out: Path,
    *,
    dtype: str | None = None,
    front_matter: Mapping[str, str] | None = None,
) -> str:
    """Write a GGUF file as a Hugging Face directory; it appears complete or not at all.

    Args:
        path: The file.
        out: Directory to write; must not exist.
        dtype: `fp32`, which holds every dequantised value exactly, or `bf16`. None takes `bf16`,
            unless the file holds a matrix in 32 bits.
        front_matter: Keys of the model card, such as `license`, that the file does not state.

    Returns:
        One line that names the types of the tensors and the dtype that was written.

    Raises:
        FileExistsError: `out` exists.
        HFError: The file cannot be used; one line.
    """
    import torch

    from dms_train.hf.gguf_model import GgufModel
    from dms_train.hf.weight_writer import WeightWriter

    if out.exists():
        raise FileExistsError(17, "exists; choose another folder", str(out))
    model = GgufModel(path)
    name = _DTYPES[dtype or model.training_dtype]
    with _published(out) as folder:
        # first, because dequantising an unsupported model would take minutes
        model.tokenizer.write(folder)
        write_json(folder / "config.json", model.config(name))
        with WeightWriter(folder, _SHARD_BYTES) as writer:
            for tensor_name, tensor in model.weights():
                writer.add(tensor_name, tensor.to(getattr(torch, name)))
        record = {
            "file": path.name,
            "sha256": file_sha256(path),
            "tensor_types": model.tensor_types,
            "dtype": name,
        }
        write_json(folder / GGUF_RECORD, record)
        card = _card(model.metadata, record, front_matter or {})
        (folder / "README.md").write_text(card, encoding="utf-8")
    return f"{describe_types(record)}, written as {name}"


@typed
def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """Yield a hidden sibling folder, renamed to `out` when the block succeeds."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        durable.sync_tree(partial)
        durable.publish(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@typed
def cached_gguf(path: Path) -> Path:
    """Return the converted directory of a GGUF file, which is written at the first call.

    The directory is `dms-train/gguf` below the assets cache of huggingface_hub
    (`HF_ASSETS_CACHE`, by default `~/.cache/huggingface/assets`). Its dtype is the default of
    `convert_gguf`. Ranks that call this at the same time wait for one conversion.

    Raises:
        FileNotFoundError: There is no such file.
        HFError: The file cannot be used; one line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; correct the path")
    directory = _cache_folder(path)
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            types = convert_gguf(path, directory)
            logging.getLogger("dms_train").warning("%s: %s; see %s", path, types, directory)
    return directory


def _cache_folder(path: Path) -> Path:
    """Return the folder of a file; it depends on its path, size and time of change."""
    from huggingface_hub.constants import HF_ASSETS_CACHE

    path = path.resolve()
    facts = os.stat(path)
    key = f"{_CONVERSION}\0{path}\0{facts.st_size}\0{facts.st_mtime_ns}"
    short = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Path(HF_ASSETS_CACHE) / "dms-train" / "gguf" / f"{path.stem}-{short}"


@typed
def local_directory(path: str | Path) -> Path:
    """Return a path unchanged, or the converted directory if it is a GGUF file."""
    return cached_gguf(Path(path).expanduser()) if is_gguf(path) else Path(path)


@typed
def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return config.json of a GGUF file without converting it; errors as `GgufModel`."""
    if path.is_file() and _cache_folder(path).is_dir():
        return read_config(_cache_folder(path))
    from dms_train.hf.gguf_model import GgufModel

    model = GgufModel(path)
    return model.config(_DTYPES[model.training_dtype])


@typed
def read_gguf_record(directory: Path) -> dict[str, Any] | None:
    """Return what a converted directory records about its file; None for other directories."""
    path = directory / GGUF_RECORD
    return read_json(path) if path.is_file() else None


@typed
def describe_types(record: Mapping[str, Any]) -> str:
    """State in one phrase that weights were quantised, with the number of tensors of each type."""
    types = record["tensor_types"]
    counts = ", ".join(f"{count} {name}" for name, count in types.items())
    changed = any(name not in _UNQUANTISED for name in types)
    verb = "quantised weights, dequantised" if changed else "weights converted"
    return f"{verb} from GGUF ({counts} tensors)"


def _card(
    metadata: Mapping[str, Any], record: Mapping[str, Any], front_matter: Mapping[str, str]
) -> str:
    """Write the model card; exports inherit the licence in its front matter."""
    import yaml

    stated = {
        "license": metadata.get("general.license"),
        "license_name": metadata.get("general.license.name"),
        "license_link": metadata.get("general.license.link"),
        **front_matter,
    }
    front = {key: value for key, value in stated.items() if isinstance(value, str) and value}
    head = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" if front else ""
    title = metadata.get("general.name") or record["file"]
    return (
        f"{head}# {title}\n\n"
        f"Converted by dms-train from `{record['file']}` (SHA-256 `{record['sha256']}`) to "
        f"{record['dtype']}: {describe_types(record)}.\n\n"
        "Dequantised weights differ from the weights that were quantised, so results differ from "
        "published ones.\n"
    )
