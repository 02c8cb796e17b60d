"""Move keys and queries that have RoPE to other positions."""

from __future__ import annotations

import torch
from torch import Tensor


def moved_by(x: Tensor, distance: Tensor, frequency: Tensor) -> Tensor:
    """Rotate vectors that have RoPE by `distance` more positions, at least in float32.

    Angles are computed in float64. Distances may be negative.

    Args:
        x: [..., d]; channel c is turned together with channel c + d / 2.
        distance: Integers that broadcast to [...].
        frequency: [d / 2], radians for each position.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = distance.double()[..., None] * frequency.double()
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    first, second = x.to(wide).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
