"""Loading of a model directory into a decoder on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture
from dms_train.hf.formats import read_spec
from dms_train.hf.json_files import read_config
from dms_train.hf.tensor_values import dtype_name, is_finite
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.decoder import Decoder
from dms_train.method.base import MethodSpec
from dms_train.observe.log import logger

# Merged weights, and the tensors of Hugging Face's files from which they are concatenated.
_MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_GATED = ("q_proj", "gate_proj", "k_proj", "v_proj")  # with an output gate
# Weights of linear attention, and their parts, which are joined for each key head.
_BY_KEY_HEAD = {"in_proj.weight": "qkvzba", "conv1d": "qkv"}
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DECISION_PROJECTION = "dms_proj_alpha"  # name part of weights in the decision projection of NVIDIA


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A decoder and the facts stated by its directory.

    Attributes:
        decoder: In evaluation mode, on its device.
        architecture: Sizes.
        spec: Method it was trained with; None for a dense model.
        dtype: Dtype of its weights.
        config: config.json.
    """

    decoder: Decoder
    architecture: Architecture
    spec: MethodSpec | None
    dtype: torch.dtype
    config: dict[str, Any]


def load_model(directory: Path, *, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load a directory of a known family, dense or in any export format.

    Args:
        directory: Holds config.json and safetensors.
        dtype: Compute dtype, or `auto` for the stored one.
        device: Device of the weights.

    Raises:
        FileNotFoundError: A file is absent.
        ValueError: The model is not supported, or weights and config.json disagree.
    """
    config = read_config(directory)
    architecture = read_architecture(directory)
    reader = WeightReader(directory)
    decision_projection = config.get("dms_separate_alpha") is True
    _check_decision_projection(directory, reader, decision_projection)
    spec = read_spec(directory, decision_projection=decision_projection)
    chosen = _dtype(config if dtype == "auto" else {"dtype": dtype})
    with torch.device("meta"):
        decoder = Decoder(architecture, spec, decision_projection=decision_projection)
    decision_projections = {
        f"model.{name}" for name in decoder.state_dict() if _DECISION_PROJECTION in name
    }
    leftovers = reader.require(architecture, decision_projections)
    if leftovers is not None:
        logger().warning(leftovers)
    _assign(decoder, reader, architecture, chosen, device)
    return LoadedModel(
        decoder=decoder.eval(),
        architecture=architecture,
        spec=spec,
        dtype=chosen,
        config=config,
    )


def _dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise InferenceError(f"dtype {name!r}: use one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_decision_projection(
    directory: Path, reader: WeightReader, decision_projection: bool
) -> None:
    """Fail if there are weights of a decision projection that config.json does not declare."""
    present = any(_DECISION_PROJECTION in name for name in reader.names())
    if present and not decision_projection:
        raise InferenceError(
            f"{directory}: has {_DECISION_PROJECTION} weights but config.json does not say "
            "dms_separate_alpha=true; correct config.json"
        )


def _stored_names(name: str, architecture: Architecture) -> list[str]:
    """Return the names of the stored tensors that form a weight of the decoder."""
    if name == "lm_head.weight":
        tied = architecture.tie_word_embeddings
        return ["model.embed_tokens.weight" if tied else "lm_head.weight"]
    if ".experts." in name:
        return list(_expert_names(name, architecture.num_experts))
    if ".linear_attn." in name:
        return _linear_names(name)
    for merged, projections in _MERGED.items():
        if f".{merged}." in name:
            gated = merged == "qkv_proj" and architecture.described.output_gate
            parts = _GATED if gated else projections
            return [f"model.{name.replace(merged, part)}" for part in parts]
    return [f"model.{name}"]


def _linear_names(name: str) -> list[str]:
    """Return the names of the stored tensors that form a weight of linear attention."""
    layer, _, weight = name.rpartition(".linear_attn.")
    at = f"model.{layer}.linear_attn"
    if weight in _BY_KEY_HEAD:
        module = weight.removesuffix(".weight")
        return [f"{at}.{module}_{part}.weight" for part in _BY_KEY_HEAD[weight]]
    return [f"{at}.norm.weight" if weight == "norm" else f"{at}.{weight}"]


def _expert_names(name: str, count: int) -> Iterator[str]:
    """Yield the stored tensors of a weight that stacks the experts of a layer."""
    layer, _, weight = name.partition(".experts.")
    kind = "bias" if weight.endswith("_bias") else "weight"
    weight = weight.replace("_bias", "_proj")
    for number in range(count):
        for projection in _MERGED.get(weight, (weight,)):
            yield f"model.{layer}.experts.{number}.{projection}.{kind}"


def _assign(
    decoder: Decoder,
    reader: WeightReader,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Read every weight of the decoder."""
    known = set(reader.names())
    weights = {}
    for name, weight in decoder.state_dict().items():
        sources = _stored_names(name, architecture)
        for stored in sources:
            if stored not in known:
                raise InferenceError(f"{reader.directory}: no tensor {stored}; copy it again")
        tensors = [_converted(reader, stored, dtype, device) for stored in sources]
        whole = _joined(name, tensors, architecture)
        weights[name] = whole.view(weight.shape)
        if architecture.described.centered_norms and name.endswith("norm.weight"):
            weights[name] = _gain(name, whole, architecture)
    if architecture.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    decoder.load_state_dict(weights, assign=True)
    decoder.requires_grad_(False)


def _joined(name: str, tensors: list[Tensor], architecture: Architecture) -> Tensor:
    """Join the stored tensors that form a weight."""
    if len(tensors) == 1:
        return tensors[0]
    if architecture.linear is None or ".linear_attn." not in name:
        return torch.cat(tensors)
    groups = architecture.linear.key_heads
    return torch.cat([x.unflatten(0, (groups, -1)) for x in tensors], 1).flatten(0, 1)


def _gain(name: str, weight: Tensor, a: Architecture) -> Tensor:
    """Return the factors 1 + weight of a norm, at least in float32.

    The caches divide scores by the root of the head size. The norm of the keys makes up for another
    softmax scale.
    """
    gain = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
    return gain * (a.softmax_scale * a.kv_channels**0.5) if "k_norm" in name else gain


def _converted(reader: WeightReader, name: str, dtype: torch.dtype, device: str) -> Tensor:
    """Read a stored tensor to the device in the compute dtype; the reader refuses NaN."""
    tensor = reader.get(name).to(device=device, dtype=dtype)
    if not is_finite(tensor):
        raise InferenceError(
            f"{reader.directory}: {name} has numbers beyond {dtype_name(dtype)}; use dtype=bfloat16"
        )
    return tensor
