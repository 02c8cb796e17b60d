"""The operators around vLLM's kernel for experts, which it has for GPUs only, in torch.

The kernel itself is written in Triton and runs in the interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register_operators() -> None:
    """Let the operators run on the CPU; vLLM's libraries are loaded."""
    experts = torch.library.Library("_moe_C", "IMPL", "CPU")
    experts.impl("topk_softmax", _topk_softmax)
    experts.impl("moe_align_block_size", _align)
    experts.impl("moe_sum", _sum)
    activations = torch.library.Library("_C", "IMPL", "CPU")
    activations.impl("silu_and_mul", _silu_and_mul)
    activations.impl("swigluoai_and_mul", _clamped_gate)
    _LIBRARIES.extend([experts, activations])


_LIBRARIES: list[Any] = []  # an operator ends with its library


def _topk_softmax(
    weights: Tensor,
    indices: Tensor,
    positions: Tensor,
    logits: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    *_: Any,
) -> None:
    assert bias is None
    values, chosen = logits.softmax(-1).topk(weights.shape[-1], dim=-1)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    indices.copy_(chosen)


def _align(
    chosen: Tensor,
    experts: int,
    block: int,
    order: Tensor,
    expert_of_block: Tensor,
    padded: Tensor,
    expert_map: Tensor | None,
    *_: Any,
) -> None:
    """Sort tokens by expert; each expert begins a block, and is filled up with an invalid token."""
    assert expert_map is None
    flat, end = chosen.flatten(), 0
    order.fill_(len(flat))
    for expert in range(experts):
        tokens = (flat == expert).nonzero()[:, 0]
        blocks = -(-len(tokens) // block)
        order[end : end + len(tokens)] = tokens
        expert_of_block[end // block : end // block + blocks] = expert
        end += blocks * block
    padded.fill_(end)
    expert_of_block[end // block :] = 0


def _sum(updates: Tensor, output: Tensor, *_: Any) -> None:
    torch.sum(updates, 1, out=output)


def _silu_and_mul(output: Tensor, gate_and_up: Tensor) -> None:
    gate, up = gate_and_up.chunk(2, -1)
    output.copy_(torch.nn.functional.silu(gate) * up)


def _clamped_gate(
    output: Tensor, gate_and_up: Tensor, alpha: float = 1.702, limit: float = 7.0
) -> None:
    gate = gate_and_up[..., ::2].clamp(max=limit)
    up = gate_and_up[..., 1::2].clamp(-limit, limit)
    output.copy_((up + 1) * gate * torch.sigmoid(gate * alpha))
