"""The page of methods without training quotes the stored records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from research.recipe.report import report_text
from tests.research.models_page import (
    CHOICES,
    LAMBADA,
    METHODS,
    POLICIES,
    difference,
    page_rows,
    page_text,
    record,
)

RECIPES = {"SmolLM2": "smollm2_135m", "Qwen": "qwen25_coder_0_5b"}
RATIOS = (4, 8)


def models(recipe: str) -> dict[str, Mapping[str, Any]]:
    """Return the models of both records; the exports are named like a policy `dms`."""
    of_dms = {f"dms_{m['name']}": m for m in record(f"{recipe}.json")["models"]}
    return {m["name"]: m for m in record(f"{recipe}_policy_choices.json")["models"]} | of_dms


def loses(task: Mapping[str, Any]) -> bool:
    return task["difference"]["high"] < 0


@pytest.mark.parametrize(("title", "recipe"), RECIPES.items())
def test_the_page_has_the_differences_to_the_original(title: str, recipe: str) -> None:
    rows, known = page_rows(METHODS), models(recipe)
    for method, name in {"DMS": "dms", **POLICIES}.items():
        pair = [known[f"{name}_cr{ratio}"] for ratio in RATIOS]
        cells = [difference(model["choices"]["difference"]) for model in pair]
        cells += [difference(m["tasks"][key]["difference"]) for key in LAMBADA for m in pair]
        cells += [f"{model['kv']['cr_factor']:.1f}" for model in pair]
        assert rows[f"{title}, {method}"] == cells


def test_the_sentences_of_the_page_are_those_of_the_records() -> None:
    text, known = page_text(METHODS), {title: models(name) for title, name in RECIPES.items()}
    by_rule = {
        (title, method, ratio): known[title][f"{name}_cr{ratio}"]
        for title in RECIPES
        for method, name in POLICIES.items()
        for ratio in RATIOS
    }
    assert {key for key, m in by_rule.items() if loses(m["choices"])} == {
        *((title, "Knorm", ratio) for title in RECIPES for ratio in RATIOS),
        *(("SmolLM2", "KeyDiff", 4), ("Qwen", "KeyDiff", 8), ("SmolLM2", "SnapKV", 4)),
    }
    assert {key for key, m in by_rule.items() if loses(m["tasks"]["arc_challenge@25"])} == {
        *(("Qwen", "KeyDiff", 4), ("Qwen", "KeyDiff", 8), ("Qwen", "Knorm", 8))
    }
    assert {key for key, m in by_rule.items() if not loses(m["tasks"][LAMBADA[0]])} == {
        (title, "KeyDiff", 4) for title in RECIPES
    }
    choices = {key: -100 * m["choices"]["difference"]["value"] for key, m in by_rule.items()}
    knorm = sorted(value for (_, method, _), value in choices.items() if method == "Knorm")
    assert f"Knorm loses {knorm[0]:.1f} to {knorm[-1]:.1f} points" in text
    others = [choices["SmolLM2", "KeyDiff", 4], choices["Qwen", "KeyDiff", 8]]
    others.append(choices["SmolLM2", "SnapKV", 4])
    said = (
        "KeyDiff loses {:.1f} on SmolLM2 at CR 4 and {:.1f} on Qwen at CR 8, and SnapKV {:.1f} on"
    )
    assert said.format(*others) in text
    lost = {key: -100 * m["tasks"][LAMBADA[0]]["difference"]["value"] for key, m in by_rule.items()}
    newest, rest = (
        sorted(value for (_, method, _), value in lost.items() if (method == name) == equal)
        for name, equal in (("StreamingLLM", True), ("StreamingLLM", False))
    )
    assert f"loses {newest[0]:.1f} to {newest[-1]:.1f} points" in text
    assert f"other rules lose {rest[0]:.1f} to {rest[-1]:.1f} points" in text
    own = [
        known[title][f"dms_cr{ratio}"]["tasks"][LAMBADA[0]]["difference"]
        for title in RECIPES
        for ratio in RATIOS
    ]
    ends = sorted(-100 * found["value"] for found in own)
    assert f"loses {ends[0]:.1f} to {ends[-1]:.1f} points, with intervals that include 0" in text
    assert all(found["high"] >= 0 for found in own)
    gain = known["Qwen"]["streaming_llm_cr8"]["tasks"][LAMBADA[1]]["difference"]["value"]
    assert f"gains {100 * gain:.1f} points" in text


def test_most_methods_compute_what_the_original_does_for_answers_of_one_token() -> None:
    rounded = [
        abs(model["tasks"]["mmlu@5"]["difference"]["value"])
        for recipe in RECIPES.values()
        for model in record(f"{recipe}_policy_choices.json")["models"]
        if model["name"] != "original" and model["policy"] != "streaming_llm"
    ]
    assert f"differ from it by up to {100 * max(rounded):.1f} points" in page_text(METHODS)


def test_the_documents_are_as_many_as_the_page_says() -> None:
    for recipe in RECIPES.values():
        for model in record(f"{recipe}_policy_choices.json")["models"]:
            counts = {key: task["documents"] for key, task in model["tasks"].items()}
            assert counts == {**dict.fromkeys((*CHOICES, *LAMBADA), 250), "mmlu@5": 5 * 57}


def test_the_records_print() -> None:
    for recipe in RECIPES.values():
        assert re.search(r"\| knorm_cr8 \|", report_text(record(f"{recipe}_policy_choices.json")))
