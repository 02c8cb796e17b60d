"""Adapters in PEFT's format: low-rank changes of frozen projections, beside their base model.

An export in format `peft` has every file of an export except the weights, which are those of the
base model plus `scale * B A`. PEFT's files are in its folder `adapter`. The rows of the eviction
channels are replaced by trained rows. They have ranks of their own: a row of A holds the difference
to the base model, the column of B selects the row. B of the trained ranks is 0 there, so that the
sum is the trained row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.formats.base import AdapterBase
from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.side_files import ADAPTER_CONFIG
from dms_train.hf.values import Values

ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"
# Keys of the weight file's metadata.
_ROWS_HASH = "base_rows_sha256"  # of the rows of the base model that are replaced
_TRAINED = "trained_dtype"  # dtype of the frozen weights in training, by torch's name
_PREFIX = "base_model.model."
_DOWN, _UP, _BIAS = "lora_A.weight", "lora_B.weight", "base_layer.bias"


def peft_names(projection: str) -> tuple[str, str, str]:
    """Return PEFT's names of A, B and the replaced bias of a projection.

    Args:
        projection: Its name, such as `model.layers.0.self_attn.q_proj`.
    """
    down, up, bias = (f"{_PREFIX}{projection}.{part}" for part in (_DOWN, _UP, _BIAS))
    return down, up, bias


def adapter_config(
    base: AdapterBase, tensors: Mapping[str, Tensor], scale: float
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        base: The base model.
        tensors: Tensors by PEFT's names. The rank of a projection is the same in every layer.
        scale: Factor of B A, the same for every projection.
    """
    ranks = {
        name.removesuffix(f".{_DOWN}").rpartition(".")[2]: tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(_DOWN)
    }
    rank = min(ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": ranks,
        "alpha_pattern": {name: scale * own for name, own in ranks.items()},
        "target_modules": sorted(ranks),
        "bias": "lora_only" if any(name.endswith(_BIAS) for name in tensors) else "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def replaced_rows(a: Architecture, channel: int) -> list[int]:
    """Return the rows of a layer's q projection that produce the eviction channels."""
    heads = range(0, a.num_attention_heads, a.num_attention_heads // a.num_query_groups)
    return [head * a.kv_channels + channel % a.kv_channels for head in heads]


def adapter_metadata(base_rows: Iterable[Tensor], dtype: str) -> dict[str, str]:
    """Return the metadata of the weight file, by which a wrong base model is recognised.

    Args:
        base_rows: Frozen `replaced_rows` of each layer with decisions, [rows, hidden size].
        dtype: Dtype of the frozen weights in training, by torch's name.
    """
    return {"format": "pt", _ROWS_HASH: _rows_hash(base_rows), _TRAINED: dtype}


def _rows_hash(rows: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in rows:
        digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Adapter:
    """Adapter of an export in format `peft`, which is read whole.

    Attributes:
        directory: The export.
        base: Its base model.
        dtype: Dtype of merged weights.

    Raises:
        FileNotFoundError: The weight file is absent.
        HFError: A file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ADAPTER_CONFIG
        values = Values(str(path), read_json(path))
        base = values.values.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise HFError(f"{path}: base_model_name_or_path={base!r}; name the base model")
        revision = values.values.get("revision")
        if not isinstance(revision, str | None):
            raise values.refusal("revision", revision, "state a string or null")
        self.directory, self.base = directory, AdapterBase(base, revision)
        self._scale = values.positive("lora_alpha") / values.whole("r")
        self._tensors, metadata = _read(directory / ADAPTER_WEIGHTS)
        self._rows_hash = metadata.get(_ROWS_HASH)
        self.dtype = _dtype(read_config(directory).get("dtype"))
        self._trained = _dtype(metadata.get(_TRAINED))

    def require_base(self, base_rows: Iterable[Tensor]) -> None:
        """Refuse another base model than that of the training; HFError.

        Args:
            base_rows: `replaced_rows` of each layer with decisions, [rows, hidden size].
        """
        if _rows_hash(rows.to(self._trained) for rows in base_rows) != self._rows_hash:
            raise HFError(
                f"{self.directory / ADAPTER_CONFIG}: {self.base.name} has other weights than the "
                "base model of the training; correct base_model_name_or_path"
            )

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes a tensor of the base model."""
        projection, _, kind = name.rpartition(".")
        down, _, bias = peft_names(projection)
        return (bias if kind == "bias" else down) in self._tensors

    def merge(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that `changes` names with its change, computed in float32."""
        projection, _, kind = name.rpartition(".")
        down, up, bias = peft_names(projection)
        if kind == "bias":
            return self._tensors[bias].to(self.dtype)
        # rounded first, because the training rounded the base model to its own precision
        frozen = tensor.to(self._trained).float()
        product = self._tensors[up].float() @ self._tensors[down].float()
        return (frozen + self._scale * product).to(self.dtype)


def _dtype(name: str | None) -> torch.dtype:
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of the weight file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path}: weight file is missing; copy the directory again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise HFError(f"{path}: cannot be read ({error}); copy the file again") from None
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise HFError(f"{path}: holds NaN or infinite numbers; use a sound copy")
    return tensors, metadata
