"""One score of several chains: majority vote, pass@all, mean, and the estimator of pass@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from dms_train.evaluation.tasks.base import Aggregate


class ChainScore(NamedTuple):
    """Score of one chain within a budget; a chain that was cut off has none.

    Attributes:
        answers: Answer to each question; None where there is none.
        correct: True for each right answer.
    """

    answers: tuple[str | None, ...]
    correct: tuple[bool, ...]


def score(chains: Sequence[ChainScore], how: Aggregate) -> float:
    """Return the share of the questions that the chains together answer right."""
    questions = range(len(chains[0].correct))
    if how is Aggregate.MEAN:
        return sum(sum(c.correct) for c in chains) / len(chains) / len(questions)
    if how is Aggregate.ANY:
        right: float = sum(any(c.correct[q] for c in chains) for q in questions)
    else:
        right = sum(_majority(chains, q) for q in questions)
    return right / len(questions)


def _majority(chains: Sequence[ChainScore], question: int) -> bool:
    """Return whether the most frequent answer is right; the one given first wins a tie."""
    votes = Counter(c.answers[question] for c in chains if c.answers[question] is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return next(c.correct[question] for c in chains if c.answers[question] == winner)


def pass_at_k(chains: int, right: int, k: int) -> float:
    """Return the probability that one of k chains, drawn without replacement, is right.

    The unbiased estimator of Chen et al. (2021): 1 - C(n - c, k) / C(n, k).

    Args:
        chains: n, at least k.
        right: c, number of right chains among them.
        k: Chains that are drawn.
    """
    return 1.0 - comb(chains - right, k) / comb(chains, k)
