"""The page of models quotes the records of the recipes' defaults, and has every record."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from research.recipe import TABLES
from research.recipe.steps import RECIPES
from tests.research.models_page import (
    PAGE,
    POLICIES,
    QWEN_PAGE,
    RESULTS,
    SMOLLM2_PAGE,
    TRIATTENTION,
    difference,
    loss,
    named,
    needles_of_policies,
    needles_with_textbooks,
    page_rows,
    page_text,
    record,
)

TRAINED = {"original": "original"} | {f"DMS at CR {n}": f"cr{n}" for n in (2, 3, 4, 6, 8)}
LENGTHS = ("1024", "2048", "4096", "8192")


def text_cells(model: dict[str, Any]) -> list[str]:
    """Return the cells of compression ratio and perplexity."""
    continuation = model["perplexity"]["continuation"]
    return [f"{continuation['cr_factor']:.2f}", f"{continuation['perplexity']:.2f}"]


def choice_cells(model: dict[str, Any]) -> list[str]:
    """Return the cells of multiple choice and its difference."""
    choices = model["choices"]
    return [
        f"{100 * choices['score']:.2f}",
        "" if model["name"] == "original" else difference(choices["difference"]),
    ]


def needle_cells(needles: dict[str, Any], lengths: tuple[str, ...]) -> list[str]:
    """Return the cells of needles, and of KV reads at the longest prompts."""
    if lengths[-1] not in needles:
        return [""] * (len(lengths) + 1)
    reads = f"{needles[lengths[-1]]['reads_per_token']:,.0f}"
    return [*(f"{needles[length]['value']:.2f}" for length in lengths), reads]


def test_the_page_has_the_defaults_of_smollm2() -> None:
    rows, found = page_rows(PAGE), named("smollm2_135m_defaults.json")
    policies, needles = named("smollm2_135m_policies.json"), needles_of_policies()
    for title, name in TRAINED.items():
        model = found[name]
        cells = [*text_cells(model), *needle_cells(model["needles"], LENGTHS)]
        assert rows[f"SmolLM2, {title}"] == [*cells, *choice_cells(model)]
    for title in ("Quest", "R-KV", "TOVA", "StreamingLLM", "SnapKV", "H2O"):
        name = f"{POLICIES[title]}_cr4"
        cells = [*text_cells(policies[name]), *needle_cells(needles[name], LENGTHS)]
        assert rows[f"SmolLM2, {title} at CR 4"] == [*cells, "", ""]
    cells = [*text_cells(policies["quest_cr8"]), *needle_cells(needles["quest_cr8"], LENGTHS)]
    assert rows["SmolLM2, Quest at CR 8"] == [*cells, "", ""]


def test_the_page_says_what_smollm2_keeps_up_to_cr_4() -> None:
    found, policies = named("smollm2_135m_defaults.json"), named("smollm2_135m_policies.json")
    lost = [
        found["original"]["needles"][n]["value"] - found[name]["needles"][n]["value"]
        for name in ("cr2", "cr3", "cr4")
        for n in LENGTHS
    ]
    assert f"finds at most {100 * max(lost):.0f} of 100 needles fewer" in page_text(PAGE)
    others = [
        policies[f"{name}_cr4"]["perplexity"]["continuation"]["perplexity"]
        for name in (*POLICIES.values(), TRIATTENTION)
    ]
    assert found["cr4"]["perplexity"]["continuation"]["perplexity"] < min(others)
    books = needles_with_textbooks()
    own = found["cr8"]["needles"]["4096"]["value"]
    assert f"In 4,096 tokens CR 8 finds {own:.2f} of them. Three runs" in page_text(PAGE)
    assert f"other prompts found {min(books):.2f} to {max(books):.2f};" in page_text(PAGE)


def test_the_page_has_the_defaults_of_qwen() -> None:
    rows, found = page_rows(PAGE), named("qwen25_coder_0_5b_defaults.json")
    for title, name in TRAINED.items():
        model = found[name]
        cells = [*text_cells(model), *needle_cells(model["needles"], ("16384",))]
        solved = f"{100 * model['tasks']['gsm8k@5']['score']:.1f}"
        assert rows[f"Qwen, {title}"] == [*cells, *choice_cells(model), solved]


def test_the_page_says_what_qwen_loses() -> None:
    text, found = page_text(PAGE), named("qwen25_coder_0_5b_defaults.json")
    tasks = {name: {k: t["difference"] for k, t in m["tasks"].items()} for name, m in found.items()}
    choices = [value for key, value in tasks["cr4"].items() if not key.startswith("gsm8k")]
    most = -100 * min(each["value"] for each in choices)
    for sentence in (
        f"At CR 4 no task of multiple choice, nor LAMBADA, loses more than {most:.1f} points",
        f"At CR 8 MMLU loses {loss(tasks['cr8']['mmlu@5'])} and OpenBookQA "
        f"{loss(tasks['cr8']['openbookqa@5'])}.",
        f"GSM8K with five examples loses {loss(tasks['cr6']['gsm8k@5'])} at CR 6 and "
        f"{loss(tasks['cr8']['gsm8k@5'])} at CR 8, and with eight and reasoning "
        f"{loss(tasks['cr6']['gsm8k_cot'])} at CR 6.",
    ):
        assert sentence in text
    recipe = RECIPES["qwen25_coder_0_5b"]
    assert recipe.word_problems * 10 == recipe.prompts + recipe.word_problems
    assert "A tenth of the prompts are word problems." in text


def test_the_page_has_the_margins_and_needles_of_qwen() -> None:
    text, found = page_text(PAGE), record("qwen25_coder_0_5b.json")
    margins = {
        each["task"]: "{:+.1f} [{:.1f}, {:.1f}]".format(each["value"], *each["interval"])
        for each in found["chains"]["margins"]
        if each["cost"] == "KV reads"
    }
    assert f"{margins['MATH 500']} and {margins['HumanEval']} points, as margins" in text
    assert f"GSM8K has {margins['GSM8K']}." in text
    points = {(p["task"], p["model"], p["chains"]): p for p in found["chains"]["points"]}
    for task, name, chains in product(("gsm8k", "humaneval"), ("cr4", "cr8"), (1, 4, 16)):
        own, original = (points[task, each, chains] for each in (name, "original"))
        assert own["accuracy"]["value"] < original["accuracy"]["value"]
    needles: dict[str, float] = {}
    for part in ("", "_16k", "_more"):
        for name, model in named(f"qwen25_coder_0_5b_policies{part}.json").items():
            if "16384" in model["needles"]:
                needles[name] = model["needles"]["16384"]["value"]
    for name in ("snapkv_cr4", "quest_cr4", "quest_cr8"):
        assert needles[name] == 1
    assert f"where SnapKV misses {100 * (1 - needles['snapkv_cr8']):.0f} of 100." in text
    few = (needles["keydiff_cr4"], needles["streaming_llm_cr4"])
    assert "KeyDiff finds {:.2f} of them at CR 4 and StreamingLLM {:.2f}.".format(*few) in text


def test_the_page_has_the_cost_of_the_pages_of_both_models() -> None:
    cells, trained = [], []
    for page, recipe in ((SMOLLM2_PAGE, "smollm2_135m"), (QWEN_PAGE, "qwen25_coder_0_5b")):
        ((sampled, generating, speed, training),) = re.findall(
            r"Sampling took (\d+) s, (?:of which )?(\d+) s .* at ([\d,]+) tokens/s in .* training "
            r"(?:with .* took )?(\d+) s,",
            page_text(page),
        )
        tokens = int(generating) * int(speed.replace(",", ""))
        cells += [f"{tokens / 1e6:.1f} million", f"{int(sampled) / 60:.1f}"]
        steps = record(f"{recipe}_defaults.json")["trainings"]["train"]
        tokens = steps["tokens"] + steps["tokens_of_held_exports"]
        trained += [f"{tokens / 1e6:.1f} million", f"{int(training) / 60:.1f}"]
    rows = page_rows(PAGE)
    assert rows["answers that were sampled, two to each of 10,000 prompts"] == cells
    assert rows["training with branches, exports and their validation"] == trained


@pytest.mark.parametrize(
    ("title", "recipe", "context", "size"),  # bytes of a token: layers, KV heads, head size, bf16
    [
        ("SmolLM2", "smollm2_135m", 4096, 30 * 3 * 64 * 2 * 2),
        ("Qwen", "qwen25_coder_0_5b", 16384, 24 * 2 * 64 * 2 * 2),
    ],
)
def test_the_page_has_the_memory_of_requests(
    title: str, recipe: str, context: int, size: int
) -> None:
    rows, known = page_rows(PAGE), named(f"{recipe}_defaults.json")
    measured = [known[name]["needles"].get(str(context)) for name in TRAINED.values()]
    held = [each and each["peak_tokens"] for each in measured]
    tokens = [f"{n:,.0f}" if n else "" for n in held]
    assert rows[f"{title}, most tokens held in {context:,}"] == tokens
    assert rows[f"{title}, MB"] == [f"{n * size / 1e6:.1f}" if n else "" for n in held]


@pytest.mark.parametrize(
    ("title", "name", "context"),
    [("SmolLM2", "smollm2_135m_window_16", 4096), ("Qwen", "qwen25_coder_0_5b", 16384)],
)
def test_the_page_has_the_memory_of_dmc(title: str, name: str, context: int) -> None:
    known = {m["name"]: m["needles"] for m in record(f"{name}.json")["models"]}
    held = [known[f"dmc_cr{ratio}"][str(context)]["peak_tokens"] for ratio in (4, 8)]
    cells = page_rows(PAGE)[f"{title}, DMC, most tokens held in {context:,}"]
    assert cells == ["", "", "", f"{held[0]:,.0f}", "", f"{held[1]:,.0f}"]


def test_the_page_has_the_memory_of_untrained_methods() -> None:
    known = {
        m["name"]: m["needles"]["4096"] for m in record("smollm2_135m_policies.json")["models"]
    }
    ends = []
    for ratio in (4, 8):
        names = [
            f"{name}_cr{ratio}" for name in (*POLICIES.values(), TRIATTENTION) if name != "quest"
        ]
        held = [known[name]["peak_tokens"] for name in names]
        ends += [f"{min(held):,.0f}", f"{max(held):,.0f}"]
        assert known[f"quest_cr{ratio}"]["peak_tokens"] >= known["original"]["peak_tokens"]
    said = "hold {} to {} tokens at CR 4 and {} to {} at CR 8 of the 4,096".format(*ends)
    assert said in page_text(PAGE)


def test_every_record_of_the_recipes_has_one_page() -> None:
    found = {path for name in RECIPES for path in RESULTS.glob(f"*/{name.partition('_')[0]}*.json")}
    shown = [path for table in TABLES for path in RESULTS.glob(table.records)]
    assert len(found) > 20
    assert sorted(shown) == sorted(found)
