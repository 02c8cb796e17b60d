"""Every token is evicted when it leaves the window: the baseline for learned policies."""

from __future__ import annotations

from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, Slots


class WindowPolicy(CachePolicy):
    """A query reads itself and the `window` tokens before it."""

    def __init__(self, window: int) -> None:
        self.window = window

    def expired(self, slots: Slots, at: Tensor) -> Tensor:
        """Whether a token is more than `window` older than the query."""
        return at[:, None, :, None] - slots.position[:, :, None, :] > self.window
