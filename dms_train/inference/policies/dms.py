"""Dynamic Memory Sparsification: marked tokens are evicted when they leave the window.

The rule of `method.visibility` is applied to slots instead of a full-length mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, NewTokens, PolicyKind, Slots
from dms_train.inference.policies.kernel_rules import MARKED, KernelRule, WindowRule
from dms_train.limits import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True)
class DMSOptions:
    """Options of `dms`.

    Attributes:
        sinks: Number of first tokens that stay although the model marks them.
    """

    sinks: Annotated[int, AtLeast(0)] = 0


class DMSPolicy(CachePolicy):
    """DMS: token j is evicted for queries i with i - j > window if decision j + shift says so.

    Args:
        window: Distance up to which a token is always read.
        shift: Distance from a token to the decision that governs it.
        sinks: Number of first tokens that are never evicted.
    """

    state_width = 1  # 1 for a marked token

    def __init__(self, window: int, shift: int, *, sinks: int = 0) -> None:
        self.window = window
        self.shift = shift
        self.sinks = sinks

    def kernel_rule(self) -> KernelRule | str:
        """Evict marked tokens that leave the window."""
        if self.sinks:
            return "sinks keep tokens that the model marks, which the kernels evict"
        return WindowRule(evicts=MARKED, window=self.window, shift=self.shift)

    def on_store(self, slots: Slots, arrival: NewTokens) -> Tensor:
        """Mark the tokens whose decision arrives. signal: bool [b, h, n]."""
        return signals_by_slot(slots, arrival, self.shift)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return whether a token is outside the window of the query and marked."""
        late = at[:, None, :, None] - slots.position[:, :, None, :] > self.window
        marked = (slots.state[..., 0] > 0) & (slots.position >= self.sinks)
        return late & marked[:, :, None, :]


def signals_by_slot(slots: Slots, arrival: NewTokens, shift: int) -> Tensor:
    """Return the state [b, h, s, 1] after signals [b, h, n] arrived that govern single tokens.

    Padding between two arriving tokens decides like a masked token; other padding does not.

    Args:
        slots: Stored and arriving tokens.
        arrival: Arriving tokens.
        shift: Distance from a token to the signal that governs it.
    """
    assert arrival.signal is not None
    real = arrival.position >= 0
    start = real.int().argmax(1, keepdim=True)  # [b, 1]
    base = arrival.position.gather(1, start) - start  # position of the first column
    column = slots.position + shift - base[:, :, None]  # column of the governing token
    last = real.shape[1] - 1 - real.flip(1).int().argmax(1, keepdim=True)
    inside = (column >= start[:, :, None]) & (column <= last[:, :, None])
    governed = inside & (slots.position >= 0) & real.any(1)[:, None, None]
    signal = arrival.signal.gather(2, column.clamp(0, real.shape[1] - 1)).to(slots.state.dtype)
    return torch.where(governed, signal, slots.state[..., 0]).unsqueeze(-1)


POLICY = PolicyKind(
    DMSOptions,
    lambda options, spec: DMSPolicy(spec.window, spec.governing_shift, sinks=options.sinks),
    trained=True,
)
