"""Nothing dies: what a model without a compressed cache does."""

from __future__ import annotations

from dms_train.inference.policies.base import CachePolicy


class KeepAllPolicy(CachePolicy):
    """Every token stays."""
