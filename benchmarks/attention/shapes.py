"""Random inputs of the training attention, and a call of an implementation on them.

Shape letters: b samples, s positions, hq query heads, hk KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_LOGIT_SPREAD = 4.0  # gives decisions from nearly kept to nearly evicted


class Shape(NamedTuple):
    """Sizes of one case; `model` names a model with these sizes."""

    b: int
    hq: int
    hk: int
    s: int
    d: int
    model: str = ""

    @property
    def label(self) -> str:
        """The five sizes as one word."""
        return f"{self.b}x{self.hq}/{self.hk}x{self.s}x{self.d}"

    def flops(self) -> tuple[float, float]:
        """Return the FLOPs of causal attention, forward and backward."""
        forward = 4 * self.b * self.hq * self.s**2 * self.d / 2
        return forward, 2.5 * forward


class AttentionInputs(NamedTuple):
    """Leaves q [b, s, hq, d], k and v [b, s, hk, d], logits [b, hk, s] by key; and d_out like q.

    A key outside the window gets the bias log(1 - sigmoid(logit)).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor
    d_out: Tensor
    window: int
    scale: float

    def heads_first(self) -> AttentionInputs:
        """Return contiguous [b, heads, s, d] inputs, the order that torch's kernels prefer."""

        def turn(x: Tensor) -> Tensor:
            turned = x.detach().transpose(1, 2).contiguous()
            return turned.requires_grad_(x.requires_grad)

        query, key, value, d_out = (turn(x) for x in (self.query, self.key, self.value, self.d_out))
        return self._replace(query=query, key=key, value=value, d_out=d_out)

    def log_keep(self) -> Tensor:
        """Return log(1 - alpha) [b, hk, s], with a graph to the logits."""
        return F.logsigmoid(-self.logits)


class Call(NamedTuple):
    """An implementation bound to its inputs: a function to run, and the leaves to differentiate."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    d_out: Tensor

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; `out` keeps its graph."""
        return torch.autograd.grad(out, self.leaves, self.d_out, retain_graph=True)


def make_inputs(
    shape: Shape, window: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> AttentionInputs:
    """Draw normal tensors; logits are float32 and wide, so that many keys are nearly evicted."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    b, hq, hk, s, d, _ = shape
    query, key, value = (normal(b, s, h, d).requires_grad_() for h in (hq, hk, hk))
    logits = torch.randn(b, hk, s, generator=generator, device=device) * _LOGIT_SPREAD
    return AttentionInputs(
        query=query,
        key=key,
        value=value,
        logits=logits.requires_grad_(),
        d_out=normal(b, s, hq, d),
        window=window,
        scale=d**-0.5,
    )
