"""Policies by name."""

from __future__ import annotations

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import CachePolicy
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.window import WindowPolicy
from dms_train.method.spec import DMSSpec


def build_policy(name: str, spec: DMSSpec | None, window: int | None) -> CachePolicy:
    """The policy called `name` for a model.

    Args:
        name: `dms`, `window`, `keep_all` or `auto` (`dms` if the model has it).
        spec: What the model was trained for; None for a dense one.
        window: Tokens of the window policy; None takes the model's own.

    Raises:
        InferenceError: The model does not fit the policy.
    """
    if name == "auto":
        name = "keep_all" if spec is None else "dms"
    if name == "keep_all":
        return KeepAllPolicy()
    if name == "window":
        size = window if window is not None else spec.window if spec is not None else None
        if size is None:
            raise InferenceError("policy=window: a dense model has no window; state one")
        return WindowPolicy(size)
    if spec is None:
        raise InferenceError("policy=dms: the model is dense; use keep_all or window")
    return DMSPolicy(spec.window, spec.governing_shift)
