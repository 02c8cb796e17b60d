"""Estimate of the blocks that a prompt needs, from the prompts that were computed before it."""

from __future__ import annotations

import math

# Weight of a prompt after each further one: the estimate follows about the last 50 prompts.
FADE = 0.98


class BlockEstimate:
    """Running estimate of the share of tokens outside the window that prompts keep.

    The estimate is the mean share plus one standard deviation, weighted by tokens. If prompts
    differ as a normal distribution does, five of six need no more. A share that is too low ends in
    a preemption, after which the prompt is computed again. A share that is too high only lets a
    prompt wait, until requests that run have finished.

    The compression ratio of the export counts as one prompt, with `window` tokens outside the
    window.

    Args:
        window: Tokens that are never evicted.
        ratio: Tokens per token that is kept, outside the window.
        block_size: Tokens of a block.
    """

    def __init__(self, window: int, ratio: float, block_size: int) -> None:
        self._window, self._block_size = window, block_size
        self._tokens = self._mean = self._square = 0.0
        self._add(window, 1 / ratio)

    def observe(self, tokens: int, slots: float) -> None:
        """Add a prompt whose tokens are all computed.

        Args:
            tokens: Tokens of the prompt; it is ignored if they all fit the window.
            slots: Slots of its pages, as the mean over its KV lists.
        """
        outside = tokens - self._window
        if outside > 0:
            self._add(outside, min(max((slots - self._window) / outside, 0.0), 1.0))

    def blocks(self, tokens: int) -> int:
        """Return the expected blocks of a prompt of `tokens` tokens."""
        recent = min(tokens, self._window)
        kept = math.ceil(self.share * (tokens - recent))
        return math.ceil((recent + kept) / self._block_size)

    @property
    def share(self) -> float:
        """Return the share of tokens outside the window that prompts keep, at most 1."""
        variance = max(self._square - self._mean**2, 0.0)
        return min(self._mean + math.sqrt(variance), 1.0)

    def _add(self, tokens: float, share: float) -> None:
        self._tokens = FADE * self._tokens + tokens
        weight = tokens / self._tokens
        self._mean += weight * (share - self._mean)
        self._square += weight * (share**2 - self._square)
