"""Knorm: keys of the smallest norm stay (Devoto et al., 2024, arXiv:2406.11430).

The policy evicts at the end of a prompt, like KnormPress of kvpress 0.5.5.
"""

from __future__ import annotations

from torch import Tensor

from dms_train.inference.policies.base import PolicyKind
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy


class KnormPolicy(ScorePolicy):
    """Score a token by minus the norm of its key; RoPE does not change norms."""

    def score(self, keys: Tensor, values: Tensor, attention: Tensor | None) -> Tensor:
        """Return minus the norms of the keys."""
        norms: Tensor = keys.norm(dim=-1)
        return -norms


POLICY = PolicyKind(ScoreOptions, lambda options, spec: KnormPolicy(options))
