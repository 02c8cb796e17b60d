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
        left: Counts of the tokens that have left the window; `held` is the share of these.
    """
    slots = sum(float(type_count.held.sum()) for type_count in everywhere.values())
    heads = ("type", "tokens", "of cache", "left window", "held", "95 %", "by head", "by any")
    rows = [heads]
    for name, type_count in everywhere.items():
        if type_count.tokens:
            of_cache = _percent(float(type_count.held.sum()) / slots)
            rows.append((name, f"{type_count.tokens:,}", of_cache, *_held(left[name])))
    return [f"{row[0]:26}" + "".join(f"{cell:>15}" for cell in row[1:]) for row in rows]


def _held(type_count: TypeCount) -> tuple[str, str, str, str, str]:
    """Return number, mean share, its interval, the range over heads, and the share of any head."""
    if type_count.mean is None:
        return "0", "", "", "", ""
    low, high = (_percent(float(share)) for share in type_count.shares.aminmax())
    return (
        f"{type_count.tokens:,}",
        _percent(type_count.mean.value),
        f"[{_percent(type_count.mean.low)}, {_percent(type_count.mean.high)}]",
        f"{low} to {high}",
        _percent(type_count.somewhere / type_count.tokens),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def stored(counts: Counts) -> dict[str, Any]:
    """Return plain values for a JSON file; shares are None without a token."""
    return {
        name: {
            "tokens": type_count.tokens,
            "held": type_count.shares.tolist() if type_count.tokens else None,
            "held_mean": None if type_count.mean is None else asdict(type_count.mean),
            "held_by_any_head": type_count.somewhere / type_count.tokens
            if type_count.tokens
            else None,
        }
        for name, type_count in counts.items()
    }
