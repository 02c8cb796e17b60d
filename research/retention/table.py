"""Counts of token types as lines of a table and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from research.retention.held import TypeCount

Counts = dict[str, TypeCount]


def table(everywhere: Counts, left: Counts) -> list[str]:
    """Return a line for each type that occurs; shares are in percent.

    Args:
        everywhere: Counts of all tokens.
        left: Counts of those that have left the window; `held` is the share of these.
    """
    slots = sum(float(found.held.sum()) for found in everywhere.values())
    heads = ("type", "tokens", "of cache", "left window", "held", "95 %", "by head", "by any")
    rows = [heads]
    for name, found in everywhere.items():
        if found.tokens:
            of_cache = _percent(float(found.held.sum()) / slots)
            rows.append((name, f"{found.tokens:,}", of_cache, *_held(left[name])))
    return [f"{row[0]:26}" + "".join(f"{cell:>15}" for cell in row[1:]) for row in rows]


def _held(found: TypeCount) -> tuple[str, str, str, str, str]:
    """Return number, mean share, its interval, the range over heads, and the share of any head."""
    if found.mean is None:
        return "0", "", "", "", ""
    low, high = (_percent(float(share)) for share in found.shares.aminmax())
    return (
        f"{found.tokens:,}",
        _percent(found.mean.value),
        f"[{_percent(found.mean.low)}, {_percent(found.mean.high)}]",
        f"{low} to {high}",
        _percent(found.somewhere / found.tokens),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def stored(counts: Counts) -> dict[str, Any]:
    """Return plain values for a JSON file; shares are None without a token."""
    return {
        name: {
            "tokens": found.tokens,
            "held": found.shares.tolist() if found.tokens else None,
            "held_mean": None if found.mean is None else asdict(found.mean),
            "held_by_any_head": found.somewhere / found.tokens if found.tokens else None,
        }
        for name, found in counts.items()
    }
