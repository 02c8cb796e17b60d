"""Arguments of a paged cache for a chunk of prompts.

Shape letters: b sequences, n tokens of a chunk, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dms_train.inference.policies.base import NewTokens


class Chunk(NamedTuple):
    """Next tokens of some prompts, in the form that a layer receives.

    Attributes:
        rows: Cache rows, int64 [b].
        query: With RoPE, [b, query heads, n, d].
        arrival: The tokens.
        pages: Most pages that the tokens take.
        begins: Whether the cache holds nothing of these prompts.
        sinks: Logits [query heads] in the denominators; None for none.
    """

    rows: Tensor
    query: Tensor
    arrival: NewTokens
    pages: int
    begins: bool = False
    sinks: Tensor | None = None
