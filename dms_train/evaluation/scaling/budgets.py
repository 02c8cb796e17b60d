"""Budgets of inference-time scaling: L-W-CR, as in the paper's figures (section 5.1)."""

from __future__ import annotations

from typing import NamedTuple

from dms_train.evaluation.options import TOKENS_PER_LENGTH


class Budget(NamedTuple):
    """One point of a sweep.

    Attributes:
        length: Maximum number of generated tokens of a chain, in units of 1,024.
        width: Chains of a document.
        cr: Compression ratio of the model or of its policy.
    """

    length: float
    width: int
    cr: float

    @property
    def max_tokens(self) -> int:
        """Most generated tokens of a chain."""
        return length_in_tokens(self.length)

    def __str__(self) -> str:
        """Return the budget as the paper writes it, such as 32-1-4."""
        return f"{self.length:g}-{self.width}-{self.cr:.3g}"


def length_in_tokens(length: float) -> int:
    """Return the tokens of a length in units of 1,024."""
    return round(length * TOKENS_PER_LENGTH)
