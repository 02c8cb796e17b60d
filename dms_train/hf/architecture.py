"""What a decoder looks like, in Megatron's words, and its Hugging Face config.json form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling rule (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A Llama-like decoder.

    Attributes:
        family: `llama`, `qwen2` (bias on q, k, v) or `qwen3` (q_norm and k_norm).
        kv_channels: Head size d.
        num_query_groups: KV heads.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    layernorm_epsilon: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None

    @property
    def add_qkv_bias(self) -> bool:
        """Whether the q, k and v projections have a bias."""
        return self.family == "qwen2"

    @property
    def qk_layernorm(self) -> bool:
        """Whether q and k are normalised per head before RoPE."""
        return self.family == "qwen3"


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Read a config.json mapping; raises ValueError naming the key that is not supported."""
    raise NotImplementedError


def to_hf_config(architecture: Architecture) -> dict[str, Any]:
    """The config.json mapping of a model trained from scratch."""
    raise NotImplementedError
