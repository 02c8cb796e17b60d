"""Policy of models in which some layers have a sliding window: it acts on the other layers."""

from __future__ import annotations

from torch import Tensor

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import CachePolicy, NewTokens, Slots, find_kernel_rule
from dms_train.inference.policies.kernel_rules import KernelRule, LayeredRule, WindowRule


class LocalLayers(CachePolicy):
    """Evict every token that leaves the window of a layer; follow a policy in the other layers.

    Args:
        policy: Policy of the layers without a window.
        name: Its name in the options.
        windows: Tokens that a query reads in each layer, its own included; None for all.

    Raises:
        InferenceError: The policy decides by more than the age of tokens and marks of the model.
    """

    evicts_prompt_only = False  # a window that is wider than the policy's drops prompt tokens later

    def __init__(self, policy: CachePolicy, name: str, windows: list[int | None]) -> None:
        rule = find_kernel_rule(policy)
        if not isinstance(rule, WindowRule):
            raise InferenceError(
                f"policy={name}: does not support models with sliding-window layers; use "
                "policy=auto, window or keep_all"
            )
        self._policy, self._windows, self._rule = policy, windows, rule
        self.state_width, self.window = policy.state_width, policy.window
        self.shareable = policy.shareable

    def kernel_rule(self) -> KernelRule | str:
        """Follow the rule of the policy where a layer has no window."""
        return LayeredRule(rule=self._rule, windows=tuple(self._windows))

    def on_store(self, slots: Slots, arrival: NewTokens) -> Tensor:
        """Return the policy's state; that of a layer with a window stays 0."""
        if self._windows[slots.layer] is not None:
            return slots.state
        return self._policy.on_store(slots, arrival)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens outside the layer's window, or those that the policy evicts."""
        window = self._windows[slots.layer]
        if window is None:
            return self._policy.evict_mask(slots, at)
        return at[:, None, :, None] - slots.position[:, :, None, :] >= window


def with_windows(
    policy: CachePolicy, name: str, windows: list[int | None], *, sinks: bool = False
) -> CachePolicy:
    """Return the policy itself if no layer has a window, otherwise `LocalLayers`.

    Args:
        policy: Policy of the layers without a window.
        name: Its name in the options.
        windows: As in `LocalLayers`.
        sinks: Whether the model has attention sinks.

    Raises:
        InferenceError: The policy does not support the windows or the sinks.
    """
    if any(windows):
        return LocalLayers(policy, name, windows)
    if sinks and not isinstance(find_kernel_rule(policy), WindowRule):
        raise InferenceError(
            f"policy={name}: does not support models with attention sinks; use policy=window or "
            "keep_all, or auto for a model that was retrofitted with dms"
        )
    return policy
