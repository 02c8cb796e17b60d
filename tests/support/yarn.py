"""YaRN pair by pair, after section 3.2 of arXiv:2309.00071 with the rounding of transformers."""

from __future__ import annotations

import math
from dataclasses import replace

from dms_train.hf.rope import RopeScaling

# acts within a few dozen tokens
RULE = RopeScaling(
    rope_type="yarn",
    factor=8.0,
    original_max_position_embeddings=40,
    beta_fast=4.0,
    beta_slow=0.5,
    attention_factor=1.3,
)


UNROUNDED = replace(RULE, truncate=False)


def frequencies(rule: RopeScaling, base: float, pairs: int) -> list[float]:
    """Return radians per position of every pair of channels."""
    plain = [base ** (-pair / pairs) for pair in range(pairs)]
    length = rule.original_max_position_embeddings

    def pair_of(turns: float) -> float:
        # base ** (-pair / pairs) * length == 2 pi turns
        return -pairs * math.log(2 * math.pi * turns / length, base)

    first, last = pair_of(rule.beta_fast), pair_of(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first = max(0, first)
    last = max(last, first + 1e-3)
    shares = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(pairs)]
    return [(1 - s) * f + s * f / rule.factor for f, s in zip(plain, shares, strict=True)]
