"""Layers of the model families.

Shape letters: t tokens of a pass, b sequences, n tokens of a sequence, g KV heads, r query heads
per KV head, d head size, c hidden size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dms_train.hf.architecture import Architecture
from dms_train.hf.rope import Rope, RopeScaling
from dms_train.hf.yarn import yarn_frequencies
from dms_train.inference.cache.interface import AttentionStep, KVCache
from dms_train.inference.models.batch import MicroBatch
from dms_train.kernels import dispatch
from dms_train.method.base import MethodSpec
from dms_train.method.decisions import eviction_logits, hard_decisions


class Angles(NamedTuple):
    """RoPE of the tokens of a micro-batch.

    Attributes:
        cos: Cosines, [b, n, 1, 1, d].
        sin: Sines, [b, n, 1, 1, d].
        table: `rotation_table` of both.
    """

    cos: Tensor
    sin: Tensor
    table: Tensor


class AttentionInputs(NamedTuple):
    """Inputs that all layers of a forward pass share.

    Attributes:
        cache: KV cache.
        micro_batches: Sequences of the pass.
        angles: Rotation of each micro-batch, by the RoPE of a layer.
    """

    cache: KVCache
    micro_batches: list[MicroBatch]
    angles: dict[Rope, list[Angles]]


def rotary_frequencies(a: Architecture, rope: Rope, device: torch.device) -> Tensor:
    """Return the frequencies of RoPE in radians per position.

    Args:
        a: The model.
        rope: RoPE of a layer; the frequencies are zero without a base.
        device: Device of the result.

    Returns:
        float32 [d / 2]; zero for channels that RoPE does not rotate.
    """
    if rope.base is None:
        return torch.zeros(a.kv_channels // 2, device=device)
    frequency = _rotated_frequencies(a.rotary_channels, rope.base, rope.scaling, device)
    return F.pad(frequency, (0, a.kv_channels // 2 - len(frequency)))


def _rotated_frequencies(
    channels: int, base: float, rule: RopeScaling | None, device: torch.device
) -> Tensor:
    even = torch.arange(0, channels, 2, dtype=torch.int64, device=device)
    frequency = 1.0 / base ** (even.float() / channels)
    if rule is None:
        return frequency
    if rule.rope_type == "linear":
        return frequency / rule.factor
    if rule.rope_type == "yarn":
        return yarn_frequencies(frequency, base, rule)
    turns = rule.original_max_position_embeddings * frequency / (2 * math.pi)
    share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    share = share.clamp(0, 1)
    return frequency * (share + (1 - share) / rule.factor)


def layer_frequencies(a: Architecture, device: torch.device) -> Tensor:
    """Return the RoPE frequencies of the layers of a cache, [layers, d / 2]; 0 without RoPE."""
    ropes = [a.ropes[layer] for layer in a.cache_layers]
    return torch.stack([rotary_frequencies(a, rope, device) for rope in ropes])


def rotary_tables(
    a: Architecture, position: Tensor, dtype: torch.dtype, rope: Rope
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of RoPE, [t, 1, 1, d] each, for int64 positions [t].

    Args:
        a: The model.
        position: Positions.
        dtype: Dtype of the tables.
        rope: RoPE of a layer; the angles are zero without a base.
    """
    angle = position[:, None].float() * rotary_frequencies(a, rope, position.device)
    angle = torch.cat([angle, angle], -1)[:, None, None]
    factor = rope.attention_factor
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, at least in float32.

    A weight of a wider dtype than the input multiplies before the result is rounded.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        same = self.weight.dtype == x.dtype
        if x.is_cuda and same:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        if x.is_cuda and dispatch.is_supported(x.device):
            return dispatch.triton_kernels().add_norm(x, None, self.weight, self.epsilon)[1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype) if same else (self.weight * wide).to(x.dtype)

    def added(self, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream plus an update, and its norm, [t, size] each."""
        if residual.is_cuda and dispatch.is_supported(residual.device):
            kernels = dispatch.triton_kernels()
            return kernels.add_norm(residual, update, self.weight, self.epsilon)
        residual = residual + update
        return residual, self(residual)


class NoNorm(nn.Identity):
    """Takes the place of a norm in layers that do not normalise their inputs."""

    def added(self, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream plus an update twice, [t, size] each."""
        residual = residual + update
        return residual, residual


def swiglu(x: Tensor) -> Tensor:
    """Return silu(x[:, :f]) * x[:, f:] for x [t, 2 f]."""
    if x.is_cuda and dispatch.is_supported(x.device):
        return dispatch.triton_kernels().swiglu(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """Return gelu(x[:, :f]) * x[:, f:] for x [t, 2 f], with the tanh approximation."""
    if x.is_cuda and dispatch.is_supported(x.device):
        return dispatch.triton_kernels().geglu(x)
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class MLP(nn.Module):
    """Gated MLP.

    Args:
        a: The model.
        width: Inner width; None for that of the model's MLPs.
    """

    def __init__(self, a: Architecture, width: int | None = None) -> None:
        super().__init__()
        width = width or a.ffn_hidden_size
        self.gate = swiglu if a.described.activation == "silu" else geglu
        self.gate_up_proj = nn.Linear(a.hidden_size, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, a.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update [t, c] of x [t, c]."""
        update: Tensor = self.down_proj(self.gate(self.gate_up_proj(x)))
        return update


class Attention(nn.Module):
    """Grouped-query attention that passes its eviction decisions to the cache.

    Args:
        a: The model.
        spec: Method it was trained with; None for a dense model, which makes no decisions.
        layer: Layer number.
        decision_projection: Whether decisions come from a projection of their own instead of an
            eviction channel.
    """

    def __init__(
        self, a: Architecture, spec: MethodSpec | None, layer: int, decision_projection: bool
    ) -> None:
        super().__init__()
        self.layer = a.cache_layers.index(layer)
        own = a.attention_layers[layer]
        self.rope = a.ropes[layer]
        self.spec = spec if own.window is None else None
        self.groups, self.size = a.num_query_groups, a.kv_channels
        queries, keys = a.num_attention_heads * self.size, self.groups * self.size
        bias = a.add_qkv_bias
        self._widths = (queries, keys, keys)
        self._gate = queries if a.described.output_gate else 0
        self.qkv_proj = nn.Linear(a.hidden_size, sum(self._widths) + self._gate, bias=bias)
        self.o_proj = nn.Linear(queries, a.hidden_size, bias=a.described.linear_bias)
        self.sinks: nn.Parameter | None = None
        if a.described.sinks:
            self.sinks = nn.Parameter(torch.empty(a.num_attention_heads))
        self.q_norm, self.k_norm = self._head_norms(a)
        self.decision_projection = decision_projection and own.window is None
        if self.decision_projection:
            self.dms_proj_alpha = nn.Linear(a.hidden_size, self.groups, bias=bias)
            self.dms_proj_alpha_norm = RMSNorm(a.hidden_size, a.layernorm_epsilon)

    def _head_norms(self, a: Architecture) -> tuple[nn.Module, nn.Module]:
        """Make the norms of queries and keys."""
        if not a.qk_layernorm:
            return nn.Identity(), nn.Identity()
        widths = self._widths[:2] if a.described.joint_qk_norm else (self.size, self.size)
        query, key = (RMSNorm(width, a.layernorm_epsilon) for width in widths)
        return query, key

    def _heads(self, states: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Convert [t, g * r * d] to [t, g, r, d], and normalise."""
        if isinstance(norm, RMSNorm):  # over a head, or over all heads
            states = norm(states.unflatten(-1, (-1, norm.weight.numel())))
        return states.view(len(states), self.groups, -1, self.size)

    def _projected_decisions(self, residual: Tensor) -> Tensor:
        """Return the decisions for the residual stream [b, n, c], bool [b, g, n]."""
        assert self.spec is not None
        activation = self.dms_proj_alpha(self.dms_proj_alpha_norm(residual))
        return hard_decisions(eviction_logits(activation, self.spec)).transpose(1, 2)

    def forward(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: Normalised input [t, c].
            residual: Input before normalisation.
            inputs: Shared by the layers.

        Returns:
            Update [t, c] and slots read, int64 [sequences, g].
        """
        widths = (self._widths[0], self._gate, *self._widths[1:])
        query, gate, key, value = self.qkv_proj(x).split(widths, -1)
        query, key = self._heads(query, self.q_norm), self._heads(key, self.k_norm)
        outputs, reads = [], []
        pairs = zip(inputs.micro_batches, inputs.angles[self.rope], strict=True)
        for index, (batch, angles) in enumerate(pairs):
            decision_projection = None
            if self.decision_projection:
                decision_projection = partial(self._projected_decisions, batch.take(residual))
            step = AttentionStep(
                query=batch.take(query),
                key=batch.take(key),
                value=batch.take(self._heads(value)),
                cos=angles.cos,
                sin=angles.sin,
                position=batch.position,
                rows=batch.rows,
                spec=None if self.decision_projection else self.spec,
                decision_projection=decision_projection,
                lengths=batch.lengths,
                begins=batch.begins,
                table=angles.table,
                micro_batch=index,
                sinks=self.sinks,
            )
            attended = inputs.cache.step(self.layer, step)
            outputs.append(batch.flatten(attended.output.transpose(1, 2).flatten(2)))
            reads.append(attended.reads)
        attended_heads = _joined(outputs)
        if self._gate:
            attended_heads = attended_heads * gate.sigmoid()
        return self.o_proj(attended_heads), _joined(reads)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
