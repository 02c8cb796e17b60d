"""Loading of an adapter in PEFT's format: its base model, with the changes merged in float32.

PEFT itself is not needed. It can apply the same files to a base model of the class that this export
ships; see the documentation of the export.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

__all__ = ["AdapterLoading"]

# in a folder of their own: transformers itself would follow an adapter beside config.json
_CONFIG, _WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_Mixed: Any = object  # a mixin precedes a class of transformers, whose type is not known here


class AdapterLoading(_Mixed):
    """Mixin for the model class of a family: `from_pretrained` takes the folder of an adapter."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, or the base model of an adapter with its changes.

        The base model is read and changed in float32, and rounded to `dtype` afterwards.

        Raises:
            ValueError: The base model has other weights than that of the training.
        """
        hub = {key: kwargs[key] for key in _HUB if key in kwargs}
        file = cached_file(path, _CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
        if file is None:
            return super().from_pretrained(path, *args, **kwargs)
        with open(file, encoding="utf-8") as stream:
            adapter = json.load(stream)
        config = kwargs.pop("config", None) or cls.config_class.from_pretrained(path, **hub)
        dtype = _dtype(kwargs.pop("torch_dtype", None), kwargs.pop("dtype", None), config.dtype)
        revision = adapter.get("revision")  # of the base model; `revision` is that of the adapter
        kwargs = {**kwargs, "revision": revision or "main", "config": config}
        base = adapter["base_model_name_or_path"]
        loaded = super().from_pretrained(base, *args, dtype=torch.float32, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _merge(model, cached_file(path, _WEIGHTS, **hub), adapter["lora_alpha"] / adapter["r"])
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        return loaded


def _dtype(*stated: Any) -> torch.dtype:
    """Return the first dtype that is stated, by torch's name or as it is."""
    for value in stated:
        if value not in (None, "auto"):
            return getattr(torch, value) if isinstance(value, str) else value
    return torch.float32


@torch.no_grad()
def _merge(model: Any, file: str, scale: float) -> None:
    """Change the weights of a model in float32."""
    with safe_open(file, framework="pt", device="cpu") as stored:
        names, metadata = set(stored.keys()), stored.metadata()
        trained = getattr(torch, metadata["trained_dtype"])  # the training rounded the base model
        if _replaced_rows(model, trained) != metadata["base_rows_sha256"]:
            raise ValueError(
                f"{file}: its base model has other weights than that of the training; correct "
                "base_model_name_or_path in adapter_config.json"
            )

        def read(name: str, like: Tensor) -> Tensor:
            return stored.get_tensor(name).to(device=like.device, dtype=torch.float32)

        for name, parameter in model.named_parameters():
            projection = f"base_model.model.{name.rpartition('.')[0]}"
            down, up = (f"{projection}.lora_{part}.weight" for part in "AB")
            bias = f"{projection}.base_layer.bias"
            if name.endswith(".weight") and down in names:
                change = scale * (read(up, parameter) @ read(down, parameter))
                parameter.copy_(parameter.to(trained).float() + change)
            elif name.endswith(".bias") and bias in names:
                parameter.copy_(read(bias, parameter))


def _replaced_rows(model: Any, trained: torch.dtype) -> str:
    """Hash the rows of the base model that produce the eviction channels."""
    digest = hashlib.sha256()
    for layer in model._dms_layers():
        attention = layer.self_attn
        size, weight = attention.head_dim, attention.q_proj.weight
        rows = torch.arange(0, len(weight), size * attention.num_key_value_groups)
        rows = rows + attention.dms.numbers.channel % size
        frozen = weight[rows.to(weight.device)].to(trained).float()
        digest.update(frozen.cpu().numpy().tobytes())
    return digest.hexdigest()
