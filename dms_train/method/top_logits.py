"""Largest probabilities of a model's distributions over the vocabulary, and the mass of the rest.

They stand for the logits of a teacher where no teacher runs. A loss then compares distributions in
which all other tokens are merged to one outcome. Its divergence is a lower bound of the divergence
of the whole distributions, in both directions, and equal to it where the support is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopLogits:
    """Support and tail of distributions over the vocabulary.

    Not a tuple, in which megatron-core's module of bf16 models would round the tensors.

    Attributes:
        log_probs: [..., k], logarithms of the k largest probabilities.
        ids: int32 [..., k], their tokens.
        log_tails: float32 [...], logarithm of the probability of all other tokens together.
    """

    log_probs: Tensor
    ids: Tensor
    log_tails: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the tensors."""
        return iter((self.log_probs, self.ids, self.log_tails))

    def map(self, function: Callable[[Tensor], Tensor]) -> TopLogits:
        """Apply a function to every tensor."""
        return TopLogits(*map(function, self))
