"""The page of seconds quotes the stored records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from research.recipe.report import report_text
from research.recipe.seconds import seconds_text
from tests.research.models_page import page_rows, page_text, record

PAGE = "docs/models/seconds.md"
TASKS = {"GSM8K": "gsm8k", "MATH-500": "math500", "HumanEval": "humaneval"}
MODELS = ("original", "cr4", "cr8")
CHAINS = (1, 4, 16)
CASES = {"Qwen": "qwen25_coder_0_5b_seconds.json", "SmolLM2": "smollm2_135m_seconds.json"}


@pytest.mark.parametrize("model", CASES)
def test_the_page_has_the_numbers_of_the_record(model: str) -> None:
    rows, found = page_rows(PAGE), record(CASES[model])["seconds"]
    titles = [title for title, task in TASKS.items() if task in found]
    assert [name for name in rows if name.startswith(model)] == [
        f"{model}, {title}, {chains}" for title in titles for chains in CHAINS
    ]
    for title in titles:
        measured = _measured(found[TASKS[title]])
        for chains in CHAINS:
            cells = [cell for name in MODELS for cell in _cells(measured.get((name, chains)))]
            assert rows[f"{model}, {title}, {chains}"] == cells


def _measured(task: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the budgets by model and chains, all of them with the settings of the page."""
    given = task["settings"]
    assert (given["problems"], given["repeats"], given["cache_bytes"]) == (100, 3, 256_000_000)
    assert (given["max_num_seqs"], given["sampling"]["top_p"]) == (512, 0.95)
    budgets = {
        (name, each["width"]): each
        for name, model in task["models"].items()
        for each in model["budgets"]
    }
    assert {each["length"] for each in budgets.values()} == {1}
    return budgets


def _cells(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    spread = f"({found['seconds_least']:.2f} to {found['seconds_most']:.2f})"
    seconds = f"{found['seconds']:.2f} {spread}"
    return [f"{100 * found['accuracy']:.1f}", seconds, f"{found['tokens_s']:,}"]


def test_the_page_compares_time_and_accuracy_of_the_record() -> None:
    text, found = page_text(PAGE), record(CASES["Qwen"])["seconds"]
    gsm8k, math500, humaneval = (_measured(found[task]) for task in TASKS.values())
    many, one = "With 16 chains of MATH-500", "With single chains CR 8 takes"
    assert f"{many}, CR 8 takes {_share(math500, 'cr8', 16)} of the original's time" in text
    of_gsm8k, of_humaneval = (
        [_share(measured, name, 16) for name in ("cr4", "cr8")] for measured in (gsm8k, humaneval)
    )
    assert "Of GSM8K CR 4 takes {} and CR 8 {},".format(*of_gsm8k) in text
    assert "fewer than 100 tokens, CR 4 takes {} and CR 8 {}.".format(*of_humaneval) in text
    assert f"{one} {_share(math500, 'cr8', 1)} on MATH-500" in text
    assert all(_overlap(measured, name) for measured in (gsm8k, humaneval) for name in MODELS)
    assert not _overlap(math500, "cr8")
    own, lines = ([_accuracies(gsm8k)[at][name] for name in ("cr4", "cr8")] for at in (0, 1))
    assert "CR 4 and CR 8 solve {} and {} % of GSM8K".format(*own) in text
    assert "original's line in the figure has {} and {} %".format(*lines) in text
    own, lines = _accuracies(math500)
    assert f"CR 8 solves {own['cr8']} %, and the line has {lines['cr8']} %" in text
    own, lines = _accuracies(humaneval)
    assert f"CR 4 passes {own['cr4']} % of HumanEval and CR 8 {own['cr8']} %" in text
    assert f"where the line has {lines['cr4']} and {lines['cr8']} %" in text
    single = [f"{100 * humaneval[name, 1]['accuracy']:.1f}" for name in ("cr8", "original")]
    chains = "At CR 8, {} % of single chains pass HumanEval, and of the original's {} %"
    assert chains.format(*single) in text


def _share(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> str:
    share = measured[name, chains]["seconds"] / measured["original", chains]["seconds"]
    return f"{share:.2f}"


def _overlap(measured: Mapping[tuple[str, int], Any], name: str) -> bool:
    """Return whether the repetitions of single chains overlap with those of the original."""
    one, other = measured[name, 1], measured["original", 1]
    return bool(
        one["seconds_least"] <= other["seconds_most"]
        and other["seconds_least"] <= one["seconds_most"]
    )


def _accuracies(measured: Mapping[tuple[str, int], Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return accuracies of exports with 16 chains, and of the original in the same time.

    Between two budgets the original's accuracy is a line over the logarithm of the time.
    """
    own, line = {}, {}
    budgets = [measured["original", chains] for chains in CHAINS]
    for name in (name for name, chains in measured if chains == 16 and name != "original"):
        export = measured[name, 16]
        own[name] = f"{100 * export['accuracy']:.1f}"
        (at,) = (pair for pair in pairwise(budgets) if _is_between(export["seconds"], *pair))
        share = math.log(export["seconds"] / at[0]["seconds"])
        share /= math.log(at[1]["seconds"] / at[0]["seconds"])
        value = at[0]["accuracy"] + share * (at[1]["accuracy"] - at[0]["accuracy"])
        line[name] = f"{100 * value:.1f}"
    return own, line


def _is_between(seconds: float, low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    return bool(low["seconds"] <= seconds <= high["seconds"])


def test_the_page_compares_time_tokens_and_speed_of_smollm2() -> None:
    text = page_text(PAGE)
    measured = _measured(record(CASES["SmolLM2"])["seconds"]["gsm8k"])
    pairs = [
        (measured[name, chains], measured["original", chains])
        for name in ("cr4", "cr8")
        for chains in (4, 16)
    ]
    times = [one["seconds"] / other["seconds"] for one, other in pairs]
    speeds = [one["tokens_s"] / other["tokens_s"] for one, other in pairs]
    tokens = [time * speed for time, speed in zip(times, speeds, strict=True)]
    assert f"take {min(times):.2f} to {max(times):.2f} of the original's time" in text
    assert f"{min(speeds):.1f} to {max(speeds):.1f} times as many tokens per second" in text
    assert f"{min(tokens):.2f} to {max(tokens):.2f} of its tokens" in text


def test_the_page_has_the_reads_of_the_other_run() -> None:
    points = record("qwen25_coder_0_5b.json")["chains"]["points"]
    reads = {
        (p["task"], p["model"]): p["kv_reads"]
        for p in points
        if (p["chains"], p["length"]) == (16, 1)
    }
    for task, sentence in (
        ("gsm8k", "CR 4 reads {} of the original's KV on GSM8K and CR 8 {},"),
        ("math500", "on MATH-500 {} and {} (in"),
    ):
        shares = [reads[task, name] / reads[task, "original"] for name in ("cr4", "cr8")]
        assert sentence.format(*(f"{share:.2f}" for share in shares)) in page_text(PAGE)


def test_the_page_has_the_tokens_that_a_cache_holds() -> None:
    """Layers, KV heads and head size of the models, keys and values in bf16."""
    text = page_text(PAGE)
    for layers, heads, size in ((24, 2, 64), (30, 3, 64)):
        held = 256_000_000 // (layers * heads * size * 2 * 2)
        assert f"the original holds {held:,} tokens" in text


def test_a_record_of_seconds_alone_prints_no_empty_table() -> None:
    for name in CASES.values():
        found = record(name)
        printed = report_text(found)
        assert seconds_text(found["seconds"]) in printed
        assert "| model |\n" not in printed
        assert "`choices` is the mean" not in printed
