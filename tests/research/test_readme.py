"""The README quotes the records of the recipes' defaults, and of methods without training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.research.models_page import (
    QWEN_PAGE,
    SMOLLM2_PAGE,
    named,
    needles_with_textbooks,
    page_rows,
    page_text,
    record,
)

README = "README.md"
OWN, UNTRAINED = ("original", "cr4", "cr8"), ("streaming_llm_cr4", "snapkv_cr4", "quest_cr4")
STEMS = {"SmolLM2": "smollm2_135m", "Qwen2.5-Coder": "qwen25_coder_0_5b"}


def models(title: str, part: str) -> dict[str, Any]:
    """Return the models of the defaults, and the untrained methods of other records."""
    stem = STEMS[title]
    found = named(f"{stem}_{part}.json") | named(f"{stem}_defaults.json")
    if part == "policies_16k":
        name = "streaming_llm_cr4"
        found[name] = named(f"{stem}_policies_more.json")[name]
    return found


def test_the_columns_of_the_readme_are_in_order() -> None:
    titles = ("original", "DMS, CR 4", "DMS, CR 8")
    titles += ("StreamingLLM, CR 4", "SnapKV, CR 4", "Quest, CR 4")
    assert f"| | {' | '.join(titles)} |" in page_text(README)


def cells(beginning: str) -> list[str]:
    (found,) = (row for name, row in page_rows(README).items() if name.startswith(beginning))
    return found


@pytest.mark.parametrize(
    ("title", "part"), [("SmolLM2", "policies"), ("Qwen2.5-Coder", "perplexity")]
)
def test_the_readme_has_the_perplexities(title: str, part: str) -> None:
    found = models(title, part)
    assert cells(f"{title}, perplexity of") == [
        f"{found[name]['perplexity']['continuation']['perplexity']:.2f}"
        for name in (*OWN, *UNTRAINED)
    ]


@pytest.mark.parametrize(
    ("title", "part", "context"),
    [
        ("SmolLM2", "policies", 2048),
        ("SmolLM2", "policies", 4096),
        ("Qwen2.5-Coder", "policies_16k", 16384),
    ],
)
def test_the_readme_has_the_needles(title: str, part: str, context: int) -> None:
    found = models(title, part)
    needles = [found[name]["needles"][str(context)] for name in (*OWN, *UNTRAINED)]
    shown = [f"{each['value']:.2f}" for each in needles]
    assert cells(f"{title}, needles found in {context:,}") == shown
    if context > 2048:
        reads = [f"{each['reads_per_token']:,.0f}" for each in needles]
        assert cells(f"{title}, tokens that a generated token reads, at {context:,}") == reads


@pytest.mark.parametrize(
    ("title", "row"),
    [
        ("SmolLM2", "SmolLM2, seven tasks of multiple choice"),
        ("Qwen2.5-Coder", "Qwen2.5-Coder, the same seven tasks"),
    ],
)
def test_the_readme_has_multiple_choice(title: str, row: str) -> None:
    own = named(f"{STEMS[title]}_defaults.json")
    others = named(f"{STEMS[title]}_policy_choices.json")
    means = [mean(others[name]) for name in ("original", *UNTRAINED)]
    assert cells(row) == [
        *(mean(own[name]) for name in OWN),
        *(f"[{each} of {means[0]}](docs/models/policies.md)" for each in means[1:]),
    ]


def mean(model: Mapping[str, Any]) -> str:
    return f"{100 * model['choices']['score']:.1f}"


def test_the_readme_has_the_minutes_of_both_models() -> None:
    """Minutes from the first command to the last export."""
    minutes = [
        re.findall(pattern, page_text(page))
        for page, pattern in (
            (SMOLLM2_PAGE, r"These sum to ([\d.]+) minutes"),
            (QWEN_PAGE, r"last validated export it was ([\d.]+) minutes"),
        )
    ]
    (small,), (large,) = minutes
    both = f"{float(small):.0f} and {float(large):.0f} minutes"
    assert f"sampling and training take {both} of one H200" in page_text(README)
    assert f"{both} on one GPU for text and training" in page_text("research/README.md")


def test_the_readme_says_where_others_find_more() -> None:
    text = page_text(README)
    found = models("SmolLM2", "policies")
    needles = {name: found[name]["needles"]["8192"] for name in ("quest_cr8", "cr8")}
    assert needles["quest_cr8"]["low"] > needles["cr8"]["high"]
    books = needles_with_textbooks()
    for sentence in (
        "at CR 8 it finds [more of SmolLM2's needles](docs/models/smollm2.md#beside-methods-without"
        "-training) than DMS in 8,192 tokens",
        f"found {min(books):.2f} to {max(books):.2f} of the needles in 4,096 tokens at CR 8;",
    ):
        assert sentence in text


def test_the_readme_has_the_chains_of_qwen() -> None:
    text = page_text(README)
    chains = record("qwen25_coder_0_5b.json")["chains"]["points"]
    points = {(p["task"], p["model"], p["chains"]): p for p in chains if p["length"] == 2}
    solved, reads = [], []
    for task in ("math500", "gsm8k"):
        own, original = (points[task, model, 16] for model in ("cr4", "original"))
        solved.append([f"{100 * point['accuracy']['value']:.1f} %" for point in (own, original)])
        reads.append(f"{100 * own['kv_reads'] / original['kv_reads']:.0f} %")
    (math, first), (school, second) = solved
    assert (
        f"at CR 4 solve {math} of MATH-500 and {school} of GSM8K, with {reads[0]} and {reads[1]} "
        f"of the KV reads of the original, which solves {first} and {second}."
    ) in text
    export, original = (
        f"{100 * point['accuracy']['value']:.0f} %{words}, with {point['kv_reads']:,.0f}"
        for point, words in (
            (points["humaneval", "cr8", 4], " of the functions"),
            (points["humaneval", "original", 1], ""),
        )
    )
    assert f"passes the tests of {export} KV reads. A single chain of the original" in text
    assert f"A single chain of the original passes those of {original}." in text
