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
BEFORE = {title: name for title, name in POLICIES.items() if name not in ("quest", "streaming_llm")}


def models(recipe: str, part: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the models of both records; the exports are named like a policy `dms`."""
    of_dms = {f"dms_{m['name']}": m for m in record(f"{recipe}.json")["models"]}
    return {m["name"]: m for m in record(f"{recipe}{part}_policy_choices.json")["models"]} | of_dms


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


@pytest.mark.parametrize(("title", "recipe"), RECIPES.items())
def test_the_page_has_the_differences_of_questions_after_the_eviction(
    title: str, recipe: str
) -> None:
    rows, known = page_rows(METHODS), models(recipe, "_examples")
    for method, name in {"DMS": "dms", **BEFORE}.items():
        pair = [known[f"{name}_cr{ratio}"] for ratio in RATIOS]
        cells = [difference(model["choices"]["difference"]) for model in pair]
        keys = ("arc_easy@25", "arc_challenge@25", LAMBADA[1])
        cells += [difference(m["tasks"][key]["difference"]) for key in keys for m in pair]
        cells += [f"{model['kv']['cr_factor']:.1f}" for model in pair]
        assert rows[f"{title} asked after eviction, {method}"] == cells


def test_the_sentences_on_questions_after_the_eviction_are_those_of_the_records() -> None:
    by_rule = {
        (title, method, ratio): models(recipe, "_examples")[f"{name}_cr{ratio}"]
        for title, recipe in RECIPES.items()
        for method, name in BEFORE.items()
        for ratio in RATIOS
    }
    assert {key for key, m in by_rule.items() if loses(m["choices"])} == {("SmolLM2", "KeyDiff", 4)}
    assert not any(loses(m["tasks"]["arc_challenge@25"]) for m in by_rule.values())
    easy = {key: m["tasks"]["arc_easy@25"] for key, m in by_rule.items()}
    assert {key for key, task in easy.items() if loses(task)} == {
        *(("SmolLM2", name, ratio) for name in ("KeyDiff", "Knorm") for ratio in RATIOS),
        *(("SmolLM2", name, 8) for name in ("TOVA", "H2O")),
    }
    least = models("smollm2_135m")["dms_cr8"]["tasks"]["arc_easy@25"]["difference"]["low"]
    assert {
        key[1] for key, task in easy.items() if key[2] == 8 and task["difference"]["high"] < least
    } == {"KeyDiff"}
    lambada = {key: m["tasks"][LAMBADA[1]] for key, m in by_rule.items()}
    assert {key for key, task in lambada.items() if loses(task)} == {
        *(("SmolLM2", name, ratio) for name in ("R-KV", "SnapKV", "KeyDiff") for ratio in RATIOS),
        *(("SmolLM2", "H2O", 8), ("Qwen", "H2O", 8), ("Qwen", "KeyDiff", 4)),
    }
    assert {key for key, task in lambada.items() if task["difference"]["low"] > 0} == {
        *(("Qwen", "Knorm", ratio) for ratio in RATIOS),
        *(("Qwen", "R-KV", 8), ("Qwen", "SnapKV", 8)),
    }


def test_the_numbers_on_questions_after_the_eviction_are_those_of_the_records() -> None:
    text = page_text(METHODS)
    small, qwen = (models(recipe, "_examples") for recipe in RECIPES.values())

    def points(known: Mapping[str, Any], name: str, ratio: int, key: str) -> float:
        value = known[f"{BEFORE.get(name, 'dms')}_cr{ratio}"]["tasks"][key]["difference"]["value"]
        return abs(100 * float(value))

    def both(known: Mapping[str, Any], name: str, key: str) -> str:
        return " and ".join(f"{points(known, name, ratio, key):.1f}" for ratio in RATIOS)

    easy, words = "arc_easy@25", LAMBADA[1]
    among = [points(small, name, ratio, easy) for name in ("R-KV", "SnapKV") for ratio in RATIOS]
    lost = [
        points(small, name, ratio, words)
        for name in ("R-KV", "SnapKV", "KeyDiff")
        for ratio in RATIOS
    ]
    without, with_them = (100 * qwen["original"]["tasks"][key]["score"] for key in LAMBADA)
    others = sorted(
        f"{known[f'{BEFORE[name]}_cr8']['kv']['cr_factor']:.1f}"
        for known in (small, qwen)
        for name in ("R-KV", "SnapKV", "KeyDiff", "Knorm")
    )
    for sentence in (
        f"the other four {others[0]} to {others[-1]} times",
        f"KeyDiff loses {both(small, 'KeyDiff', easy)} points of it",
        f"Knorm {both(small, 'Knorm', easy)}, and at CR 8 TOVA loses "
        f"{points(small, 'TOVA', 8, easy):.1f} and H2O {points(small, 'H2O', 8, easy):.1f},",
        f"R-KV and SnapKV lose {min(among):.1f} to {max(among):.1f}",
        f"DMS gains {points(small, 'DMS', 4, easy):.1f} at CR 4 and loses "
        f"{points(small, 'DMS', 8, easy):.1f} at CR 8",
        f"KeyDiff lose {min(lost):.1f} to {max(lost):.1f} points, and H2O "
        f"{points(small, 'H2O', 8, words):.1f} at CR 8",
        f"On Qwen KeyDiff loses {points(qwen, 'KeyDiff', 4, words):.1f} at CR 4 and H2O "
        f"{points(qwen, 'H2O', 8, words):.1f} at CR 8",
        f"Knorm gains {both(qwen, 'Knorm', words)} there, and R-KV and SnapKV gain "
        f"{points(qwen, 'R-KV', 8, words):.1f} and {points(qwen, 'SnapKV', 8, words):.1f} at CR 8",
        f"The original has {without:.1f} % without examples and {with_them:.1f} % with them",
    ):
        assert sentence in text


def test_most_methods_compute_what_the_original_does_for_answers_of_one_token() -> None:
    rounded = [
        abs(model["tasks"]["mmlu@5"]["difference"]["value"])
        for recipe in RECIPES.values()
        for model in record(f"{recipe}_policy_choices.json")["models"]
        if model["name"] != "original" and model["policy"] != "streaming_llm"
    ]
    assert f"differ from it by up to {100 * max(rounded):.1f} points" in page_text(METHODS)


def test_the_documents_are_as_many_as_the_page_says() -> None:
    for name in (f"{recipe}{part}" for recipe in RECIPES.values() for part in ("", "_examples")):
        for model in record(f"{name}_policy_choices.json")["models"]:
            counts = {key: task["documents"] for key, task in model["tasks"].items()}
            assert counts == {**dict.fromkeys((*CHOICES, *LAMBADA), 250), "mmlu@5": 5 * 57}


def test_the_records_print() -> None:
    for name in (f"{recipe}{part}" for recipe in RECIPES.values() for part in ("", "_examples")):
        assert re.search(r"\| knorm_cr8 \|", report_text(record(f"{name}_policy_choices.json")))
