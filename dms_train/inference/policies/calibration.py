"""Top-p sets of derived scores, calibrated to the attention (Hard-KV, appendix D).

Scores derived from attention are sharper or flatter than the attention itself. A threshold p
therefore takes fewer or more tokens. Calibration counts the tokens that the attention needs to
reach p. It then finds the temperature at which the same number of top scores has the same mass. The
order of the scores stays. The symbols of problem 1 are lost in the available text; this is an
interpretation.

Shape letters: m queries, s tokens; "..." are KV lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT, BINARY = "gradient", "binary"
_LOWEST, _HIGHEST = 1e-3, 10.0  # temperatures
_START, _RATE, _STEPS, _CLOSE = 0.5, 1e-2, 50, 1e-2  # Adam stops at an error of _CLOSE
_HALVINGS = 40
_ROUNDING = 1e-6  # rounding error of sums of probabilities


def top_p(logits: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest set of largest probabilities with a sum of at least p.

    Args:
        logits: [..., m, s]; of equal logits, the first one ranks higher.
        p: Threshold.

    Returns:
        The tokens, bool [..., m, s]; their number, int64 [..., m, 1]; their sum, [..., m, 1].
    """
    weights = logits.softmax(-1)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    inside = before < p - _ROUNDING
    chosen = torch.zeros_like(inside).scatter(-1, order, inside)
    return chosen, inside.sum(-1, keepdim=True), (ranked * inside).sum(-1, keepdim=True)


def temperature(logits: Tensor, shifted: Tensor, real: Tensor, *, p: float, solver: str) -> Tensor:
    """Return the temperature that calibrates scores, [..., 1, 1].

    Args:
        logits: [..., m, s], logits of the attention.
        shifted: [..., m, s], logits of the scores.
        real: bool, broadcast to [..., m, 1]; False for rows that do not count.
        p: Threshold.
        solver: `binary` searches for the mean mass of the attention by halving. `gradient`
            minimises the mean squared error with Adam, 50 steps of 0.01 from 0.5, as in the paper.
    """
    _, count, mass = top_p(logits, p)
    ranked = shifted.sort(dim=-1, descending=True).values
    top = torch.arange(ranked.shape[-1], device=ranked.device) < count
    if solver == BINARY:
        return _by_halving(ranked, top, mass, real)
    return _by_adam(ranked, top, mass, real)


def _by_halving(ranked: Tensor, top: Tensor, mass: Tensor, real: Tensor) -> Tensor:
    """Solve by halving: the mass of the top falls with the temperature."""
    low = torch.full_like(mass[..., :1, :], _LOWEST)
    high = torch.full_like(low, _HIGHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        excess = ((ranked / middle).softmax(-1) * top).sum(-1, keepdim=True) - mass
        above = (excess * real).sum(-2, keepdim=True) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _by_adam(ranked: Tensor, top: Tensor, mass: Tensor, real: Tensor) -> Tensor:
    """Solve with Adam and the softmax's closed-form derivative; stop lists that are close."""
    tau = torch.full_like(mass[..., :1, :], _START)
    first, second = torch.zeros_like(tau), torch.zeros_like(tau)
    rows = (real * torch.ones_like(mass)).sum(-2, keepdim=True).clamp(min=1)
    for step in range(1, _STEPS + 1):
        weights = (ranked / tau).softmax(-1)
        error = ((weights * top).sum(-1, keepdim=True) - mass) * real
        mean = (weights * ranked).sum(-1, keepdim=True)
        slope = (weights * top * (mean - ranked)).sum(-1, keepdim=True) / tau**2
        gradient = (2 * error * slope).sum(-2, keepdim=True) / rows
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        change = _RATE * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        moves = error.abs().amax(-2, keepdim=True) > _CLOSE
        tau = torch.where(moves, (tau - change).clamp(_LOWEST, _HIGHEST), tau)
    return tau
