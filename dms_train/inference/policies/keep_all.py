"""Policy that evicts nothing, as in a model without a compressed cache."""

from __future__ import annotations

from dms_train.inference.policies.base import CachePolicy, NoOptions, PolicyKind
from dms_train.inference.policies.kernel_rules import NEVER, KernelRule, WindowRule


class KeepAllPolicy(CachePolicy):
    """Keep every token."""

    def kernel_rule(self) -> KernelRule | str:
        """Evict nothing."""
        return WindowRule(evicts=NEVER)


POLICY = PolicyKind(NoOptions, lambda options, spec: KeepAllPolicy())
