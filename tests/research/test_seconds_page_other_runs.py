"""The page of seconds quotes the records of other runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import pytest

from research.recipe.seconds import seconds_margins
from tests.research.models_page import QWEN_PAGE, page_rows, page_text, record
from tests.research.seconds_page import (
    CHAINS,
    CR,
    EVERY_RATIO,
    MODELS,
    PAGE,
    QUESTIONS,
    SMOLLM2,
    TASKS,
    budgets,
    cells,
    listed,
    overlap,
    rate,
    share,
    tokens,
)

EXPORTS = tuple(name for name in CR if name != "original")
BASE = ("original", 16)
RATIOS = {"SmolLM2": SMOLLM2, "every ratio": EVERY_RATIO}  # by the first words of their rows


def test_the_page_has_the_numbers_with_questions() -> None:
    rows, found = page_rows(PAGE), record(QUESTIONS)["seconds"]
    assert [name for name in rows if name.startswith("with questions")] == [
        f"with questions, {title}, {chains}" for title in TASKS for chains in CHAINS
    ]
    for title, task in TASKS.items():
        measured = budgets(found[task])
        for chains in CHAINS:
            row = [cell for name in MODELS for cell in cells(measured.get((name, chains)))]
            assert rows[f"with questions, {title}, {chains}"] == row


def test_the_page_compares_time_and_speed_with_questions() -> None:
    found = record(QUESTIONS)["seconds"]
    gsm8k, math500, humaneval = (budgets(found[task]) for task in TASKS.values())
    shares = [share(of, name, 16) for of in (gsm8k, math500) for name in ("cr4", "cr8")]
    rates = [rate(of, name, 16) for of in (gsm8k, math500) for name in ("cr4", "cr8")]
    shares.append(share(humaneval, "cr8", 16))
    rates.append(rate(humaneval, "cr8", 16))
    assert (
        "With 16 chains CR 4 and CR 8 take {} and {} of the original's time for GSM8K, and {} and "
        "{} for MATH-500. CR 8 takes {} for HumanEval.".format(*shares)
        + " They generate {:.2f} and {:.2f}, {:.2f} and {:.2f}, and {:.2f} times as many tokens "
        "per second.".format(*rates)
    ) in page_text(PAGE)


def test_the_page_has_the_margins_without_intervals() -> None:
    def of(name: str, task: str) -> dict[str, str]:
        margins = seconds_margins(record(name)["seconds"][task])
        assert all(margin.interval is None for margin in margins)  # of records without scores
        return {margin.first: f"{margin.value:+.1f}" for margin in margins}

    gsm8k, math500, humaneval = (of(QUESTIONS, task) for task in TASKS.values())
    every = of(EVERY_RATIO, "gsm8k")
    assert tuple(every) == EXPORTS
    assert (
        f"are {gsm8k['cr4']} and {gsm8k['cr8']} points of GSM8K, {math500['cr4']} and "
        f"{math500['cr8']} of MATH-500, and {humaneval['cr8']} of HumanEval at CR 8. [At every "
        f"ratio](#gsm8k-at-every-ratio) GSM8K has {listed(list(every.values()))} from CR 2 to CR 8."
    ) in page_text(PAGE)


def test_the_page_describes_the_exports_with_questions() -> None:
    models = record(QUESTIONS)["models"]
    found = {m["name"]: m["perplexity"]["continuation"] for m in models if "perplexity" in m}
    original, cr4, cr8 = (f"{found[name]['perplexity']:.2f}" for name in MODELS)
    ratios = [f"{found[name]['cr_factor']:.1f}" for name in ("cr4", "cr8")]
    assert (
        f"have a perplexity of continuations of {cr4} at CR 4 and {cr8} at CR 8, where the "
        f"original has {original}. The ratios on this text are {ratios[0]} and {ratios[1]}."
    ) in page_text(PAGE)


@pytest.mark.parametrize("first", RATIOS)
def test_the_page_has_the_numbers_of_every_ratio(first: str) -> None:
    rows, found = page_rows(PAGE), record(RATIOS[first])["seconds"]
    assert set(found) == {"gsm8k"}
    measured = budgets(found["gsm8k"])
    titles = {name: f"{first}, " + name.replace("cr", "CR ") for name in CR}
    assert [name for name in rows if name.startswith(first)] == list(titles.values())
    for name, title in titles.items():
        assert rows[title] == [cell for n in CHAINS for cell in cells(measured[name, n])]


def test_the_page_compares_time_tokens_and_speed_of_smollm2() -> None:
    text = page_text(PAGE)
    measured = budgets(record(SMOLLM2)["seconds"]["gsm8k"])
    exports = [name for name in CR if name != "original"]
    ratio = {
        (name, key, chains): measured[name, chains][key] / measured["original", chains][key]
        for name, key, chains in product(exports, ("seconds", "tokens_s"), CHAINS)
    }

    def range_of(key: str, chains: int) -> str:
        found = [ratio[name, key, chains] for name in exports]
        return f"{min(found):.2f} to {max(found):.2f}"

    for name, chains in product(exports, CHAINS):
        rate = ratio[name, "tokens_s", chains]
        ratio[name, "tokens", chains] = ratio[name, "seconds", chains] * rate
    times = [ratio[name, "seconds", 16] for name in exports]
    speeds = [ratio[name, "tokens_s", 16] for name in exports]
    assert (times[0], speeds[0], speeds[-1]) == (max(times), min(speeds), max(speeds))
    shorter = [ratio[name, "tokens", 16] * ratio[name, "tokens_s", 16] < 1 for name in exports]
    assert shorter == [True, True, True, True, False]  # than the higher rate saves
    overlaps = {n: {overlap(measured, name, n) for name in exports} for n in CHAINS}
    assert overlaps == {1: {True}, 4: {False}, 16: {False}}
    last = {name: measured[name, 16] for name in exports[1:]}
    seconds = {name: each["seconds"] for name, each in last.items()}
    assert min(seconds, key=seconds.__getitem__) == "cr6"
    ends = last["cr6"]["seconds_most"]
    assert [name for name, each in last.items() if each["seconds_least"] <= ends] == ["cr3", "cr6"]
    for sentence in (
        f"CR 2 takes {times[0]:.2f} of the original's time, and CR 3 to CR 8 take "
        f"{min(times[1:]):.2f} to {max(times[1:]):.2f}. They generate {speeds[0]:.2f} (CR 2) to "
        f"{speeds[-1]:.2f} times (CR 8) as many tokens per second. Their answers have "
        f"{range_of('tokens', 16)} of the original's tokens (seconds times tokens/s). At CR 2, 3, "
        "4 and 6 the shorter "
        "answers save more time than the higher rate, at CR 8 less.",
        f"**4 chains** take {range_of('seconds', 4)} of the original's time, with "
        f"{range_of('tokens_s', 4)} times as many tokens per second and {range_of('tokens', 4)} "
        f"of its tokens. With one chain they generate {range_of('tokens_s', 1)} times as many "
        "tokens per second. With 4 and 16 chains no range of seconds overlaps with the original's; "
        "with one chain all do.",
        f"with 16 chains differ by at most {max(seconds.values()) - min(seconds.values()):.1f} s. "
        "The shortest is that of CR 6, not separated from CR 3, and CR 8 has the most tokens per",
    ):
        assert sentence in text


def test_the_page_compares_times_of_qwen_at_every_ratio() -> None:
    text, measured = page_text(PAGE), _every_ratio()
    shares = {n: listed([share(measured, name, n) for name in EXPORTS]) for n in CHAINS}
    rates = {n: [rate(measured, name, n) for name in EXPORTS] for n in CHAINS}
    faster = {n: listed([f"{rate:.2f}" for rate in rates[n]]) for n in CHAINS}
    lengths = [tokens(measured, name, 16) / tokens(measured, *BASE) for name in EXPORTS]
    changes = [max(at, 1 / at) for at in lengths]
    assert max(changes[1:]) < min(rates[16][1:])
    assert share(measured, "cr8", 16) == share(measured, "cr6", 16)
    overlaps = {n: [overlap(measured, name, n) for name in EXPORTS] for n in CHAINS}
    assert overlaps == {
        1: [True] * 5,
        4: [True, True, False, False, False],
        16: [True, False, False, False, False],
    }
    apart = measured["original", 4]["seconds_least"] - measured["cr4", 4]["seconds_most"]
    for sentence in (
        f"**16 chains.** CR 2, 3, 4, 6 and 8 take {shares[16]} of the original's time. They "
        f"generate {faster[16]} times as many tokens per second. The range of seconds of CR 2 "
        "overlaps with the original's, and no other does. Answers have "
        f"{min(lengths):.2f} to {max(lengths):.2f} of the original's tokens (seconds times "
        "tokens/s), which changes the time less than the rates of CR 3 to CR 8 do. CR 8 takes as "
        "long as CR 6. - **4 chains.** The same ratios take "
        f"{shares[4]} of the original's time, with {faster[4]} times as many tokens per second. "
        "The ranges of CR 2 and CR 3 overlap with the original's. That of CR 4 ends "
        f"{apart:.2f} s below it. - **One chain** takes {shares[1]} of the original's time, with "
        f"{faster[1]} times as many tokens per second. All ranges overlap with the original's. -",
    ):
        assert sentence in text


def test_the_page_compares_accuracy_of_qwen_at_every_ratio() -> None:
    text, measured = page_text(PAGE), _every_ratio()
    own, line = _accuracies(measured)
    original = f"{100 * measured[BASE]['accuracy']:.1f}"
    for name in EXPORTS:
        _check_difference_is_small(own[name], line[name])
        _check_difference_is_small(own[name], original)
    solved, at = (sorted(map(float, found.values())) for found in (own, line))
    runs = (budgets(record(QUESTIONS)["seconds"]["gsm8k"]), measured)
    times = [f"{run[name, 16]['seconds']:.2f}" for name in MODELS for run in runs]
    again = [f"{100 * run[name, 16]['accuracy']:.1f}" for name in ("cr8", "cr4") for run in runs]
    for sentence in (
        f"With 16 chains the exports solve {solved[0]} to {solved[-1]} %, and the original "
        f"{original} %. In the time of an export the original solves {at[0]} to {at[-1]} %. All "
        "of these differences are smaller than their standard errors.",
        "The run above trained its own exports, and its host was busy. There and here the "
        "original's 16 chains took {} and {} s, those of CR 4 "
        "{} and {} s, and those of CR 8 {} and {} s.".format(*times),
        "CR 8 solved {} and {} %, and CR 4 {} and {} %.".format(*again),
    ):
        assert sentence in text


def test_the_page_describes_the_run_of_every_ratio() -> None:
    text, found = page_text(PAGE), record(EVERY_RATIO)
    texts = {m["name"]: m["perplexity"]["continuation"] for m in found["models"]}
    perplexities = [f"{texts[name]['perplexity']:.2f}" for name in EXPORTS]
    ratios = [f"{texts[name]['cr_factor']:.1f}" for name in EXPORTS]
    for sentence in (
        f"have a perplexity of continuations of {listed(perplexities)} at the ratios "
        f"{listed(ratios)}. That of the original is {texts['original']['perplexity']:.2f}.",
        "newly sampled text, measured all of its exports. Nothing else used the host:",
    ):
        assert sentence in text
    shares = [
        100 * each["accuracy"]
        for each in record(SMOLLM2)["seconds"]["gsm8k"]["models"]["original"]["budgets"]
    ]
    solved = f"solves {min(shares):.0f} to {max(shares):.0f} % of GSM8K]"
    assert f"SmolLM2 [{solved}(models/seconds.md" in page_text("docs/models.md")
    times = re.findall(r"took (\d+) s from start to end. That of the training took (\d+) s", text)
    minutes = sum(map(int, *times)) / 60
    assert f"the two commands took {minutes:.0f} minutes in all" in page_text(QWEN_PAGE)


def _every_ratio() -> dict[tuple[str, int], dict[str, Any]]:
    return budgets(record(EVERY_RATIO)["seconds"]["gsm8k"])


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


def _check_difference_is_small(*percent: str) -> None:
    """Check that two shares of 100 problems differ less than the standard error of that."""
    shares = [float(share) / 100 for share in percent]
    error = math.sqrt(sum(share * (1 - share) / 100 for share in shares))
    assert abs(shares[0] - shares[1]) < error


def _is_between(seconds: float, low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    return bool(low["seconds"] <= seconds <= high["seconds"])
