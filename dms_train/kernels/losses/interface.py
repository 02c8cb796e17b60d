"""Interface of the losses over a vocabulary; `vocabulary` explains the three steps of a loss.

Logits are [rows, width]; the first `columns` columns count, the others are padding.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence


class VocabularyLosses(Protocol):
    """Statistics of logits, and gradients written over the logits."""

    def divergence_statistics(
        self, p: Tensor, q: Tensor, columns: int, temperature: float
    ) -> Tensor:
        """Return the statistics of this rank's columns, float32 [5, rows].

        Args:
            p: Logits [rows, width].
            q: Logits [rows, width].
            columns: Columns that count.
            temperature: Divides the logits.
        """
        ...

    def divergence_gradient_(
        self, p: Tensor, q: Tensor, columns: int, rows: Tensor, divergence: Divergence
    ) -> None:
        """Write the gradient of KL times temperature squared over the student's logits.

        Args:
            p: Logits [rows, width]; overwritten if the student is p.
            q: Logits [rows, width]; overwritten if the student is q.
            columns: Columns that count; the gradient of the others is 0.
            rows: float32 [5, rows], second result of `vocabulary.merge_divergence`.
            divergence: Direction and temperature.
        """
        ...

    def nll_statistics(self, logits: Tensor, columns: int) -> Tensor:
        """Return maximum and sum of exp(x - maximum) of this rank's columns, float32 [2, rows]."""
        ...

    def nll_gradient_(self, logits: Tensor, columns: int, rows: Tensor, labels: Tensor) -> None:
        """Write softmax minus one-hot over the logits.

        Args:
            logits: [rows, width]; overwritten.
            columns: Columns that count; the gradient of the others is 0.
            rows: float32 [2, rows], second result of `vocabulary.merge_nll`.
            labels: int64 [rows], columns of this shard; any other value belongs to another rank.
        """
        ...
