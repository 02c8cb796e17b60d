"""Attention sinks: a learned logit of each query head in the denominator of its softmax.

The numerators stay as they are, so that the weights of a query add up to less than 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute a softmax over the last dimension with exp(sink) in the denominator.

    Args:
        scores: [..., keys].
        sinks: Logits that broadcast to [...]; None for a plain softmax.

    Returns:
        Weights of the keys, [..., keys].
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
