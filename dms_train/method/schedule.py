"""Closed-form schedules of the recipe: step in, value out, no state."""

from __future__ import annotations

import math

_ROUNDING = 1e-9  # largest rounding error of a whole number of steps


def channel_scale(step: int, zero_steps: int) -> float:
    """Return the factor on the eviction channel after `step` of `zero_steps` (appendix B)."""
    if zero_steps == 0:
        return 0.0
    return max(0.0, 1.0 - step / zero_steps)


def compression_ratio(step: int, steps_per_cr: int, target: float, start: float = 1.0) -> float:
    """Return CR(t) = start + t / steps_per_cr, up to the target (section 4: 100 steps a unit)."""
    return min(target, start + step / steps_per_cr)


def anneal_steps(steps_per_cr: int, target: float, start: float = 1.0) -> int:
    """Return the number of steps until `compression_ratio` reaches the target."""
    return max(0, math.ceil((target - start) * steps_per_cr - _ROUNDING))


def evicted_fraction(cr: float) -> float:
    """Return alpha* = 1 - 1/CR, the share of decisions that must evict at ratio `cr`."""
    return 1.0 - 1.0 / cr
