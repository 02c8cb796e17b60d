"""The page of seconds quotes the record of the recipe's own text."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from dms_train.evaluation.analysis.comparison import Margin
from dms_train.evaluation.bootstrap import Estimate, ratio
from research.recipe.report import report_text
from research.recipe.seconds import seconds_margins, seconds_text
from tests.research.models_page import PAGE as MODELS_PAGE
from tests.research.models_page import QWEN_PAGE, page_rows, page_text, record
from tests.research.seconds_page import (
    CHAINS,
    EVERY_RATIO,
    MODELS,
    OWN_TEXT,
    PAGE,
    QUESTIONS,
    SMOLLM2,
    TASKS,
    budgets,
    cells,
    overlap,
    rate,
    share,
    tokens,
)

EXPORTS = ("cr4", "cr8")


def test_the_page_has_the_numbers_of_the_own_text() -> None:
    rows = page_rows(PAGE)
    assert [name for name in rows if name.startswith("Qwen")] == [
        f"Qwen, {title}, {chains}" for title in TASKS for chains in CHAINS
    ]
    for title in TASKS:
        measured = _own(title)
        for chains in CHAINS:
            assert rows[f"Qwen, {title}, {chains}"] == [
                cell for name in MODELS for cell in cells(measured[name, chains])
            ]


def _own(title: str) -> dict[tuple[str, int], dict[str, Any]]:
    return budgets(record(OWN_TEXT)["seconds"][TASKS[title]])


@pytest.mark.parametrize("name", [OWN_TEXT, QUESTIONS, EVERY_RATIO, SMOLLM2])
def test_the_page_names_where_the_record_was_measured(name: str) -> None:
    found, text = record(name), page_text(PAGE)
    assert found["device"] == "NVIDIA H200"
    assert text.count(f"Measured at: {found['commit'][:7]}, {found['date']}.") == 1
    assert f"recipe --table research/results/nvidia_h200/{name} " in text


def test_the_page_has_the_settings_of_the_record() -> None:
    settings = record(OWN_TEXT)["seconds"]["gsm8k"]["settings"]
    # the standard error of a share of 100 problems is largest at one half
    most = 100 * math.sqrt(0.25 / settings["problems"])
    assert (
        f"The original and [exports of DMS](../models.md) answer the first {settings['problems']} "
        "problems of a task with the same bytes of cache. The problems are submitted together, and "
        "as many chains run at the same time as fit into "
        f"{settings['cache_bytes'] / 1e6:.0f} MB, at most {settings['max_num_seqs']}. Chains have "
        f"at most 1,024 tokens, sampled at temperature {settings['sampling']['temperature']} with "
        f"`top_p={settings['sampling']['top_p']}`; a chain that is cut off is wrong. Seconds are "
        "the median of three repetitions with other seeds, with minimum and maximum in "
        "parentheses, and do not include the comparison of answers. Accuracy is the mean over the "
        f"repetitions. Its standard error is up to {most:.0f} points."
    ) in page_text(PAGE)


def test_the_exports_are_those_of_the_other_record() -> None:
    """The record of the run that trained them has the same scores of GSM8K, and its margin."""
    found = record("qwen25_coder_0_5b_defaults.json")
    assert found["trainings"] == record(OWN_TEXT)["trainings"]
    there, here = budgets(found["seconds"]["gsm8k"]), _own("GSM8K")
    assert {name for name, _ in there} == {"original", "cr4"}
    assert all(each["scores"] == here[key]["scores"] for key, each in there.items())
    times = [f"{there[name, 16]['seconds']:.2f}" for name in ("original", "cr4")]
    (margin,) = seconds_margins(found["seconds"]["gsm8k"])
    assert (
        "Every problem has the same score there, and 16 chains took {} and {} s; the margin of "
        f"CR 4 was {_margin(margin)}."
    ).format(*times) in page_text(PAGE)
    assert f"their run](qwen25_coder.md#the-recipes-own-text) ({found['commit'][:7]})." in (
        page_text(PAGE)
    )


def test_the_page_compares_time_and_speed() -> None:
    text, measured = page_text(PAGE), {title: _own(title) for title in TASKS}
    shares = {t: [share(measured[t], name, 16) for name in EXPORTS] for t in TASKS}
    rates = {t: [f"{rate(measured[t], name, 16):.2f}" for name in EXPORTS] for t in TASKS}
    gsm8k, math500, humaneval = (" and ".join(shares[title]) for title in TASKS)
    one, two, three = (" and ".join(rates[title]) for title in TASKS)
    single = " and ".join(share(measured["GSM8K"], name, 1) for name in EXPORTS)
    assert (
        f"With 16 chains CR 4 and CR 8 take {gsm8k} of the original's time for GSM8K, {math500} "
        f"for MATH-500, and {humaneval} for HumanEval. They generate {one}, {two}, and {three} "
        "times as many tokens per second. No range of these seconds overlaps with the original's. "
        "With 1 and 4 chains none does for MATH-500, nor for CR 8 with 4 chains of GSM8K, and all "
        f"others do. One chain of GSM8K takes {single} of the original's time."
    ) in text
    apart = {
        (title, name, chains)
        for title, name, chains in product(TASKS, EXPORTS, CHAINS)
        if not overlap(measured[title], name, chains)
    }
    assert apart == {
        *((title, name, 16) for title, name in product(TASKS, EXPORTS)),
        *(("MATH-500", name, chains) for name, chains in product(EXPORTS, (1, 4))),
        ("GSM8K", "cr8", 4),
    }
    every = sorted(
        (float(s), t, name) for t in TASKS for name, s in zip(EXPORTS, shares[t], strict=True)
    )
    assert [(each[1], each[2]) for each in (every[0], every[-1])] == [
        ("MATH-500", "cr8"),
        ("HumanEval", "cr4"),
    ]
    assert (
        f"take {every[0][0]:.2f} (CR 8, MATH-500) to {every[-1][0]:.2f} (CR 4, HumanEval) of the "
        "original's time."
    ) in page_text(MODELS_PAGE)
    claim = f"take {every[0][0]:.2f} to {every[-1][0]:.2f} of the original's time with 16 chains"
    assert claim in page_text("CHANGELOG.md")
    assert "With 16 chains CR 4 takes less time, and none of its losses is separated from 0" in text


def test_the_page_compares_the_length_of_answers() -> None:
    length = {
        (title, name, chains): tokens(measured, name, chains) / tokens(measured, "original", chains)
        for title in TASKS
        for measured in [_own(title)]
        for name, chains in product(EXPORTS, CHAINS)
    }
    short = [length.pop(("GSM8K", "cr8", chains)) for chains in CHAINS]
    assert short[-1] < 1 / rate(_own("GSM8K"), "cr8", 16)
    assert (
        f"Answers of CR 8 to GSM8K have {min(short):.2f} to {max(short):.2f} of the original's "
        "tokens (seconds times tokens/s). With 16 chains this saves more time than the higher rate "
        f"does. All others have {min(length.values()):.2f} to {max(length.values()):.2f} times as "
        "many."
    ) in page_text(PAGE)


def test_the_page_has_the_differences_and_margins() -> None:
    rows = page_rows(PAGE)
    for title in TASKS:
        for chains in CHAINS:
            cells_of = [_points(_difference(title, name, chains)) for name in EXPORTS]
            assert rows[f"difference, {title}, {chains}"] == cells_of
        assert rows[f"margin, {title}"] == [_margin(margin) for margin in _margins(title)]


def test_the_pages_say_which_losses_are_separated() -> None:
    found = {key: _difference(*key) for key in product(TASKS, EXPORTS, CHAINS)}
    lost = {key for key, each in found.items() if each.high < 0}
    assert lost == {("GSM8K", "cr8", 16), *(("HumanEval", "cr8", chains) for chains in CHAINS)}
    assert all(each.low <= 0 <= each.high for key, each in found.items() if key not in lost)
    rest = [each.value for key, each in found.items() if key[1] == "cr8" and key not in lost]
    assert (
        "All nine intervals of CR 4 include 0. CR 8 solves fewer of HumanEval at every number of "
        "chains, and of GSM8K with 16. Its other five intervals include 0, with values of "
        f"{max(rest):.1f} to {min(rest):.1f}."
    ) in page_text(PAGE)
    cr4, cr8 = ([found["GSM8K", name, chains].value for chains in CHAINS] for name in EXPORTS)
    single = " and ".join(_loss(found["HumanEval", name, 1]) for name in EXPORTS)
    prompts = record("qwen25_coder_0_5b_prompts_humaneval_template_defaults.json", "cpu_x86_64")
    first = [f"{prompts['models'][name]['first']['value']:.2f}" for name in EXPORTS]
    for sentence in (
        f"for 100 problems CR 4 solves {min(cr4):.1f} to {max(cr4):.1f} points more than the "
        f"original, with intervals that include 0. CR 8 solves {-max(cr8):.1f} to "
        f"{-min(cr8):.1f} fewer, with an interval below 0 for 16 chains.",
        f"The first token of CR 4 and CR 8 differs by {' and '.join(first)} nats on HumanEval, and "
        f"their single chains lose {single} points of it. Whether the first token is the "
        "reason was not tested.",
    ):
        assert sentence in page_text(QWEN_PAGE)


def test_the_pages_say_that_no_margin_is_above_zero() -> None:
    margins = {(title, each.first): each for title in TASKS for each in _margins(title)}
    ends = {key: _interval(margin) for key, margin in margins.items()}
    below = [key for key, (_, high) in ends.items() if high < 0]
    assert below == [("HumanEval", "cr8")]
    assert all(low <= 0 <= high for key, (low, high) in ends.items() if key not in below)
    assert (
        "No margin has an interval above 0. That of CR 8 on HumanEval is below it, and the other "
        "five include 0."
    ) in page_text(PAGE)
    gsm8k, math500, humaneval = (_margin(margins[title, "cr4"]) for title in TASKS)
    (low, high), value = ends["HumanEval", "cr8"], margins["HumanEval", "cr8"].value
    assert value is not None
    chains = _loss(_difference("GSM8K", "cr8", 16))
    assert f"CR 8 loses {-value:.1f} points of HumanEval" in page_text("CHANGELOG.md")
    assert (
        f"At equal time no margin has an interval above 0: CR 4 has {gsm8k} points of GSM8K, "
        f"{math500} of MATH-500 and {humaneval} of HumanEval. CR 8 loses "
        f"{-value:.1f} [{-high:.1f}, {-low:.1f}] of HumanEval then. At equal numbers of chains it "
        f"loses {chains} of GSM8K with 16."
    ) in page_text(MODELS_PAGE)
    claim = "at equal time no margin of theirs has an interval above 0"
    assert claim in page_text("docs/science.md")


def _margins(title: str) -> list[Margin]:
    """Return the margins of CR 4 and CR 8."""
    margins = seconds_margins(record(OWN_TEXT)["seconds"][TASKS[title]])
    assert tuple(margin.first for margin in margins) == EXPORTS
    return margins


def _interval(margin: Margin) -> tuple[float, float]:
    assert margin.interval is not None
    return margin.interval


def _margin(margin: Margin) -> str:
    low, high = _interval(margin)
    return f"{margin.value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _difference(title: str, name: str, chains: int) -> Estimate:
    """Return how many points more than the original a model solves, paired over problems."""
    measured = _own(title)
    own, original = (measured[model, chains]["scores"] for model in (name, "original"))
    points = [100 * (one - other) for one, other in zip(own, original, strict=True)]
    return ratio(points, [1.0] * len(points))


def _points(found: Estimate) -> str:
    return f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def _loss(found: Estimate) -> str:
    return f"{-found.value:.1f} [{-found.high:.1f}, {-found.low:.1f}]"


def test_the_page_says_on_which_tasks_equal_reads_solve_more() -> None:
    margins = record("qwen25_coder_0_5b.json")["chains"]["margins"]
    least = {m["task"]: m["interval"][0] for m in margins if m["cost"] == "KV reads"}
    assert {task for task, low in least.items() if low > 0} == {"MATH 500", "HumanEval"}
    claim = "[At equal KV reads](qwen25_coder.md#chains-of-reasoning) exports of another run do."
    assert claim in page_text(PAGE)


def test_the_page_has_the_tokens_that_a_cache_holds() -> None:
    """Layers, KV heads and head size of the models, keys and values in bf16."""
    text = page_text(PAGE)
    for layers, heads, size in ((24, 2, 64), (30, 3, 64)):
        held = 256_000_000 // (layers * heads * size * 2 * 2)
        assert f"holds at most {held:,} tokens of the original" in text


def test_a_record_of_seconds_alone_prints_no_empty_table() -> None:
    for name, legend in ((QUESTIONS, True), (OWN_TEXT, False), (SMOLLM2, False)):
        found = record(name)
        printed = report_text(found)
        assert seconds_text(found["seconds"]) in printed
        assert "| model |\n" not in printed
        assert ("`choices` is the mean" in printed) == legend
