"""Meters of plain floats: means between log rows, tokens per second, remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Clock = Callable[[], float]


class Means:
    """Weighted means of named values since the last `take`."""

    def __init__(self) -> None:
        self._weighted: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Count every value with the same weight."""
        for name, value in values.items():
            self._weighted[name] = self._weighted.get(name, 0.0) + weight * value
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def take(self) -> dict[str, float]:
        """Return the means and start over."""
        means = {name: self._weighted[name] / self._weights[name] for name in self._weighted}
        self._weighted.clear()
        self._weights.clear()
        return means


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Share of the devices' arithmetic that a rate of tokens uses, in model FLOPs.

    Attributes:
        forward_flops: Operations of one forward pass per token, which is that of the teacher.
        student_flops: Operations of the student's forward and backward pass per token.
        devices: Number of devices, one for each process of the run.
        peak_tflops: Peak TFLOP/s of one device; None reports no utilization.
    """

    forward_flops: float
    student_flops: float
    devices: int
    peak_tflops: float | None = None

    def at(self, tokens_per_second: float, *, has_teacher: bool) -> dict[str, float]:
        """Return `tflops_per_device` and, with a known peak, `mfu` (a share of 1)."""
        flops = self.student_flops + (self.forward_flops if has_teacher else 0)
        rate = tokens_per_second * flops / self.devices / 1e12
        values = {"tflops_per_device": rate}
        return values if self.peak_tflops is None else {**values, "mfu": rate / self.peak_tflops}


class Throughput:
    """Tokens per second over the last `window` steps."""

    def __init__(self, window: int = 20, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=window + 1)

    def step(self, tokens: int) -> float:
        """Count the tokens of a finished step and return the current rate."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(end - start, 1e-9)

    def pause(self) -> None:
        """Leave out the time since the last step, e.g. after a checkpoint or an evaluation."""
        idle = self._clock() - self._marks[-1][0]
        self._marks = deque(((t + idle, n) for t, n in self._marks), maxlen=self._marks.maxlen)


def duration(seconds: float) -> str:
    """Format seconds as `42s`, `3m07s` or `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
