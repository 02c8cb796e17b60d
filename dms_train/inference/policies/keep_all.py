"""Nothing is evicted, as in a model without a compressed cache."""

from __future__ import annotations

from dms_train.inference.policies.base import CachePolicy, NoOptions, PolicyKind


class KeepAllPolicy(CachePolicy):
    """Keeps every token."""


POLICY = PolicyKind(NoOptions, lambda options, spec: KeepAllPolicy())
