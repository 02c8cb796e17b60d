"""Bootstrap intervals, which show how far a share would move with other samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SEED, _RESAMPLES = 0, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio of sums and its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def ratio(parts: list[float], wholes: list[float]) -> Estimate:
    """Return sum(parts) / sum(wholes) with an interval from resampled entries.

    An entry holds samples that were drawn together, such as the problems of a sheet. They share a
    text and are not independent of each other.

    Args:
        parts: Numerator of each entry, such as problems solved.
        wholes: Denominator of each entry, such as problems; their sum is above 0.
    """
    part, whole = (torch.tensor(x, dtype=torch.float64) for x in (parts, wholes))
    draw = torch.Generator().manual_seed(_SEED)
    chosen = torch.randint(len(part), (_RESAMPLES, len(part)), generator=draw)
    ratios = part[chosen].sum(1) / whole[chosen].sum(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value=(part.sum() / whole.sum()).item(), low=low, high=high)
