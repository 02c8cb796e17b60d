"""KeyDiff: keys that differ from the mean key stay (Park et al., 2025, arXiv:2504.15364).

The policy evicts at the end of a prompt, like KeyDiffPress of kvpress 0.5.5.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import PolicyKind
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy


class KeyDiffPolicy(ScorePolicy):
    """Score a token by minus the cosine of its key and the mean of the normalised keys."""

    def score(self, keys: Tensor, values: Tensor, attention: Tensor | None) -> Tensor:
        """Return minus the cosines."""
        anchor = F.normalize(keys, dim=-1).mean(2, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)


POLICY = PolicyKind(ScoreOptions, lambda options, spec: KeyDiffPolicy(options))
