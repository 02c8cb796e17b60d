"""Reader of a model in a GGUF file of llama.cpp, on top of the `gguf` package.

Metadata is read without torch, so that a login node can plan a run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dms_train.families import FAMILIES, LayerAttention, ModelFamily
from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.gguf_tokenizer import GgufTokenizer
from dms_train.hf.rope import RopeScaling
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.typed import typed
from dms_train.hf.values import Values

if TYPE_CHECKING:
    from torch import Tensor

# Family of an architecture of llama.cpp.
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3_text"}
# llama.cpp rotates neighbouring channels in files of these architectures and stores the rows of the
# query and key projections in that order. Transformers rotates the two halves of a head.
_PERMUTED = ("llama",)
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_TENSORS = {
    **_LAYER_TENSORS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Metadata of an architecture that is read, or that does not change the model.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "tensor_data_layout",
    "vocab_size",
}
_WINDOW_KEYS = {"attention.sliding_window", "rope.freq_base_swa"}
_SCALING_KEYS = {"rope.scaling.type", "rope.scaling.factor"}
_GEMMA3_27B = 62  # layers; llama.cpp scales queries of this model by hidden size / heads


class GgufModel:
    """Model in a GGUF file.

    Raises:
        FileNotFoundError: There is no such file.
        HFError: The file is damaged or of an unsupported architecture; one line.
        ModuleNotFoundError: The package `gguf` is not installed.
    """

    @typed
    def __init__(self, path: Path) -> None:
        import gguf

        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; correct the path")
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in self._reader.fields.items()
            }
        except Exception as error:  # a damaged file surfaces as many kinds of error
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise HFError(f"{path}: cannot be read as GGUF ({why}); copy the file again") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._values = Values(str(path), self.metadata)
        self._check_kind()

    def _check_kind(self) -> None:
        name = self.metadata.get("general.architecture")
        if name not in _FAMILIES:
            fix = f"use a file of one of {', '.join(_FAMILIES)}"
            raise self._values.refusal("general.architecture", name, fix)
        if self.metadata.get("split.count", 1) > 1:
            fix = "join the parts with llama-gguf-split --merge"
            raise self._values.refusal("split.count", self.metadata["split.count"], fix)
        known = _KNOWN_KEYS if name != "gemma3" else _KNOWN_KEYS | _WINDOW_KEYS | _SCALING_KEYS
        for key, value in self.metadata.items():
            own = key.removeprefix(f"{name}.")
            plain = own == "rope.scaling.type" and value == "none"
            if own != key and own not in known and not plain and value not in (0, None):
                fix = "use a model without this option"
                raise self._values.refusal(key, value, fix)

    def _key(self, name: str) -> str:
        return f"{self.metadata['general.architecture']}.{name}"

    def _whole(self, name: str, default: int | None = None) -> int:
        return self._values.whole(self._key(name), default)

    def _number(self, name: str, default: float | None = None) -> float:
        """Return the shortest decimal that is the same float32: 1e-05, not 9.9999997e-06."""
        return float(str(np.float32(self._values.positive(self._key(name), default))))

    @cached_property
    def architecture(self) -> Architecture:
        """The model, from metadata and the shapes of tensors."""
        hidden, heads = self._whole("embedding_length"), self._whole("attention.head_count")
        head_size = self._whole("attention.key_length", max(hidden // heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._whole(key, head_size) != head_size:
                fix = f"use a model with {head_size} for it, the size of a head"
                raise self._values.refusal(self._key(key), self._whole(key), fix)
        base = self._number("rope.freq_base", 10000.0)
        return Architecture(
            family=self._family.name,
            num_layers=self._whole("block_count"),
            hidden_size=hidden,
            ffn_hidden_size=self._whole("feed_forward_length"),
            num_attention_heads=heads,
            num_query_groups=self._whole("attention.head_count_kv", heads),
            kv_channels=head_size,
            vocab_size=self._shape(self._tensor("token_embd.weight"))[0],
            max_position_embeddings=self._whole("context_length"),
            rotary_base=base,
            layernorm_epsilon=self._number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=self._is_tied(),
            rope_scaling=self._rope_scaling(head_size),
            layers=self._layers(base),
            query_scalar=self._query_scalar(hidden // heads),
        )

    @property
    def _family(self) -> ModelFamily:
        return FAMILIES[_FAMILIES[self.metadata["general.architecture"]]]

    def _query_scalar(self, share: int) -> int | None:
        """Return the share of a head in the hidden size for the model that scales queries by it."""
        is_27b = self._family.has_query_scalar and self._whole("block_count") == _GEMMA3_27B
        return share if is_27b else None

    def _layers(self, base: float) -> tuple[LayerAttention, ...]:
        """Return the layers of an architecture with windows, which llama.cpp knows by its name."""
        keys = self._family.layers
        if keys is None or not keys.has_local_base:
            return ()
        stated = {
            "num_hidden_layers": self._whole("block_count"),
            "sliding_window": self._whole("attention.sliding_window"),
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10000.0),
        }
        return keys.read(stated, base)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise HFError(f"{self.path}: no tensor {name}; copy the file again")
        return self._tensors[name]

    @staticmethod
    def _shape(tensor: Any) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(tensor.shape))

    def _is_tied(self) -> bool:
        """Return whether there is no output layer, or it is a copy of the embedding."""
        if "output.weight" not in self._tensors:
            return True
        head, embedding = self._tensors["output.weight"], self._tensor("token_embd.weight")
        same_type = head.tensor_type == embedding.tensor_type
        return same_type and np.array_equal(head.data, embedding.data)

    def _rope_scaling(self, head_size: int) -> RopeScaling | None:
        """Read linear scaling, or find the rule of Llama 3 whose factors the file stores."""
        kind = self.metadata.get(self._key("rope.scaling.type"), "none")
        if kind == "linear":
            return RopeScaling(factor=self._number("rope.scaling.factor"), rope_type=kind)
        if kind != "none":
            raise self._values.refusal(self._key("rope.scaling.type"), kind, "use another model")
        if _ROPE_FACTORS not in self._tensors:
            return None
        stored = self._dequantised(_ROPE_FACTORS)
        rule = RopeScaling(factor=float(stored.max()))
        base = self._number("rope.freq_base", 10000.0)
        expected = _llama3_factors(rule, base, head_size)
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-5):
            raise HFError(
                f"{self.path}: {_ROPE_FACTORS} is not the RoPE scaling of Llama 3.1 to 3.3; use a "
                "model with that scaling or none"
            )
        return rule

    def _dequantised(self, name: str) -> np.ndarray:
        """Return a tensor in float32; HFError if `gguf` cannot dequantise its type."""
        from gguf.quants import dequantize

        tensor = self._tensor(name)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise HFError(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which the installed "
                "gguf does not dequantise; use a file of another type"
            ) from None
        return values.astype(np.float32, copy=False)

    def config(self, dtype: str) -> dict[str, Any]:
        """Return config.json for weights of type `dtype`."""
        names = {"dtype": dtype, "torch_dtype": dtype}
        return {**to_hf_config(self.architecture), **self.tokenizer.ids, **names}

    @cached_property
    def tokenizer(self) -> GgufTokenizer:
        """The tokenizer in the file."""
        return GgufTokenizer(self._values, self._whole("context_length"))

    @property
    def training_dtype(self) -> str:
        """Dtype to convert to: `fp32` if a matrix is stored in 32 bits or more, else `bf16`."""
        matrices = [t for t in self._reader.tensors if len(t.shape) > 1]
        wide = any(t.tensor_type.name in ("F32", "F64") for t in matrices)
        return "fp32" if wide else "bf16"

    @property
    def tensor_types(self) -> dict[str, int]:
        """Number of tensors of each type, the most frequent first."""
        counts = Counter(tensor.tensor_type.name for tensor in self._reader.tensors)
        return dict(counts.most_common())

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without a second copy of a tied embedding."""
        return sum(math.prod(shape) for shape in expected_shapes(self.architecture).values())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, float32 tensor) in file order.

        Raises:
            HFError: A tensor is missing, unknown, of another shape or type, or not finite.
        """
        import torch

        from dms_train.hf.tensor_values import is_finite

        sources = self._sources()
        for name, shape in expected_shapes(self.architecture).items():
            stored = sources.pop(name, None)
            if stored is None:
                raise HFError(f"{self.path}: no tensor for {name}; copy the file again")
            values = self._dequantised(stored)
            if self._family.centered_norms and name.endswith("norm.weight"):
                values = values - 1  # llama.cpp stores the factors
            if values.shape != shape:
                raise HFError(
                    f"{self.path}: {stored} has shape {values.shape}, its metadata states {shape}; "
                    "copy the file again"
                )
            tensor = torch.from_numpy(self._in_hf_order(name, values))
            if not is_finite(tensor):
                raise HFError(
                    f"{self.path}: {stored} holds NaN or infinite numbers; use another file"
                )
            yield name, tensor

    def _sources(self) -> dict[str, str]:
        """Map names of Hugging Face to the names in the file."""
        modules = _SANDWICH_TENSORS if self._family.sandwich_norms else _LAYER_TENSORS
        names = (name for name in self._tensors if name != _ROPE_FACTORS)
        sources = {_hf_name(name, modules): name for name in names}
        if self.architecture.tie_word_embeddings:
            sources.pop("lm_head.weight", None)
        known = expected_shapes(self.architecture)
        unknown = [stored for name, stored in sources.items() if name not in known]
        if unknown:
            raise HFError(
                f"{self.path}: {len(unknown)} tensors are not part of a "
                f"{self.architecture.family} model, first {unknown[0]}; use another file"
            )
        return sources

    def _in_hf_order(self, name: str, values: np.ndarray) -> np.ndarray:
        heads = {
            "q_proj": self.architecture.num_attention_heads,
            "k_proj": self.architecture.num_query_groups,
        }.get(name.split(".")[-2])
        if heads is None or self.metadata["general.architecture"] not in _PERMUTED:
            return np.array(values)  # a copy: the file is mapped read-only
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hf_name(name: str, modules: Mapping[str, str]) -> str:
    """Return the name in Hugging Face, or `name` itself if there is none.

    Args:
        name: Name in the file.
        modules: Module of a layer by its name in the file.
    """
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _MODEL_TENSORS.get(name, name)
    module = modules.get(match[2])
    return name if module is None else f"model.layers.{match[1]}.{module}.{match[3]}"


def _llama3_factors(rule: RopeScaling, base: float, head_size: int) -> np.ndarray:
    """Return by how much Llama 3's rule divides each frequency: [head size / 2], float64."""
    exponents = np.arange(0, head_size, 2) / head_size
    turns = rule.original_max_position_embeddings / (2 * math.pi * base**exponents)
    low, high = rule.low_freq_factor, rule.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / (kept + (1 - kept) / rule.factor)
