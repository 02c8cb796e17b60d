"""Layers of OLMo 3, which newer versions of vLLM run as code of transformers only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer


class Olmo3Attention(LlamaAttention):
    """Attention that normalises queries and keys over all heads together."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_norm = RMSNorm(self.total_num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.total_num_kv_heads * self.head_dim, config.rms_norm_eps)

    def _init_rotary_emb(self, *args: Any, **kwargs: Any) -> None:
        """Build no RoPE, which the kernels apply."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the update of the residual stream, before its norm."""
        sizes = [self.q_size, self.kv_size, self.kv_size]
        query, key, value = self.qkv_proj(hidden_states)[0].split(sizes, -1)
        query, key = _of_all_ranks(self.q_norm, query), _of_all_ranks(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        update: Tensor = self.o_proj(self.attn(query, key, value))[0]
        return update


def _of_all_ranks(norm: RMSNorm, x: Tensor) -> Tensor:
    """Normalise the heads of this rank together with those of the other ranks."""
    group = get_tp_group()
    whole: Tensor = norm(group.all_gather(x.contiguous(), -1))
    return whole.chunk(group.world_size, -1)[group.rank_in_group]


class Olmo3Layer(LlamaDecoderLayer):
    """Layer that normalises the updates of the residual stream, and not its inputs."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=Olmo3Attention)
        self.post_feedforward_layernorm = self.input_layernorm
        del self.input_layernorm

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the last update and the residual stream before it, as Llama's layers do."""
        residual = hidden_states if residual is None else hidden_states + residual
        residual = residual + self.post_attention_layernorm(self.self_attn(positions, residual))
        return self.post_feedforward_layernorm(self.mlp(residual)), residual
