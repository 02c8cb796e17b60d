"""Mixture of experts.

Shape letters: t tokens, e experts of a layer, k experts of a token, f width of an expert, c hidden
size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dms_train.hf.architecture import Architecture
from dms_train.inference.models.blocks import MLP, swiglu
from dms_train.kernels.layers.clamped_gate import clamped_swiglu

_GROUPED_GPUS = (9, 10)  # major compute capabilities for which torch has a kernel


def can_group(x: Tensor) -> bool:
    """Return whether `F.grouped_mm` computes products of this dtype and device in one kernel.

    Elsewhere it reads the sizes of the groups on the host, which a CUDA graph cannot do. On a CPU
    that costs nothing.
    """
    if not x.is_cuda:
        return x.dtype != torch.float64
    major, _ = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.bfloat16 and major in _GROUPED_GPUS


class Experts(nn.Module):
    """Gated experts of one layer; their weights are stacked, [e, 2 f, c] and [e, c, f].

    Their biases, if any, are [e, 2 f] and [e, c].
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        assert a.experts is not None
        count, hidden, width = a.experts.count, a.hidden_size, a.experts.ffn_hidden_size
        self.gate = clamped_swiglu if a.described.clamped_gate else swiglu
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))
        self.gate_up_bias = self.down_bias = None
        if a.described.linear_bias:
            self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * width))
            self.down_bias = nn.Parameter(torch.empty(count, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add up the outputs of each token's experts.

        Args:
            x: [t, c].
            chosen: int64 [t, k], experts of each token.
            weights: [t, k], in the dtype of x.

        Returns:
            [t, c].
        """
        if can_group(x):
            return self._grouped(x, chosen, weights)
        return self._every_expert(x, chosen, weights)

    def _grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sort the tokens by expert, so that each expert multiplies only its own tokens."""
        expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        inner = F.grouped_mm(x[order // chosen.shape[1]], self.gate_up_proj.mT, offs=ends)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias[expert]
        output = F.grouped_mm(self.gate(inner), self.down_proj.mT, offs=ends)
        if self.down_bias is not None:
            output = output + self.down_bias[expert]
        by_token = output[order.argsort()].view(*chosen.shape, -1)
        return (by_token * weights[..., None]).sum(1)

    def _every_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run all tokens through all experts, with weight 0 where an expert is not chosen."""
        shares = x.new_zeros(len(x), len(self.down_proj)).scatter_(1, chosen, weights)
        output = torch.zeros_like(x)
        for number, share in enumerate(shares.unbind(1)):
            inner = self.gate(
                F.linear(x, self.gate_up_proj[number], _row(self.gate_up_bias, number))
            )
            outer = F.linear(inner, self.down_proj[number], _row(self.down_bias, number))
            output += share[:, None] * outer
        return output


def _row(bias: Tensor | None, number: int) -> Tensor | None:
    return None if bias is None else bias[number]


class MixtureOfExperts(nn.Module):
    """Router and experts in place of an MLP."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        assert a.experts is not None
        self._topk, self._normalize = a.experts.topk, a.experts.normalize
        self.gate = nn.Linear(a.hidden_size, a.experts.count, bias=a.described.linear_bias)
        self.experts = Experts(a)
        self.shared_expert: MLP | None = None
        if a.experts.shared_ffn_hidden_size:
            self.shared_expert = MLP(a, a.experts.shared_ffn_hidden_size)
            self.shared_expert_gate = nn.Linear(a.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update [t, c] of x [t, c]; the router computes in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.gate.bias is None else self.gate.bias.to(wide)
        shares = F.linear(x.to(wide), self.gate.weight.to(wide), bias).softmax(-1)
        weights, chosen = shares.topk(self._topk, -1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        update: Tensor = self.experts(x, chosen, weights.to(x.dtype))
        if self.shared_expert is not None:
            update = update + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return update
