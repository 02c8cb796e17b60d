"""Window policy: evict every token that leaves the window; baseline for learned policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import CachePolicy, PolicyKind, Slots
from dms_train.inference.policies.kernel_rules import EVERY, KernelRule, WindowRule
from dms_train.limits import AtLeast
from dms_train.method.base import MethodSpec


class WindowPolicy(CachePolicy):
    """Window policy: a query reads itself and the `window` tokens before it."""

    def __init__(self, window: int) -> None:
        self.window = window

    def kernel_rule(self) -> KernelRule | str:
        """Evict every token that leaves the window."""
        return WindowRule(evicts=EVERY, window=self.window)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return whether a token is more than `window` older than the query."""
        return at[:, None, :, None] - slots.position[:, :, None, :] > self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Options of `window`.

    Attributes:
        window: Tokens before the query; None takes what the model was trained for.
    """

    window: Annotated[int | None, AtLeast(1)] = None


def _build(options: WindowOptions, spec: MethodSpec | None) -> WindowPolicy:
    if options.window is not None:
        return WindowPolicy(options.window)
    if spec is None:
        raise InferenceError("policy=window: a dense model has no window; state one")
    return WindowPolicy(spec.window)


POLICY = PolicyKind(WindowOptions, _build)
