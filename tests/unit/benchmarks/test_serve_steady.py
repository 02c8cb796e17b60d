"""Sustained rates of a simulated server, against a long run from an empty one and brute force."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.serve.steady import Durations, Limits, Probe, Traffic, figures, search
from benchmarks.serve.traffic import Lengths, poisson_times

LENGTHS = Lengths(64, 200)
DURATIONS = Durations(warm_up_s=2.0, window_s=8.0)


class Simulated:
    """Decodes all its requests, and a chunk of one prompt, in a step of 10 to 30 ms.

    At most `slots` requests run. A step takes longer with more requests and with a chunk.
    """

    def __init__(self, slots: int = 10**6, chunk: int = 32) -> None:
        self.now, self.slots, self.chunk = 5.0, slots, chunk
        self.waiting: deque[str] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.unread: dict[str, int] = {}
        self.remaining: dict[str, int] = {}

    def add(self, prompt: list[int], new: int) -> str:
        name = str(len(self.prompts))
        self.prompts[name], self.unread[name], self.remaining[name] = prompt, len(prompt), new
        self.waiting.append(name)
        return name

    def abort(self, requests: list[str]) -> None:
        for name in requests:
            del self.remaining[name]
        self.waiting = deque(name for name in self.waiting if name in self.remaining)

    @property
    def running(self) -> list[str]:
        waiting = set(self.waiting)
        return [name for name in self.remaining if name not in waiting]

    def step(self) -> list[tuple[str, int]]:
        assert self.remaining
        advanced = self.running
        self.now += 0.01 + 0.0001 * len(advanced)
        if self.waiting and len(advanced) < self.slots:
            self.now += 0.01
            first = self.waiting[0]
            self.unread[first] -= self.chunk
            if self.unread[first] <= 0:
                advanced.append(self.waiting.popleft())
        for name in advanced:
            self.remaining[name] -= 1
            if not self.remaining[name]:
                del self.remaining[name]
        return [(name, 1) for name in advanced]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def traffic(server: Simulated) -> Traffic:
    return Traffic(server, LENGTHS, 512, clock=lambda: server.now)


def long_run(server: Simulated, rate: float, seconds: float) -> tuple[float, float, float]:
    """From an empty server: the mean requests in flight, the p99 of gaps, the mean first wait."""
    arrivals, latest, gaps, waits = deque(poisson_times(rate, seconds, seed=9)), {}, [], []
    start, at, flight = server.now, {}, []
    while (now := server.now - start) < seconds:
        while arrivals and arrivals[0] <= now:
            at[server.add([1] * LENGTHS.prompt, LENGTHS.new)] = arrivals.popleft()
        if not server.remaining:
            server.sleep(arrivals[0] - now)
            continue
        flight.append(len(server.remaining))
        for name, _ in server.step():
            if name in latest:
                gaps.append(server.now - latest[name])
            else:
                waits.append(server.now - start - at[name])
            latest[name] = server.now
    half = len(flight) // 2  # the second half is in the steady state
    p99 = float(np.percentile(gaps[len(gaps) // 2 :], 99))
    return float(np.mean(flight[half:])), 1e3 * p99, float(np.mean(waits[len(waits) // 2 :]))


@pytest.mark.parametrize("count", [8, 40])
def test_a_probe_agrees_with_a_long_run_at_its_rate(count: int) -> None:
    probe = traffic(Simulated()).probe(count, DURATIONS)
    flight, p99, wait = long_run(Simulated(), probe.requests_s, 400.0)
    assert flight == pytest.approx(count, rel=0.15)
    assert probe.itl_ms["p99"] == pytest.approx(p99, rel=0.1)
    assert probe.finished == pytest.approx(probe.requests_s * DURATIONS.window_s, rel=0.3)
    assert probe.itl_ms["p50"] == pytest.approx(10 + 0.1 * count, rel=0.1)
    assert probe.wait_s == pytest.approx(wait, rel=0.5)


def test_requests_that_exceed_the_server_wait() -> None:
    """The rate is that of the slots; its times between tokens alone would be within the limit."""
    server = Simulated(slots=10)
    served, crowded = (traffic(server).probe(count, DURATIONS) for count in (8, 40))
    assert served.meets(Limits(30.0, 1.0))
    assert crowded.itl_ms["p99"] < 30
    assert crowded.wait_s > 5
    assert not crowded.meets(Limits(30.0, 1.0))


def test_a_smaller_probe_aborts_requests_and_prompts_have_the_tokens_of_their_progress() -> None:
    server = Simulated()
    same = traffic(server)
    same.probe(30, DURATIONS)
    started = list(server.prompts.values())[:30]
    lengths = sorted(map(len, started))
    assert lengths[0] >= LENGTHS.prompt
    assert lengths[-1] < sum(LENGTHS)
    assert np.mean(lengths) == pytest.approx(LENGTHS.prompt + LENGTHS.new / 2, rel=0.15)
    same.probe(5, Durations(0.1, 0.1))
    assert len(server.remaining) == 5


def made(passing: Callable[[int], bool]) -> Callable[[int], Probe]:
    def probe(count: int) -> Probe:
        itl = {"p50": 1.0, "p99": 29.0 if passing(count) else 31.0}
        return Probe(count, 9, float(count), itl, 0.1)

    return probe


@pytest.mark.parametrize("most", [1, 7, 64, 100])
def test_the_search_finds_what_trying_all_numbers_finds(most: int) -> None:
    limits = Limits(30.0, 2.0)
    for largest in range(most + 1):
        probe = made(lambda count, largest=largest: count <= largest)
        probes = search(probe, limits, most, halvings=10)
        expected = [count for count in range(1, most + 1) if probe(count).meets(limits)]
        assert max((p.in_flight for p in probes if p.meets(limits)), default=0) == largest
        assert largest == max(expected, default=0)
        assert len({p.in_flight for p in probes}) == len(probes)


def test_few_halvings_end_below_the_limit() -> None:
    limits = Limits(30.0, 2.0)
    probes = search(made(lambda count: count <= 77), limits, 256, halvings=2)
    assert [probe.in_flight for probe in probes] == [32, 64, 128, 96, 80]
    row = figures(probes, limits)
    assert (row["in_flight"], row["requests_s"]) == (64, 64.0)
    assert [probe["in_flight"] for probe in row["probes"]] == [32, 64, 128, 96, 80]


def test_no_sustained_rate_has_the_reason() -> None:
    limits = Limits(30.0, 2.0)
    row = figures(search(made(lambda _: False), limits, 8, halvings=3), limits)
    assert row["skipped"] == "1 in flight take 31.0 ms between tokens and 0.1 s to the first one"
