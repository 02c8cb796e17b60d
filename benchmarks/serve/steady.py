"""Requests per second that a server sustains within limits, from short probes.

A request of thousands of tokens runs for a minute, and a server that starts empty needs as long to
reach its steady state. A probe therefore starts there. A number of requests are in progress, each
at a token drawn uniformly: the tokens that it has generated so far are part of its prompt. A new
request takes the place of each finished one. Because the tokens were drawn independently, requests
finish and arrive at irregular times, nearly as in a Poisson process of the rate that is measured.
With a given rate of arrivals, the number in flight would drift for a minute.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from benchmarks.serve.online import percentile
from benchmarks.serve.traffic import Lengths


class Server(Protocol):
    """An engine that serves requests of token ids up to their last token."""

    def add(self, prompt: list[int], new: int) -> str:
        """Queue a request and return its id."""
        ...

    def step(self) -> Iterable[tuple[str, int]]:
        """Compute for a while; return requests with their numbers of new tokens."""
        ...

    def abort(self, requests: list[str]) -> None:
        """End requests before their last token."""
        ...


class Limits(NamedTuple):
    """Condition of a sustained rate.

    Attributes:
        max_itl_ms: 99th percentile of the time between two tokens of a request, in milliseconds.
        max_wait_s: Mean time to the first token, in seconds; more means that requests queue.
    """

    max_itl_ms: float
    max_wait_s: float


class Durations(NamedTuple):
    """Seconds of a probe.

    Attributes:
        warm_up_s: Time for which the number of requests without a token reaches no new minimum.
        window_s: Time of the measurement after that.
    """

    warm_up_s: float
    window_s: float


class Probe(NamedTuple):
    """Measurement with a number of requests in flight.

    Attributes:
        in_flight: Requests that run or wait.
        finished: Requests that finished in the window.
        requests_s: Generated tokens per second over the tokens of a request.
        itl_ms: Percentiles of the time between two tokens of a request, in milliseconds.
        wait_s: Mean time to the first token in seconds, by Little's law: the mean number of
            requests without a token, over the rate.
    """

    in_flight: int
    finished: int
    requests_s: float
    itl_ms: dict[str, float]
    wait_s: float

    def meets(self, limits: Limits) -> bool:
        """Return whether the rate is sustained within the limits."""
        return self.itl_ms["p99"] <= limits.max_itl_ms and self.wait_s <= limits.max_wait_s


@dataclass
class _Request:
    remaining: int
    latest: float | None = None  # time of its last token


class Traffic:
    """Requests of one length in flight on a server; a probe continues with those of the last one.

    Args:
        server: Idle server.
        lengths: Tokens of every request.
        vocab: Size of the vocabulary.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        server: Server,
        lengths: Lengths,
        vocab: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._server, self._lengths, self._clock = server, lengths, clock
        self._draw = random.Random(0)
        # prompts are parts of these: drawing each one would delay the server's steps
        self._ids = [self._draw.randrange(vocab // 2, vocab - 1) for _ in range(2 * sum(lengths))]
        self._flight: dict[str, _Request] = {}
        self._gaps: list[float] = []
        self._tokens = self._finished = 0

    def probe(self, count: int, durations: Durations) -> Probe:
        """Measure with this number of requests in flight."""
        self._resize(count)
        self._warm_up(durations.warm_up_s)
        self._gaps, self._tokens, self._finished = [], 0, 0
        start, waiting_seconds = self._clock(), 0.0
        while (seconds := self._clock() - start) < durations.window_s:
            waiting = self._waiting()
            self._step()
            waiting_seconds += waiting * (self._clock() - start - seconds)
        served = self._tokens / seconds / self._lengths.new
        gaps = [1e3 * gap for gap in self._gaps] or [0.0]
        return Probe(
            in_flight=count,
            finished=self._finished,
            requests_s=served,
            itl_ms={f"p{n}": percentile(gaps, n / 100) for n in (50, 99)},
            wait_s=waiting_seconds / seconds / max(served, 1e-9),
        )

    def _resize(self, count: int) -> None:
        """Abort requests, or add some that are in progress."""
        surplus = len(self._flight) - count
        if surplus > 0:
            aborted = self._draw.sample(sorted(self._flight), surplus)
            self._server.abort(aborted)
            for request in aborted:
                del self._flight[request]
        while len(self._flight) < count:
            self._add(self._draw.randrange(self._lengths.new))

    def _add(self, generated: int) -> None:
        """Send a request that has generated a number of tokens elsewhere."""
        prompt, new = self._lengths.prompt + generated, self._lengths.new - generated
        start = self._draw.randrange(len(self._ids) - prompt)
        self._flight[self._server.add(self._ids[start : start + prompt], new)] = _Request(new)

    def _warm_up(self, seconds: float) -> None:
        """Wait until the server starts no more requests at once."""
        fewest, since = self._waiting() + 1, self._clock()
        while self._clock() - since < seconds:
            if (waiting := self._waiting()) < fewest:
                fewest, since = waiting, self._clock()
            self._step()

    def _waiting(self) -> int:
        return sum(request.latest is None for request in self._flight.values())

    def _step(self) -> None:
        """Note the tokens of a step, and replace finished requests.

        Tokens of aborted requests do not count.
        """
        advanced = self._server.step()
        now = self._clock()
        for name, tokens in advanced:
            request = self._flight.get(name)
            if request is None or not tokens:
                continue
            if request.latest is not None:
                self._gaps.append(now - request.latest)
            self._gaps += [0.0] * (tokens - 1)
            self._tokens += tokens
            request.latest, request.remaining = now, request.remaining - tokens
            if not request.remaining:
                del self._flight[name]
                self._finished += 1
                self._add(0)


def search(probe: Callable[[int], Probe], limits: Limits, most: int, halvings: int) -> list[Probe]:
    """Look for the most requests in flight whose rate is sustained.

    Args:
        probe: Measures with a number of requests in flight.
        limits: Condition of a sustained rate.
        most: Largest number. The first is an eighth of it, and is doubled while it is sustained.
        halvings: Later probes, each in the middle of the best and of the first one that fails.

    Returns:
        All probes in the order of their measurement.
    """
    probes: list[Probe] = []

    def sustained(count: int) -> bool:
        probes.append(probe(count))
        return probes[-1].meets(limits)

    best, count = 0, max(1, most // 8)
    while sustained(count):
        if count == most:
            return probes
        best, count = count, min(2 * count, most)
    for _ in range(halvings):
        middle = (best + count) // 2
        if middle == best:
            break
        best, count = (middle, count) if sustained(middle) else (best, middle)
    return probes


def figures(probes: list[Probe], limits: Limits) -> dict[str, Any]:
    """Return the fastest sustained probe for a row, and all of them; `skipped` if there is none."""
    rows = [_rounded(probe) for probe in probes]
    met = [row for probe, row in zip(probes, rows, strict=True) if probe.meets(limits)]
    if not met:
        few = min(rows, key=lambda row: row["in_flight"])
        over = f"{few['itl_ms']['p99']} ms between tokens and {few['wait_s']} s to the first one"
        return {"skipped": f"{few['in_flight']} in flight take {over}", "probes": rows}
    return max(met, key=lambda row: row["requests_s"]) | {"probes": rows}


def _rounded(probe: Probe) -> dict[str, Any]:
    itl = {name: round(value, 2) for name, value in probe.itl_ms.items()}
    rate, wait = round(probe.requests_s, 3), round(probe.wait_s, 3)
    return {**probe._asdict(), "requests_s": rate, "itl_ms": itl, "wait_s": wait}
