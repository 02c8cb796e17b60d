"""Budgets of the records of seconds, and numbers in the form of their page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PAGE = "docs/models/seconds.md"
TASKS = {"GSM8K": "gsm8k", "MATH-500": "math500", "HumanEval": "humaneval"}
CR = {"original": 1.0, **{f"cr{ratio}": float(ratio) for ratio in (2, 3, 4, 6, 8)}}
MODELS = ("original", "cr4", "cr8")  # of most tables
CHAINS = (1, 4, 16)
OWN_TEXT = "qwen25_coder_0_5b_defaults_seconds.json"
QUESTIONS = "qwen25_coder_0_5b_seconds.json"
SMOLLM2 = "smollm2_135m_seconds.json"
EVERY_RATIO = "qwen25_coder_0_5b_ratios_seconds.json"


def budgets(task: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the budgets by model and chains, all of them with the settings of the page."""
    given = task["settings"]
    assert (given["problems"], given["repeats"], given["cache_bytes"]) == (100, 3, 256_000_000)
    assert (given["max_num_seqs"], given["policy"]) == (512, {"name": "auto"})
    assert (given["sampling"]["temperature"], given["sampling"]["top_p"]) == (0.7, 0.95)
    assert given["prompt_format"].startswith("template")
    assert {name: model["cr"] for name, model in task["models"].items()} == {
        name: CR[name] for name in task["models"]
    }
    found = {
        (name, each["width"]): each
        for name, model in task["models"].items()
        for each in model["budgets"]
    }
    assert {each["length"] for each in found.values()} == {1}
    return found


def cells(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    spread = f"({found['seconds_least']:.2f} to {found['seconds_most']:.2f})"
    seconds = f"{found['seconds']:.2f} {spread}"
    return [f"{100 * found['accuracy']:.1f}", seconds, f"{found['tokens_s']:,}"]


def share(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> str:
    share_of_time = measured[name, chains]["seconds"] / measured["original", chains]["seconds"]
    return f"{share_of_time:.2f}"


def rate(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> float:
    return float(measured[name, chains]["tokens_s"] / measured["original", chains]["tokens_s"])


def tokens(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> float:
    """Return the mean tokens of a chain."""
    found = measured[name, chains]
    return float(found["tokens_s"] * found["seconds"] / (100 * chains))


def overlap(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> bool:
    """Return whether the seconds of repetitions overlap with those of the original."""
    one, other = measured[name, chains], measured["original", chains]
    return bool(
        one["seconds_least"] <= other["seconds_most"]
        and other["seconds_least"] <= one["seconds_most"]
    )


def listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"
