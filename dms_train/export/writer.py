"""Writer of complete model directories for transformers, in one atomic step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.export.card import CARD_FILE, read_base, render
from dms_train.export.code_files import shipped_code, transformers_keys
from dms_train.export.tokenizer import NO_TOKENIZER, copy_tokenizer, has_tokenizer
from dms_train.hf import durable
from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.formats import AdapterBase, ExportedModel, ExportFormat, check_export, find_format
from dms_train.hf.formats.registry import DENSE, MARKER_FILE
from dms_train.hf.json_files import read_config, read_json, write_json
from dms_train.hf.selftest import SelfTest
from dms_train.hf.stored_tensors import to_stored
from dms_train.hf.tensor_values import dtype_name, is_finite
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.typed import typed
from dms_train.hf.weight_writer import WeightWriter
from dms_train.method.base import MethodSpec
from dms_train.method.spec import OPTIONS

# Marks a directory as written here, and therefore safe to replace.
_GENERATION = "generation_config.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")
# `to_hf_config` can only write transformers' defaults of these, and the model may differ.
_TRAINING_KEYS = ("initializer_range", "attention_dropout")
_DROPPED_KEYS = (
    "_name_or_path",
    "auto_map",
    *OPTIONS,
    "quantization_config",
    "compression_config",
    "quantization",
    "layer_types",  # `to_hf_config` writes those of models with windows
)


@dataclass(frozen=True, slots=True)
class _Described:
    """Everything about an export except its tensors.

    Attributes:
        architecture: The model.
        dtype: Dtype of the exported weights.
        provenance: JSON values that state where the weights come from.
        compressed: The model and its format; None for a dense model.
        selftest: Reference output, or None.
    """

    architecture: Architecture
    dtype: torch.dtype
    provenance: dict[str, Any]
    compressed: tuple[ExportedModel, ExportFormat] | None
    selftest: SelfTest | None

    def __post_init__(self) -> None:
        if self.compressed is None and self.selftest is not None:
            raise HFError("a dense export has no decisions to test: pass selftest=None")

    def config(self, source: Path | None) -> dict[str, Any]:
        """Return the complete config.json."""
        stated = _source_config(source)
        config = {
            **stated,
            **to_hf_config(self.architecture),
            **{key: stated[key] for key in _TRAINING_KEYS if key in stated},
            "dtype": dtype_name(self.dtype),
            "torch_dtype": dtype_name(self.dtype),
        }
        if self.compressed is not None:
            model, layout = self.compressed
            config |= layout.config_keys(model)
            if self.code_files():
                config |= transformers_keys(self.architecture.family, layout.method)
                if config["rope_scaling"] is None:
                    del config["rope_scaling"]  # transformers 5 warns of the key; our code adds it
        return config

    def code_files(self) -> dict[str, str]:
        """Return the code with which transformers loads the export: file name to source text."""
        if self.compressed is None or not self.compressed[1].ships_code:
            return {}
        return shipped_code(self.architecture.family, self.compressed[1].method)

    def write(self, directory: Path, source_dir: str | Path | None) -> None:
        """Write everything except the weights."""
        if self.selftest is not None:
            self.selftest.save(directory)
        source = None if source_dir is None else Path(source_dir)
        if source is not None:
            copy_tokenizer(source, directory)
            if (source / _GENERATION).is_file():
                shutil.copyfile(source / _GENERATION, directory / _GENERATION)
            special = _special_tokens(source)
            if special:
                _complete_generation(directory / _GENERATION, special)
        kind, record = DENSE, self.provenance
        if self.compressed is not None:
            model, layout = self.compressed
            kind, record = layout.name, model.record()
            for name, content in layout.json_files(model).items():
                write_json(directory / name, content)
        code = self.code_files()
        for name, text in code.items():
            (directory / name).write_text(text, encoding="utf-8")
        write_json(directory / MARKER_FILE, {"export_format": kind, "provenance": record})
        write_json(directory / "config.json", self.config(source))
        base = read_base(self.provenance.get("model"))
        card = render(self.architecture, base, self.compressed, self.provenance, code.keys())
        if not has_tokenizer(directory):
            card += "\nThis folder has no tokenizer: the model takes and returns token ids only.\n"
        (directory / CARD_FILE).write_text(card, encoding="utf-8")


@typed
def write_export(  # noqa: PLR0913 - all named
    out_dir: str | Path,
    *,
    architecture: Architecture,
    spec: MethodSpec | None,
    cr_factor: float | None,
    target_cr: float,
    dtype: torch.dtype,
    export_format: str,
    weights: Iterable[tuple[str, Tensor]] | Callable[[Path], None],
    source_dir: str | Path | None,
    selftest: SelfTest | None,
    block_size: int = 256,
    provenance: dict[str, Any],
    adapter_base: AdapterBase | None = None,
) -> list[str]:
    """Write a model directory; it appears complete or not at all.

    Args:
        out_dir: Directory of the export; it may exist only if this program wrote it.
        architecture: The model.
        spec: Specification of the training; None writes a plain dense model.
        cr_factor: Measured number of tokens seen per slot held, or None.
        target_cr: Compression ratio asked for in training.
        dtype: Dtype of the exported weights.
        export_format: Name of a format; unused for dense models.
        weights: (Hugging Face name, tensor) in any order, or a function that writes the files.
        source_dir: Directory that supplies tokenizer, generation config and other config keys.
        selftest: Reference output; only with a spec.
        block_size: Tokens per page of NVIDIA's paged cache.
        provenance: JSON values that state where the weights come from.
        adapter_base: See `ExportedModel`.

    Returns:
        Advice about the format, and about a missing tokenizer, one line each.

    Raises:
        ExportRefused: The consumer of the format would misread the weights.
        ValueError: A weight is missing, unknown, repeated or of the wrong shape.
        FileExistsError: `out_dir` exists and is not an export.
    """
    compressed, advice = None, []
    if spec is not None:
        model = ExportedModel(
            architecture=architecture,
            spec=spec,
            dtype=dtype_name(dtype),
            target_cr=target_cr,
            block_size=block_size,
            cr_factor=cr_factor,
            provenance=provenance,
            adapter_base=adapter_base,
        )
        compressed, advice = (model, find_format(export_format)), check_export(export_format, model)
    facts = _Described(architecture, dtype, provenance, compressed, selftest)
    with _published(Path(out_dir)) as directory:
        _write_weights(directory, weights, architecture, dtype)
        facts.write(directory, source_dir)
    return advice if has_tokenizer(Path(out_dir)) else [*advice, NO_TOKENIZER]


@typed
def partial_directory(out_dir: Path) -> Path:
    """Return the hidden sibling directory in which an export is written."""
    return out_dir.with_name(f".{out_dir.name}.partial")


@contextmanager
def _published(out_dir: Path) -> Iterator[Path]:
    """Yield the partial directory, renamed to `out_dir` when the block succeeds."""
    check_replaceable(out_dir)
    partial = partial_directory(out_dir)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        durable.sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = out_dir.with_name(f".{out_dir.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if out_dir.exists():
        os.replace(out_dir, replaced)
    durable.publish(partial, out_dir)
    shutil.rmtree(replaced, ignore_errors=True)


@typed
def check_replaceable(out_dir: Path) -> None:
    """Refuse a directory that was not written here; FileExistsError."""
    if not out_dir.exists() or (out_dir / MARKER_FILE).is_file():
        return
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        return
    raise FileExistsError(f"{out_dir}: exists and is not an export; choose another directory")


def _source_config(source: Path | None) -> dict[str, Any]:
    """Read the keys that an export takes over; from a tokenizer alone, its token ids."""
    if source is None:
        return {}
    if not (source / "config.json").is_file():
        return _special_tokens(source)
    return {
        key: value
        for key, value in read_config(source).items()
        if key not in _DROPPED_KEYS and not key.startswith(tuple(f"{name}_" for name in OPTIONS))
    }


def _special_tokens(source: Path) -> dict[str, int]:
    """Read the ids of special tokens from a directory with a tokenizer and no model."""
    path = source / "tokenizer_config.json"
    if (source / "config.json").is_file() or not path.is_file() or not has_tokenizer(source):
        return {}
    tokens = read_json(source / "tokenizer.json").get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in tokens}
    special_ids = {}
    for name, token in read_json(path).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name in _SPECIAL and text in ids:
            special_ids[f"{name}_id"] = ids[text]
    return special_ids


def _complete_generation(path: Path, special: dict[str, int]) -> None:
    """Add the ids that a copied generation config lacks; its own values stay."""
    stated = read_json(path) if path.is_file() else {}
    write_json(path, {**stated, **{k: v for k, v in special.items() if k not in stated}})


def _write_weights(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]] | Callable[[Path], None],
    architecture: Architecture,
    dtype: torch.dtype,
) -> None:
    """Write weight files; memory is bounded by one shard."""
    if callable(weights):
        weights(directory)
        return
    missing = expected_shapes(architecture)

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if architecture.tie_word_embeddings and name == "lm_head.weight":
                continue
            converted = tensor.to(dtype)
            check_weight(name, converted, missing.pop(name, None))
            yield name, converted

    with WeightWriter(directory) as writer:
        for name, tensor in to_stored(architecture, checked()):
            writer.add(name, tensor)
        require_all(missing.keys())


@typed
def check_weight(name: str, tensor: Tensor, shape: tuple[int, ...] | None) -> None:
    """Refuse a tensor of another shape than `shape` (None: unexpected) or with NaN; HFError."""
    if shape is None:
        raise HFError(f"tensor {name}: repeated, or not part of the architecture")
    if tuple(tensor.shape) != shape:
        raise HFError(f"tensor {name}: shape {tuple(tensor.shape)}, expected {shape}")
    if not is_finite(tensor):
        raise HFError(f"tensor {name}: holds NaN or infinite numbers; export an earlier checkpoint")


@typed
def require_all(missing: Collection[str]) -> None:
    """Refuse an export without some tensors; HFError."""
    if missing:
        raise HFError(f"{len(missing)} tensors are missing, first {min(missing)}")
