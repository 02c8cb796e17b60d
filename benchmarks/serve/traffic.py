"""Requests that arrive over time: a Poisson process with lengths that are drawn or recorded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Lengths(NamedTuple):
    """Numbers of tokens of one request.

    Attributes:
        prompt: Number of prompt tokens.
        new: Number of tokens to generate.
    """

    prompt: int
    new: int


class Mix(NamedTuple):
    """Lengths of requests, drawn from log-uniform distributions.

    Attributes:
        prompt: Fewest and most tokens of a prompt.
        new: Fewest and most generated tokens.
    """

    prompt: tuple[int, int]
    new: tuple[int, int]

    def draw(self, random_numbers: random.Random) -> Lengths:
        """Draw the lengths of one request."""
        prompt, new = (round(low * (high / low) ** random_numbers.random()) for low, high in self)
        return Lengths(prompt, new)


MIXES = {
    "chat": Mix((32, 2048), (16, 512)),
    "documents": Mix((2048, 16384), (32, 256)),
    "reasoning": Mix((64, 512), (512, 4096)),
    "toy": Mix((4, 32), (2, 8)),
}


class Arrival(NamedTuple):
    """A request and its time of arrival.

    Attributes:
        at: Seconds from the start.
        prompt: Token ids.
        new: Tokens that it generates.
    """

    at: float
    prompt: list[int]
    new: int


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw times within `seconds` at which `rate` requests a second arrive; the first is 0.

    Args:
        rate: Requests a second, above 0.
        seconds: Duration of the arrivals.
        seed: The same seed gives the same times.
    """
    draw, times = random.Random(seed), [0.0]
    while (at := times[-1] + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


def arrivals(
    times: Iterable[float], mix: Mix | list[Lengths], vocab: int, seed: int
) -> list[Arrival]:
    """Draw requests of random tokens, the same for every engine.

    Args:
        times: Times of the arrivals.
        mix: Distribution of the lengths, or recorded requests to draw from.
        vocab: Size of the vocabulary.
        seed: Seed of lengths and tokens.
    """
    draw, requests = random.Random(seed), []
    for at in times:
        lengths = mix.draw(draw) if isinstance(mix, Mix) else draw.choice(mix)
        prompt = [draw.randrange(vocab // 2, vocab - 1) for _ in range(lengths.prompt)]
        requests.append(Arrival(at, prompt, lengths.new))
    return requests


def recorded(path: Path, most: int) -> list[Lengths]:
    """Read the lengths of recorded requests.

    Args:
        path: JSON lines with `prompt_tokens` and `tokens`, as `dms-eval` writes for its chains.
        most: Largest number of tokens of a request; longer ones are left out.

    Raises:
        ValueError: There is no request, or a line lacks a length.
    """
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            lengths = Lengths(int(row["prompt_tokens"]), int(row["tokens"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: needs prompt_tokens and tokens") from None
        if min(lengths) > 0 and sum(lengths) <= most:
            requests.append(lengths)
    if not requests:
        raise ValueError(f"{path}: no request of 1 to {most} tokens")
    return requests
