"""The page of seconds quotes the stored records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from dms_train.evaluation.bootstrap import Estimate, ratio
from research.recipe.report import report_text
from research.recipe.seconds import seconds_margins, seconds_text
from tests.research.models_page import QWEN_PAGE, page_rows, page_text, record

PAGE = "docs/models/seconds.md"
TASKS = {"GSM8K": "gsm8k", "MATH-500": "math500", "HumanEval": "humaneval"}
CR = {"original": 1.0, **{f"cr{ratio}": float(ratio) for ratio in (2, 3, 4, 6, 8)}}
EXPORTS = tuple(name for name in CR if name != "original")
MODELS = ("original", "cr4", "cr8")  # of most tables
BASE = ("original", 16)
CHAINS = (1, 4, 16)
CASES = {"Qwen": "qwen25_coder_0_5b_seconds.json", "SmolLM2": "smollm2_135m_seconds.json"}
RATIOS = {  # records of every ratio, by the first words of their rows
    "SmolLM2": CASES["SmolLM2"],
    "every ratio": "qwen25_coder_0_5b_ratios_seconds.json",
}
OWN_TEXT = "qwen25_coder_0_5b_defaults.json"
HUMANEVAL = "qwen25_coder_0_5b_humaneval_seconds.json"  # of another run, with the original


def test_the_page_has_the_numbers_of_qwen() -> None:
    rows, found = page_rows(PAGE), record(CASES["Qwen"])["seconds"]
    assert [name for name in rows if name.startswith("Qwen")] == [
        f"Qwen, {title}, {chains}" for title in TASKS for chains in CHAINS
    ]
    for title, task in TASKS.items():
        measured = _measured(found[task])
        for chains in CHAINS:
            cells = [cell for name in MODELS for cell in _cells(measured.get((name, chains)))]
            assert rows[f"Qwen, {title}, {chains}"] == cells


@pytest.mark.parametrize("first", RATIOS)
def test_the_page_has_the_numbers_of_every_ratio(first: str) -> None:
    rows, found = page_rows(PAGE), record(RATIOS[first])["seconds"]
    assert set(found) == {"gsm8k"}
    measured = _measured(found["gsm8k"])
    titles = {name: f"{first}, " + name.replace("cr", "CR ") for name in CR}
    assert [name for name in rows if name.startswith(first)] == list(titles.values())
    for name, title in titles.items():
        assert rows[title] == [cell for n in CHAINS for cell in _cells(measured[name, n])]


def test_humaneval_at_cr_4_is_that_of_another_run() -> None:
    rows, text = page_rows(PAGE), page_text(PAGE)
    measured = _measured(record(HUMANEVAL)["seconds"]["humaneval"])
    assert {name for name, _ in measured} == {"original", "cr4"}
    for chains in CHAINS:
        cells = [cell for name in ("original", "cr4") for cell in _cells(measured[name, chains])]
        assert rows[f"own run, HumanEval, {chains}"] == cells
    assert (
        f"CR 4 takes {_share(measured, 'cr4', 16)} in its own run. With 1 and 4 chains the ranges"
        in text
    )
    assert [_overlap(measured, "cr4", chains) for chains in CHAINS] == [True, True, False]
    own, line = _accuracies(measured)
    assert f"In the run of CR 4 it solves {own['cr4']} %, and the original {line['cr4']} %" in text
    _check_difference_is_small(own["cr4"], line["cr4"])
    other = _measured(record(CASES["Qwen"])["seconds"]["humaneval"])
    lengths = [_tokens(found, *key) for found in (measured, other) for key in found]
    assert f"Answers have {min(lengths):.0f} to {max(lengths):.0f} tokens on average" in text
    times = [f"{found['original', 16]['seconds']:.2f} s" for found in (other, measured)]
    assert f"with 16 chains took {times[0]} in one and {times[1]} in the other." in text
    found = record(HUMANEVAL)
    measured_at = f"{found['commit'][:7]}, {found['date']} (CR 4 on HumanEval)."
    assert f"Measured at: 428f50f, 2026-11-30, and {measured_at}" in text
    assert found["trainings"]["train"]["tokens_of_held_exports"] == 0  # no ratio on the way


def _measured(task: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the budgets by model and chains, all of them with the settings of the page."""
    given = task["settings"]
    assert (given["problems"], given["repeats"], given["cache_bytes"]) == (100, 3, 256_000_000)
    assert (given["max_num_seqs"], given["policy"]) == (512, {"name": "auto"})
    assert (given["sampling"]["temperature"], given["sampling"]["top_p"]) == (0.7, 0.95)
    assert given["prompt_format"].startswith("template")
    assert {name: model["cr"] for name, model in task["models"].items()} == {
        name: CR[name] for name in task["models"]
    }
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


@pytest.mark.parametrize("name", sorted({*CASES.values(), *RATIOS.values()}))
def test_the_page_names_where_the_record_was_measured(name: str) -> None:
    found, text = record(name), page_text(PAGE)
    assert found["device"] == "NVIDIA H200"
    assert text.count(f"Measured at: {found['commit'][:7]}, {found['date']}") == 1
    header = "| task, chains | original: solved, % | seconds | tokens/s | CR 4: solved, %"
    assert text.count(header) == 2  # that of Qwen, and HumanEval at CR 4
    columns = "{}: solved, % | seconds | tokens/s"
    header = " | ".join(columns.format(n) for n in ("1 chain", "4 chains", "16 chains"))
    assert text.count(f"| GSM8K | {header} |") == len(RATIOS) + 1  # and the own text


def test_the_page_has_the_settings_of_the_record() -> None:
    settings = record(CASES["Qwen"])["seconds"]["gsm8k"]["settings"]
    assert (
        f"The original and [exports of DMS](../models.md) answer the first {settings['problems']} "
        "problems of a task with the same bytes of cache. The problems are submitted together, and "
        "as many chains run at the same time as fit into "
        f"{settings['cache_bytes'] / 1e6:.0f} MB, at most {settings['max_num_seqs']}. Chains have "
        f"at most 1,024 tokens, sampled at temperature {settings['sampling']['temperature']} with "
        f"`top_p={settings['sampling']['top_p']}`; a chain that is cut off is wrong. Seconds are "
        "the median of three repetitions"
    ) in page_text(PAGE)


def test_the_page_compares_time_and_speed_of_the_record() -> None:
    text, found = page_text(PAGE), record(CASES["Qwen"])["seconds"]
    gsm8k, math500, humaneval = (_measured(found[task]) for task in TASKS.values())
    for measured in (math500, gsm8k):
        assert (
            f"With 16 chains CR 4 takes {_share(measured, 'cr4', 16)} of the original's time and "
            f"CR 8 {_share(measured, 'cr8', 16)}. They generate {_faster(measured, 'cr4')} and "
            f"{_faster(measured, 'cr8')} times as many tokens per second."
        ) in text
    exports = [(name, chains) for name in ("cr4", "cr8") for chains in CHAINS]
    assert not any(_overlap(math500, *export) for export in exports)
    assert not any(_overlap(gsm8k, name, 16) for name in ("cr4", "cr8"))
    assert f"CR 8 takes {_share(humaneval, 'cr8', 16)} of the original's time" in text
    assert [_overlap(humaneval, "cr8", chains) for chains in CHAINS] == [True, True, False]


def test_the_page_has_the_margins_at_equal_seconds() -> None:
    def of(name: str, task: str) -> dict[str, str]:
        margins = seconds_margins(record(name)["seconds"][task])
        assert all(margin.interval is None for margin in margins)  # of records without scores
        return {margin.first: f"{margin.value:+.1f}" for margin in margins}

    gsm8k, math500, humaneval = (of(CASES["Qwen"], task) for task in TASKS.values())
    every = of("qwen25_coder_0_5b_ratios_seconds.json", "gsm8k")
    own = of(HUMANEVAL, "humaneval")["cr4"]
    assert list(every) == [f"cr{ratio}" for ratio in (2, 3, 4, 6, 8)]
    *values, last = every.values()
    assert (
        f"GSM8K {gsm8k['cr4']} points at CR 4 and {gsm8k['cr8']} at CR 8, MATH-500 "
        f"{math500['cr4']} and {math500['cr8']}, HumanEval {own} (CR 4, in its own run) and "
        f"{humaneval['cr8']}. [At every ratio](#gsm8k-at-every-ratio) GSM8K has "
        f"{', '.join(values)} and {last} from CR 2 to CR 8."
    ) in page_text(PAGE)


def test_the_page_has_the_seconds_of_the_own_text() -> None:
    rows, text, found = page_rows(PAGE), page_text(PAGE), record(OWN_TEXT)
    gsm8k = found["seconds"]["gsm8k"]
    measured = _measured(gsm8k)
    for name, title in (("original", "original"), ("cr4", "CR 4")):
        assert rows[f"own text, {title}"] == [
            cell for chains in CHAINS for cell in _cells(measured[name, chains])
        ]
    shares = _listed([_share(measured, "cr4", chains) for chains in CHAINS])
    rates = _listed([f"{_rate(measured, 'cr4', chains):.2f}" for chains in CHAINS])
    assert [_overlap(measured, "cr4", chains) for chains in CHAINS] == [True, True, False]
    tokens = [_tokens(measured, "cr4", n) / _tokens(measured, "original", n) for n in CHAINS]
    own, original = (
        "{:.1f} % [{:.1f}, {:.1f}]".format(
            *(
                100 * measured[name, 16][key]
                for key in ("accuracy", "accuracy_low", "accuracy_high")
            )
        )
        for name in ("cr4", "original")
    )
    ((export, value, interval),) = [
        (margin.first, margin.value, margin.interval) for margin in seconds_margins(gsm8k)
    ]
    assert export == "cr4"
    assert interval is not None
    assert interval[0] < 0 < interval[1]
    gained = f"+{value:.1f} [{interval[0]:+.1f}, {interval[1]:+.1f}]"
    more = [_more_solved(measured, "cr4", chains) for chains in CHAINS]
    assert all(each.low < 0 < each.high for each in more)
    points = [f"{each.value:+.1f} [{each.low:+.1f}, {each.high:+.1f}]" for each in more]
    for sentence in (
        f"With 1, 4 and 16 chains CR 4 takes {shares} of the original's time, with {rates} times",
        "The ranges of seconds overlap with 1 and 4 chains. Answers have "
        f"{min(tokens):.2f} to {max(tokens):.2f} of the original's tokens.",
        f"of 16 chains is {own} at CR 4, and {original} of the original. The differences with 1, 4 "
        f"and 16 chains are {_listed(points)} points, paired over problems.",
        f"the margin of CR 4 is {gained} points, and its interval includes 0. It is the area "
        "between the Pareto frontiers over 1, 4 and 16 chains",
        f"On GSM8K CR 4 of [the recipe's own text](#the-recipes-own-text) has {gained}.",
        f"Measured at: {found['commit'][:7]}, {found['date']}. ## SmolLM2",
    ):
        assert sentence in text
    values = [each.value for each in more]
    assert (
        f"for 100 problems CR 4 solves {min(values):.1f} to {max(values):.1f} points more than the "
        "original, with intervals that include 0."
    ) in page_text(QWEN_PAGE)


def _more_solved(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> Estimate:
    """Return how many points more than the original a model solves, paired over problems."""
    pairs = zip(
        measured[name, chains]["scores"], measured["original", chains]["scores"], strict=True
    )
    points = [100 * (own - original) for own, original in pairs]
    return ratio(points, [1.0] * len(points))


def test_the_page_quotes_the_times_of_the_engine_before() -> None:
    found = record("qwen25_coder_0_5b_earlier_seconds.json")
    gsm8k, math500 = (_measured(found["seconds"][task]) for task in ("gsm8k", "math500"))
    assert found["commit"].startswith("87706e0")
    assert (
        f"at 87706e0, the original took {gsm8k['original', 16]['seconds']:.2f} s for GSM8K and "
        f"{math500['original', 16]['seconds']:.2f} s for MATH-500 with 16 chains. The CR 8 of "
        f"another training of the same recipe took {gsm8k['cr8', 16]['seconds']:.2f} and "
        f"{math500['cr8', 16]['seconds']:.2f} s."
    ) in page_text(PAGE)


def test_the_page_compares_accuracy_at_equal_time() -> None:
    text, found = page_text(PAGE), record(CASES["Qwen"])["seconds"]
    gsm8k, math500, humaneval = (_accuracies(_measured(found[task])) for task in TASKS.values())
    (own, line), (math_own, math_line), (code_own, code_line) = gsm8k, math500, humaneval
    assert (
        f"CR 4 and CR 8 solve {own['cr4']} and {own['cr8']} % of GSM8K, and the original "
        f"{line['cr4']} and {line['cr8']} % in these times. They solve {math_own['cr4']} and "
        f"{math_own['cr8']} % of MATH-500, and the original {math_line['cr4']} and "
        f"{math_line['cr8']} %. CR 8 solves {code_own['cr8']} % of HumanEval, and the original "
        f"{code_line['cr8']} %."
    ) in text
    # the standard error of a share of 100 problems is largest at one half
    most = 100 * math.sqrt(0.25 / 100)
    assert f"standard error is up to {most:.0f} points" in text
    for one, other in (gsm8k, math500, humaneval):
        for name in one:
            _check_difference_is_small(one[name], other[name])
    assert "Each difference is smaller than its standard error." in text


def test_the_page_compares_the_text_of_two_trainings() -> None:
    text, found = page_text(PAGE), record(CASES["Qwen"])
    here, there = (
        {m["name"]: m["perplexity"]["continuation"] for m in models if "perplexity" in m}
        for models in (found["models"], record("qwen25_coder_0_5b.json")["models"])
    )
    assert here["original"] == there["original"]
    values = [f"{here[name]['perplexity']:.2f}" for name in MODELS]
    values += [f"{there[name]['perplexity']:.2f}" for name in ("cr4", "cr8")]
    values += [f"{m[name]['cr_factor']:.1f}" for m in (here, there) for name in ("cr4", "cr8")]
    assert (
        "The perplexity of continuations is {} for the original, {} at CR 4 and {} at CR 8, where "
        "the other run has {} and {}. The ratios on this text are {} and {}, and {} and {} there."
    ).format(*values) in text
    humaneval = _measured(found["seconds"]["humaneval"])
    single = [f"{100 * humaneval[name, 1]['accuracy']:.1f}" for name in ("cr8", "original")]
    assert ("At CR 8 {} % of single chains pass HumanEval, and {} % of the original's do.").format(
        *single
    ) in text


def _share(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> str:
    share = measured[name, chains]["seconds"] / measured["original", chains]["seconds"]
    return f"{share:.2f}"


def _faster(measured: Mapping[tuple[str, int], Any], name: str) -> str:
    return f"{_rate(measured, name, 16):.2f}"


def _tokens(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> float:
    """Return the mean tokens of a chain."""
    found = measured[name, chains]
    return float(found["tokens_s"] * found["seconds"] / (100 * chains))


def _overlap(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> bool:
    """Return whether the seconds of repetitions overlap with those of the original."""
    one, other = measured[name, chains], measured["original", chains]
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


def _check_difference_is_small(*percent: str) -> None:
    """Check that two shares of 100 problems differ less than the standard error of that."""
    shares = [float(share) / 100 for share in percent]
    error = math.sqrt(sum(share * (1 - share) / 100 for share in shares))
    assert abs(shares[0] - shares[1]) < error


def _is_between(seconds: float, low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    return bool(low["seconds"] <= seconds <= high["seconds"])


def test_the_page_compares_time_tokens_and_speed_of_smollm2() -> None:
    text = page_text(PAGE)
    measured = _measured(record(CASES["SmolLM2"])["seconds"]["gsm8k"])
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
    overlaps = {n: {_overlap(measured, name, n) for name in exports} for n in CHAINS}
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
    shares = {n: _listed([_share(measured, name, n) for name in EXPORTS]) for n in CHAINS}
    rates = {n: [_rate(measured, name, n) for name in EXPORTS] for n in CHAINS}
    faster = {n: _listed([f"{rate:.2f}" for rate in rates[n]]) for n in CHAINS}
    tokens = [_tokens(measured, name, 16) / _tokens(measured, *BASE) for name in EXPORTS]
    changes = [max(at, 1 / at) for at in tokens]
    assert max(changes[1:]) < min(rates[16][1:])
    assert _share(measured, "cr8", 16) == _share(measured, "cr6", 16)
    overlaps = {n: [_overlap(measured, name, n) for name in EXPORTS] for n in CHAINS}
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
        f"{min(tokens):.2f} to {max(tokens):.2f} of the original's tokens (seconds times "
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
    runs = (_measured(record(CASES["Qwen"])["seconds"]["gsm8k"]), measured)
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
    text, found = page_text(PAGE), record(RATIOS["every ratio"])
    texts = {m["name"]: m["perplexity"]["continuation"] for m in found["models"]}
    perplexities = [f"{texts[name]['perplexity']:.2f}" for name in EXPORTS]
    ratios = [f"{texts[name]['cr_factor']:.1f}" for name in EXPORTS]
    for sentence in (
        f"have a perplexity of continuations of {_listed(perplexities)} at the ratios "
        f"{_listed(ratios)}. That of the original is {texts['original']['perplexity']:.2f}.",
        "Except for [GSM8K at every ratio](#gsm8k-at-every-ratio) and [the recipe's own "
        "text](#the-recipes-own-text), other work used the second GPU",
        "Nothing else used the host",
        "CR 2, 3 and 6 were measured [on GSM8K alone](#gsm8k-at-every-ratio).",
        f"recipe --table research/results/nvidia_h200/{RATIOS['every ratio']} #",
    ):
        assert sentence in text
    shares = [
        100 * each["accuracy"]
        for each in record(CASES["SmolLM2"])["seconds"]["gsm8k"]["models"]["original"]["budgets"]
    ]
    solved = f"solves {min(shares):.0f} to {max(shares):.0f} % of GSM8K]"
    assert f"SmolLM2 [{solved}(models/seconds.md" in page_text("docs/models.md")
    times = re.findall(r"took (\d+) s from start to end. That of the training took (\d+) s", text)
    minutes = sum(map(int, *times)) / 60
    assert f"the two commands took {minutes:.0f} minutes in all" in page_text(QWEN_PAGE)
    claim = "at CR 3 and more take less time with 16 chains of a problem, and at equal time no gain"
    assert claim in page_text("docs/science.md")


def _every_ratio() -> dict[tuple[str, int], dict[str, Any]]:
    return _measured(record(RATIOS["every ratio"])["seconds"]["gsm8k"])


def _rate(measured: Mapping[tuple[str, int], Any], name: str, chains: int) -> float:
    return float(measured[name, chains]["tokens_s"] / measured["original", chains]["tokens_s"])


def _listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def test_the_page_says_on_which_tasks_equal_reads_solve_more() -> None:
    margins = record("qwen25_coder_0_5b.json")["chains"]["margins"]
    least = {m["task"]: m["interval"][0] for m in margins if m["cost"] == "KV reads"}
    assert {task for task, low in least.items() if low > 0} == {"MATH 500", "HumanEval"}
    assert least["GSM8K"] <= 0
    text = page_text(PAGE)
    assert "solve more of MATH-500 and HumanEval than the original. The interval of GSM8K" in text


def test_the_page_has_the_tokens_that_a_cache_holds() -> None:
    """Layers, KV heads and head size of the models, keys and values in bf16."""
    text = page_text(PAGE)
    for layers, heads, size in ((24, 2, 64), (30, 3, 64)):
        held = 256_000_000 // (layers * heads * size * 2 * 2)
        assert f"holds at most {held:,} tokens of the original" in text


def test_a_record_of_seconds_alone_prints_no_empty_table() -> None:
    for model, legend in (("Qwen", True), ("SmolLM2", False)):
        found = record(CASES[model])
        printed = report_text(found)
        assert seconds_text(found["seconds"]) in printed
        assert "| model |\n" not in printed
        assert ("`choices` is the mean" in printed) == legend
