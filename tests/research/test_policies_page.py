"""The page of methods without training quotes the stored records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from research.recipe.report import report_text
from tests.research.models_page import (
    CHOICES,
    LAMBADA,
    METHODS,
    POLICIES,
    TRIATTENTION,
    difference,
    named,
    page_rows,
    page_text,
    record,
)

RECIPES = {"SmolLM2": "smollm2_135m", "Qwen": "qwen25_coder_0_5b"}
RATIOS = (4, 8)
EASY = "arc_easy@25"
BEFORE = {title: name for title, name in POLICIES.items() if name not in ("quest", "streaming_llm")}


def models(recipe: str, part: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the models of both records; the exports are named like a policy `dms`."""
    of_dms = {f"dms_{m['name']}": m for m in record(f"{recipe}.json")["models"]}
    return named(f"{recipe}{part}_policy_choices.json") | of_dms


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


def test_the_page_has_the_differences_of_triattention() -> None:
    text, cells = page_text(METHODS), page_rows(METHODS)["SmolLM2, TriAttention"]
    known = named("smollm2_135m_policies.json")
    pair = [known[f"{TRIATTENTION}_cr{ratio}"] for ratio in RATIOS]
    means = [model["choices"]["difference"] for model in pair]
    lambada = [m["tasks"][key]["difference"] for key in LAMBADA for m in pair]
    assert cells[:6] == [difference(found) for found in (*means, *lambada)]
    assert cells[6:] == [f"{model['kv']['cr_factor']:.1f}" for model in pair]
    assert [found["high"] < 0 for found in (*means, *lambada)] == [False, *5 * [True]]
    assert f"**TriAttention** loses {-100 * means[1]['value']:.1f} points of the mean at" in text
    tasks = [(key, m["tasks"][key]["difference"]) for m in pair for key in (*CHOICES, "mmlu@5")]
    outside = [(key, found["value"]) for key, found in tasks if found["low"] * found["high"] > 0]
    assert [key for key, _ in outside] == [EASY, "openbookqa@5"]
    gain, loss = (100 * value for _, value in outside)
    said = f"ARC-Easy gains {gain:.1f} points at CR 4 and OpenBookQA loses {-loss:.1f} at CR 8"
    assert said in text
    mmlu = [abs(model["tasks"]["mmlu@5"]["difference"]["value"]) for model in pair]
    assert max(mmlu) < 0.014
    assert {m["tasks"]["piqa@20"]["documents"] for m in pair} == {1000}
    assert "[a later run](smollm2.md#the-recipes-own-text) with 1,000." in text


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
    assert f"other rules, with 250 documents, lose {rest[0]:.1f} to {rest[-1]:.1f} points" in text
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
        keys = (EASY, "arc_challenge@25", LAMBADA[1])
        cells += [difference(m["tasks"][key]["difference"]) for key in keys for m in pair]
        cells += [f"{model['kv']['cr_factor']:.1f}" for model in pair]
        assert rows[f"{title} asked after eviction, {method}"] == cells


def after_eviction() -> dict[tuple[str, str, int], Mapping[str, Any]]:
    """Return the models that were asked after the eviction by title, method and ratio."""
    return {
        (title, method, ratio): models(recipe, "_examples")[f"{name}_cr{ratio}"]
        for title, recipe in RECIPES.items()
        for method, name in BEFORE.items()
        for ratio in RATIOS
    }


def change(model: Mapping[str, Any], task: str, sign: int) -> str:
    """Return the points of a task that a model loses (-1) or gains (1)."""
    value = 100 * sign * model["tasks"][task]["difference"]["value"]
    assert value >= 0
    return f"{value:.1f}"


def test_the_page_counts_the_intervals_of_questions_after_the_eviction() -> None:
    text, asked = page_text(METHODS), after_eviction()
    means = {key: m["choices"]["difference"] for key, m in asked.items()}
    assert {key for key, mean in means.items() if mean["high"] < 0} == {("SmolLM2", "KeyDiff", 4)}
    assert {key for key, mean in means.items() if mean["low"] > 0} == {("Qwen", "Knorm", 4)}
    wide = [50 * (mean["high"] - mean["low"]) for mean in means.values()]
    tasks = {
        (*key, task): m["tasks"][task] for key, m in asked.items() for task in (*CHOICES, "mmlu@5")
    }
    below = Counter((key[0], key[3]) for key, task in tasks.items() if loses(task))
    above = [key for key, task in tasks.items() if task["difference"]["low"] > 0]
    assert below == {("SmolLM2", "openbookqa@5"): 2, ("SmolLM2", EASY): 6}
    for sentence in (
        "KeyDiff on SmolLM2 at CR 4 has an interval below 0, and Knorm on Qwen at CR 4 one above.",
        f"Intervals reach {min(wide):.1f} to {max(wide):.1f} points to each side",
        f"Of {len(tasks)} intervals {below.total()} are below 0 and {len(above)} above. About "
        "eight exclude 0 by chance. All 8 are of SmolLM2: two of OpenBookQA and six of ARC-Easy.",
        "**ARC-Challenge**, whose prompts are the longest, has no interval below 0.",
    ):
        assert sentence in text
    assert round(0.05 * len(tasks)) == 8


def test_the_page_states_what_arc_easy_loses_after_the_eviction() -> None:
    text, asked = page_text(METHODS), after_eviction()
    below = {key for key, m in asked.items() if loses(m["tasks"][EASY])}
    assert below == {
        *(("SmolLM2", name, ratio) for name in ("KeyDiff", "Knorm") for ratio in RATIOS),
        *(("SmolLM2", name, 8) for name in ("TOVA", "H2O")),
    }
    lost = {key: change(asked[key], EASY, -1) for key in below}
    reach = [asked["SmolLM2", name, r] for name in ("R-KV", "SnapKV") for r in RATIOS]
    others = [float(change(model, EASY, -1)) for model in reach]
    dms = {ratio: models("smollm2_135m")[f"dms_cr{ratio}"] for ratio in RATIOS}
    assert not any(loses(model["tasks"][EASY]) for model in dms.values())
    for sentence in (
        f"KeyDiff loses {lost['SmolLM2', 'KeyDiff', 4]} and {lost['SmolLM2', 'KeyDiff', 8]} "
        f"points, Knorm {lost['SmolLM2', 'Knorm', 4]} and {lost['SmolLM2', 'Knorm', 8]}, and at "
        f"CR 8 TOVA loses {lost['SmolLM2', 'TOVA', 8]} and H2O {lost['SmolLM2', 'H2O', 8]}, with "
        "intervals below 0.",
        f"R-KV and SnapKV lose {min(others):.1f} to {max(others):.1f}, with intervals that reach 0",
        f"DMS gains {change(dms[4], EASY, 1)} at CR 4 and loses {change(dms[8], EASY, -1)} at CR 8",
        "Its intervals are apart from those of KeyDiff at both ratios and of Knorm at CR 4, and "
        "overlap with the others.",
    ):
        assert sentence in text
    apart = {
        (name, ratio)
        for title, name, ratio in asked
        if title == "SmolLM2"
        and asked[title, name, ratio]["tasks"][EASY]["difference"]["high"]
        < dms[ratio]["tasks"][EASY]["difference"]["low"]
    }
    assert apart == {("KeyDiff", 4), ("KeyDiff", 8), ("Knorm", 4)}


def test_the_page_states_what_lambada_loses_after_the_eviction() -> None:
    text, asked, words = page_text(METHODS), after_eviction(), LAMBADA[1]
    lambada = {key: m["tasks"][words]["difference"] for key, m in asked.items()}
    three = [("SmolLM2", name, r) for name in ("R-KV", "SnapKV", "KeyDiff") for r in RATIOS]
    assert {key for key, found in lambada.items() if found["high"] < 0} == {
        *three,
        *(("SmolLM2", "H2O", 8), ("Qwen", "H2O", 8), ("Qwen", "KeyDiff", 4)),
    }
    gains = [("Qwen", "Knorm", 4), ("Qwen", "Knorm", 8), ("Qwen", "R-KV", 8), ("Qwen", "SnapKV", 8)]
    assert {key for key, found in lambada.items() if found["low"] > 0} == set(gains)
    assert all(found["value"] < 0 for key, found in lambada.items() if key[0] == "SmolLM2")
    lost = [float(change(asked[key], words, -1)) for key in three]
    gained = [change(asked[key], words, 1) for key in gains]
    scores = [
        f"{100 * models(recipe, '_examples')['original']['tasks'][task]['score']:.1f}"
        for recipe in RECIPES.values()
        for task in LAMBADA
    ]
    for sentence in (
        f"R-KV, SnapKV and KeyDiff lose {min(lost):.1f} to {max(lost):.1f} points, and H2O "
        f"{change(asked['SmolLM2', 'H2O', 8], words, -1)} at CR 8.",
        f"On Qwen KeyDiff loses {change(asked['Qwen', 'KeyDiff', 4], words, -1)} at CR 4 and H2O "
        f"{change(asked['Qwen', 'H2O', 8], words, -1)} at CR 8.",
        f"Knorm gains {gained[0]} and {gained[1]} there, and R-KV and SnapKV gain {gained[2]} and "
        f"{gained[3]} at CR 8.",
        f"The original of Qwen has {scores[2]} % without examples and {scores[3]} % with them. "
        f"SmolLM2 has {scores[0]} and {scores[1]} %, and no method gains there.",
    ):
        assert sentence in text


def test_the_page_states_how_far_the_originals_of_both_sections_differ() -> None:
    text = page_text(METHODS)
    differ, means = {}, []
    for title, recipe in RECIPES.items():
        one, other = (models(recipe, part)["original"] for part in ("", "_examples"))
        for key, task in one["tasks"].items():
            differ[title, key] = 100 * abs(other["tasks"][key]["score"] - task["score"])
        means.append(100 * abs(other["choices"]["score"] - one["choices"]["score"]))
    most = max(differ, key=lambda key: differ[key])
    assert most == ("SmolLM2", "mmlu@5")
    assert f"differ by up to {differ[most]:.1f} points (MMLU of SmolLM2)" in text
    assert f"its means by {means[0]:.1f} and {means[1]:.1f}." in text
    small = models("smollm2_135m", "_examples")["original"]["tasks"]
    chance = [f"{100 * small[key]['score']:.1f} %" for key in ("mmlu@5", "winogrande@5")]
    assert f"SmolLM2 has {chance[0]} of MMLU and {chance[1]} of WinoGrande" in text


@pytest.mark.parametrize("part", ["", "_examples"])
def test_the_page_names_where_the_records_were_measured(part: str) -> None:
    for recipe in RECIPES.values():
        found = record(f"{recipe}{part}_policy_choices.json")
        assert f"Measured at: {found['commit'][:7]}, {found['date']}." in page_text(METHODS)


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
