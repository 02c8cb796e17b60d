"""The kernel rule of a policy, as far as it describes what the policy's hooks do."""

from __future__ import annotations

from dms_train.inference.policies.base import CachePolicy, KernelRule

_HOOKS = (
    "accumulate",
    "on_store",
    "evict_mask",
    "observe",
    "merge",
    "balance",
    "position_shift",
    "select",
    "evicts_after",
)


def find_kernel_rule(policy: CachePolicy) -> KernelRule | str:
    """Return the kernel rule of a policy, or why there is none.

    A rule describes the hooks of the class that declares it. It does not hold for a subclass that
    overrides one of them.
    """
    kind = type(policy)
    declared = _depth(kind, "kernel_rule")
    for hook in _HOOKS if kind.kernel_rule is not CachePolicy.kernel_rule else ():
        if _depth(kind, hook) < declared:
            return f"{kind.__name__} overrides {hook} without a kernel_rule of its own"
    rule = policy.kernel_rule()
    return f"{kind.__name__} {rule}" if isinstance(rule, str) else rule


def _depth(kind: type, name: str) -> int:
    """Return the index of the class that defines an attribute, in the order of resolution."""
    return next(i for i, cls in enumerate(kind.__mro__) if name in vars(cls))
