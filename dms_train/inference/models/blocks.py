"""Layers that the model families are made of, with the weight names of Hugging Face.

Shape letters: b sequences, n tokens, g KV heads, r query heads per KV head, d head size,
c hidden size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dms_train.hf.architecture import Architecture
from dms_train.inference.cache.interface import AttentionStep, KVCache
from dms_train.method.decisions import eviction_logits, hard_decisions
from dms_train.method.spec import DMSSpec


class AttentionInputs(NamedTuple):
    """What the layers of one forward pass share.

    Attributes:
        cache: Where keys and values go.
        rows: Cache rows of the sequences, int64 [b].
        position: int64 [b, n]; -1 for padding.
        cos: [b, n, 1, 1, d].
        sin: [b, n, 1, 1, d].
    """

    cache: KVCache
    rows: Tensor
    position: Tensor
    cos: Tensor
    sin: Tensor


def rotary_tables(a: Architecture, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE. position: int64 [b, n]. Both [b, n, 1, 1, d]."""
    even = torch.arange(0, a.kv_channels, 2, dtype=torch.int64, device=position.device)
    frequency = 1.0 / a.rotary_base ** (even.float() / a.kv_channels)
    rule = a.rope_scaling
    if rule is not None:
        turns = rule.original_max_position_embeddings * frequency / (2 * math.pi)
        share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        share = share.clamp(0, 1)
        frequency = frequency * (share + (1 - share) / rule.factor)
    angle = position.clamp(min=0)[..., None].float() * frequency
    angle = torch.cat([angle, angle], -1)[:, :, None, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, at least in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(a.hidden_size, a.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(a.hidden_size, a.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(a.ffn_hidden_size, a.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, c] to [b, n, c]."""
        update: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return update


class Attention(nn.Module):
    """Grouped-query attention that passes its eviction decisions to the cache.

    Args:
        a: The model.
        spec: What it was trained for; None for a dense model, which makes no decisions.
        layer: Layer number.
        adapter: Whether decisions come from a projection of their own instead of an eviction
            channel.
    """

    def __init__(self, a: Architecture, spec: DMSSpec | None, layer: int, adapter: bool) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        self.groups, self.size = a.num_query_groups, a.kv_channels
        queries, keys = a.num_attention_heads * self.size, self.groups * self.size
        bias = a.add_qkv_bias
        self.q_proj = nn.Linear(a.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(a.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(a.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, a.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.size, a.layernorm_epsilon) if a.qk_layernorm else nn.Identity()
        self.k_norm = RMSNorm(self.size, a.layernorm_epsilon) if a.qk_layernorm else nn.Identity()
        self.adapter = adapter
        if adapter:
            self.dms_proj_alpha = nn.Linear(a.hidden_size, self.groups, bias=bias)
            self.dms_proj_alpha_norm = RMSNorm(a.hidden_size, a.layernorm_epsilon)

    def _heads(self, states: Tensor) -> Tensor:
        """[b, n, g * r * d] to [b, n, g, r, d]."""
        return states.view(*states.shape[:2], self.groups, -1, self.size)

    def _adapter_decisions(self, residual: Tensor) -> Tensor:
        """Hard decisions of the adapter, bool [b, g, n], from the residual stream [b, n, c]."""
        assert self.spec is not None
        activation = self.dms_proj_alpha(self.dms_proj_alpha_norm(residual))
        return hard_decisions(eviction_logits(activation, self.spec)).transpose(1, 2)

    def forward(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: Normalised input [b, n, c].
            residual: The same before normalisation.
            inputs: Shared by the layers.

        Returns:
            Update [b, n, c] and slots read, int64 [b, g].
        """
        step = AttentionStep(
            query=self.q_norm(self._heads(self.q_proj(x))),
            key=self.k_norm(self._heads(self.k_proj(x))),
            value=self._heads(self.v_proj(x)),
            cos=inputs.cos,
            sin=inputs.sin,
            position=inputs.position,
            rows=inputs.rows,
            spec=None if self.adapter else self.spec,
            adapter=partial(self._adapter_decisions, residual) if self.adapter else None,
        )
        done = inputs.cache.step(self.layer, step)
        return self.o_proj(done.output.transpose(1, 2).flatten(2)), done.reads
