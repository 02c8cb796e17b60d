"""The page of models quotes the records of the recipes' defaults, and has every record."""

from __future__ import annotations

from typing import Any

import pytest

from research.recipe import TABLES
from research.recipe.steps import RECIPES
from tests.research.models_page import (
    PAGE,
    POLICIES,
    RESULTS,
    TRIATTENTION,
    difference,
    needles_of_policies,
    page_rows,
    page_text,
    record,
)

TRAINED = {"original": "original"} | {f"DMS at CR {n}": f"cr{n}" for n in (2, 3, 4, 6, 8)}
LENGTHS = ("1024", "2048", "4096", "8192")


def named(name: str) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in record(name)["models"]}


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
    books = named("smollm2_135m.json")["cr8"]["needles"]["4096"]["value"]
    assert f"kept {books:.2f} in 4,096 tokens at CR 8" in page_text(PAGE)


def test_the_page_has_the_defaults_of_qwen() -> None:
    rows, found = page_rows(PAGE), named("qwen25_coder_0_5b_defaults.json")
    for title, name in TRAINED.items():
        model = found[name]
        cells = [*text_cells(model), *needle_cells(model["needles"], ("16384",))]
        solved = f"{100 * model['tasks']['gsm8k@5']['score']:.1f}"
        assert rows[f"Qwen, {title}"] == [*cells, *choice_cells(model), solved]
    mmlu = [100 * found["cr4"]["tasks"]["mmlu@5"]["difference"][key] for key in KEYS]
    other = named("qwen25_coder_0_5b.json")["cr4"]["tasks"]["mmlu@5"]["difference"]["value"]
    assert (
        "At CR 4 MMLU loses {:.1f} [{:.1f}, {:.1f}] points, more than the 2.5 that we aimed at; "
        "[the other run](models/qwen25_coder.md) lost {:.1f}."
    ).format(*(-each for each in mmlu), -100 * other) in page_text(PAGE)


KEYS = ("value", "high", "low")  # of a loss, whose smaller end is the higher difference


def test_the_page_has_the_tokens_of_the_trainings() -> None:
    cells = []
    for name in ("smollm2_135m_defaults.json", "qwen25_coder_0_5b_defaults.json"):
        training = record(name)["trainings"]["train"]
        tokens = training["tokens"] + training["tokens_of_held_exports"]
        cells.append(f"{tokens / 1e6:.1f} million")
    row = page_rows(PAGE)["training with branches, exports and their validation"]
    assert row[::2] == cells


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
    rows, known = page_rows(PAGE), {m["name"]: m for m in record(f"{recipe}.json")["models"]}
    names = ("original", *(f"cr{ratio}" for ratio in (2, 3, 4, 6, 8)))
    held = [known[name]["needles"][str(context)]["peak_tokens"] for name in names]
    assert rows[f"{title}, most tokens held in {context:,}"] == [f"{n:,.0f}" for n in held]
    assert rows[f"{title}, MB"] == [f"{n * size / 1e6:.1f}" for n in held]


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
