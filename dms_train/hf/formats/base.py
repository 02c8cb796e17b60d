"""Description of an export format, and the functions that every format provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.values import Values
from dms_train.method.base import MethodSpec
from dms_train.method.spec import NewerSpecError, spec_from_dict


class ExportRefused(ValueError):
    """Refusal of an export whose consumer would silently compute something else."""


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """Base model of an adapter.

    Attributes:
        name: Absolute path of a directory or GGUF file, or a hub id.
        revision: Hub revision; None for the default one.
        dtype: Dtype to which the training rounded its weights, by torch's name.
    """

    name: str
    revision: str | None = None
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Description of an exported model, without its tensors.

    Attributes:
        architecture: The model.
        spec: Specification of the training.
        dtype: Dtype of the exported weights by torch's name, such as `bfloat16`.
        target_cr: Compression ratio asked for in training, at least 1.
        block_size: Tokens per page of NVIDIA's paged cache.
        cr_factor: Measured number of tokens seen per slot held, or None.
        provenance: JSON values that state where the weights come from.
        adapter_base: Base model, if adapters of it are all that was trained; otherwise None.
    """

    architecture: Architecture
    spec: MethodSpec
    dtype: str
    target_cr: float
    block_size: int
    cr_factor: float | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    adapter_base: AdapterBase | None = None

    def record(self) -> dict[str, Any]:
        """Return the origin of the weights and how far they were compressed."""
        return {**self.provenance, "cr_factor": self.cr_factor, "target_cr": self.target_cr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Statements of a model directory about its training.

    Attributes:
        spec: The specification.
        target_cr: Compression ratio asked for in training; 1 without a statement.
        cr_factor: Measured number of tokens seen per slot held, or None.
    """

    spec: MethodSpec
    target_cr: float
    cr_factor: float | None


def no_advice(model: ExportedModel) -> list[str]:
    """Give no advice."""
    return []


def no_problem(model: ExportedModel) -> None:
    """Accept every specification."""


def no_files(model: ExportedModel) -> dict[str, dict[str, Any]]:
    """Add no files."""
    return {}


def read_block(directory: Path, config: dict[str, Any], key: str) -> Stated | None:
    """Read the block `key` of config.json, None without it; HFError if it is damaged."""
    if key not in config:
        return None
    block = Values(f"{directory}: config.json", config).block(key)
    spec = block.block("spec").values
    if not spec:
        raise HFError(f"{directory}: config.json has a `{key}` key without a spec; export it again")
    return Stated(
        spec=read_spec_values(directory, dict(spec)),
        target_cr=block.positive("target_cr", 1.0),
        cr_factor=block.positive_or_none("cr_factor"),
    )


def read_spec_values(directory: Path, values: dict[str, Any]) -> MethodSpec:
    """Read a stored specification; HFError naming the directory if it cannot be used."""
    try:
        return spec_from_dict(values)
    except NewerSpecError as error:
        raise HFError(f"{directory}: {error}") from None
    except (TypeError, ValueError) as error:
        raise HFError(f"{directory}: {error}; export it again") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportFormat:
    """Layout of an export, and the limits of the program that reads it.

    Attributes:
        name: Name in `stage.export.format`, and of the module.
        consumer: Program that reads the format, as messages name it.
        method: Name of the only method that the format supports.
        preset: Preset of the method whose exports have this format unless another is configured;
            None for a format that is only chosen by name.
        dtype: The only accepted dtype of weights, by torch's name; None accepts any.
        config_keys: Function that returns the keys to set in config.json.
        read: Function that reads what a directory in this format states; None for another format.
            Arguments: the directory; its config.json; whether the caller supports a decision
            projection, whose spec has no meaningful channel. It raises HFError if the values are
            incomplete, contradictory or of a variant that is not supported.
        problem: Function that returns the first reason why the consumer would misread the
            weights, or None.
        advice: Function that returns remarks about an acceptable export, one line each.
        json_files: Function that returns further JSON files by name.
        ships_code: Whether exports hold the method's code for transformers.
    """

    name: str
    consumer: str
    preset: str | None
    config_keys: Callable[[ExportedModel], dict[str, Any]]
    read: Callable[[Path, dict[str, Any], bool], Stated | None]
    method: str = "dms"
    dtype: str | None = None
    ships_code: bool = True
    problem: Callable[[ExportedModel], str | None] = no_problem
    advice: Callable[[ExportedModel], list[str]] = no_advice
    json_files: Callable[[ExportedModel], dict[str, dict[str, Any]]] = no_files
