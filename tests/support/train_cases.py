"""Random problems for the fused training attention, and what float64 makes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.kernels.train_attention import reference


class Shape(NamedTuple):
    b: int
    s: int
    hq: int
    hk: int
    d: int
    window: int
    dtype: torch.dtype = torch.float32
    documents: tuple[int, ...] = ()  # lengths; their sum is s
    evicted: float = 0.2  # share of keys with alpha exactly 1
    sinks: bool = False  # in the softmax of every head

    @property
    def bounds(self) -> list[int]:
        edges = [0]
        for length in self.documents or (self.s,):
            edges.append(edges[-1] + length)
        assert edges[-1] == self.s
        return edges

    def cu_seqlens(self, device: str) -> Tensor | None:
        if not self.documents:
            return None
        return torch.tensor(self.bounds, dtype=torch.int32, device=device)


def leaves(shape: Shape, device: str, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """q, k, v and log_keep, some of it exactly 0 and some -inf, whole stretches too; and d_out.

    A shape with sinks has them as a fifth leaf, far apart.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, shape.dtype)

    b, s, hq, hk, d = shape[:5]
    log_keep = torch.nn.functional.logsigmoid(-3 * torch.randn(b, hk, s, generator=generator))
    kind = torch.rand(b, hk, s, generator=generator)
    log_keep[kind < shape.evicted] = -torch.inf
    log_keep[kind > 0.9] = 0.0
    log_keep[..., s // 4 : s // 2] = -torch.inf if shape.evicted else 0.0
    found = [normal(b, s, h, d) for h in (hq, hk, hk)] + [log_keep.to(device)]
    if shape.sinks:
        found.append((3 * torch.randn(hq, generator=generator)).to(device))
    return [x.requires_grad_() for x in found], normal(b, s, hq, d)


def positions_first(x: Tensor) -> Tensor:
    """Copy a leaf [b, s, h, d] so that positions come first in memory."""
    ordered = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    return ordered.requires_grad_(x.requires_grad)


def outcome(
    attention: object, inputs: list[Tensor], d_out: Tensor, shape: Shape, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Output and the gradients of all inputs."""
    numbers = shape.window, shape.d**-0.5, cu_seqlens
    out = attention(*inputs[:4], *numbers, *inputs[4:])  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def exact(inputs: list[Tensor], d_out: Tensor, shape: Shape) -> list[Tensor]:
    """The same in float64, document by document."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, log_keep, *sinks = wide
    parts = [
        reference.dms_attention(
            *(x[:, i:j] for x in (q, k, v)),
            log_keep[..., i:j],
            shape.window,
            shape.d**-0.5,
            None,
            *sinks,
        )
        for i, j in zip(shape.bounds, shape.bounds[1:], strict=False)
    ]
    out = torch.cat(parts, 1)
    return [out.detach(), *torch.autograd.grad(out, wide, d_out.double())]


def distances(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative error of each; where the truth is zero, relative to the output; inf for NaN."""
    sizes = [e.norm() if e.any() else truth[0].norm() for e in truth]
    return [
        ((a.double() - e).norm() / size).nan_to_num(nan=torch.inf).item()
        for a, e, size in zip(found, truth, sizes, strict=True)
    ]
