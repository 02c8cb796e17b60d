"""Closed-form schedules of the recipe: step in, value out, no state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def layer_weights(
    ratios: Mapping[int, float], target_cr: float, layers: Sequence[int]
) -> tuple[float, ...]:
    """Return alpha* of every layer over their mean, which stays that of `target_cr`.

    Args:
        ratios: Compression ratio at the end, by number of the layer. The other layers share the
            rest of the evictions evenly.
        target_cr: Ratio of all layers together at the end.
        layers: Numbers of the layers on which the method acts.

    Returns:
        A weight for each number up to the last of `layers`; 0 for a layer that is not among them.

    Raises:
        ValueError: No ratio of the other layers gives this mean, or a layer is not in `layers`.
    """
    unknown = sorted(set(ratios) - set(layers))
    if unknown:
        raise ValueError(f"the method does not act on layer {unknown[0]}; leave it out")
    mean = evicted_fraction(target_cr)
    if mean == 0:
        raise ValueError("nothing is evicted at a target_cr of 1; raise it")
    shares = {layer: evicted_fraction(ratio) for layer, ratio in ratios.items()}
    rest = _share_of_others(list(shares.values()), mean, len(layers))
    weights = {layer: shares.get(layer, rest) / mean for layer in layers}
    return tuple(weights.get(layer, 0.0) for layer in range(max(layers) + 1))


def _share_of_others(shares: Sequence[float], mean: float, count: int) -> float:
    """Return what each layer without a share must evict for `mean` over `count` layers."""
    others, missing = count - len(shares), count * mean - sum(shares)
    if others == 0:
        if abs(missing) > _ROUNDING * count:
            reached = count / (count - sum(shares))
            raise ValueError(f"all layers together have CR {reached:.6g}; set target_cr to it")
        return 0.0
    if not -_ROUNDING * count <= missing < others:
        raise ValueError(
            f"the other {others} layer(s) would have to evict {missing / others:.0%} of their "
            "tokens to reach target_cr; change it or a ratio"
        )
    return max(0.0, missing) / others
