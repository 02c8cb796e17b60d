"""The page of Qwen2.5-Coder quotes the record of the recipe's own text."""

from __future__ import annotations

import re
from typing import Any

from research.recipe.steps import RECIPES
from research.recipe.word_problems import _PROBLEMS
from tests.research.models_page import (
    CHOICES,
    LAMBADA,
    QWEN_PAGE,
    difference,
    named,
    page_rows,
    page_text,
    record,
)

RATIOS = ("cr2", "cr3", "cr4", "cr6", "cr8")
SCHOOL = ("gsm8k@5", "gsm8k_cot")
RECORD = "qwen25_coder_0_5b_defaults.json"


def test_the_page_has_the_run_on_the_own_text() -> None:
    rows, found = page_rows(QWEN_PAGE), named(RECORD)
    assert list(found) == ["original", *RATIOS]
    for name, model in found.items():
        of_original, validation = name == "original", model.get("validation")
        window, continuation = (model["perplexity"][part] for part in ("window", "continuation"))
        assert rows[f"own text, {name.replace('cr', 'CR ')}"] == [
            f"{continuation['cr_factor']:.2f}",
            "" if of_original else f"{validation['kl_nats_per_token']:.4f}",
            f"{window['perplexity']:.2f}",
            f"{continuation['perplexity']:.2f}",
            "" if of_original else nats(continuation["difference"]),
            f"{100 * model['choices']['score']:.2f}",
            "" if of_original else difference(model["choices"]["difference"]),
            *(f"{100 * model['tasks'][key]['score']:.1f}" for key in SCHOOL),
        ]


def nats(found: dict[str, float]) -> str:
    return "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**found)


def test_the_page_says_what_the_exports_find_and_lose() -> None:
    text, found = page_text(QWEN_PAGE), named(RECORD)
    needles = {name: model["needles"] for name, model in found.items() if model["needles"]}
    assert list(needles) == ["original", "cr4", "cr8"]
    lengths = ["1024", "4096", "8192", "16384"]
    assert all(list(of_model) == lengths for of_model in needles.values())
    assert {each["value"] for of_model in needles.values() for each in of_model.values()} == {1}
    reads = [f"{of_model['16384']['reads_per_token']:,.0f}" for of_model in needles.values()]
    texts = {n: m["perplexity"]["continuation"]["perplexity"] for n, m in found.items()}
    changes = [100 * (texts[name] / texts["original"] - 1) for name in ("cr2", "cr4", "cr8")]
    own = [found[name]["validation"]["cr_factor"] for name in ("cr4", "cr8")]
    for sentence in (
        "a token then reads {}, {} and {} others in the longest".format(*reads),
        f"is {-changes[0]:.0f} % lower than the original's at CR 2, "
        f"{-changes[1]:.0f} % lower at CR 4 and {changes[2]:.0f} % higher at CR 8",
        "on the model's own text CR 4 and CR 8 reach {:.1f} and {:.1f}".format(*own),
    ):
        assert sentence in text


def test_the_page_names_the_tasks_whose_intervals_exclude_zero() -> None:
    text, found = page_text(QWEN_PAGE), named(RECORD)
    tasks = (*CHOICES, "mmlu@5", *LAMBADA)
    assert outside(found, tasks) == {
        ("cr4", "mmlu@5"): "-2.8 [-5.4, -0.4]",
        ("cr6", "arc_easy@25"): "+2.0 [+0.2, +3.8]",
        ("cr6", "lambada_openai@0"): "-2.4 [-4.2, -0.8]",
        ("cr8", "arc_challenge@25"): "-2.4 [-4.2, -0.6]",
    }
    assert (
        f"Of {len(RATIOS) * len(tasks)} differences three have intervals below 0: MMLU at CR 4, "
        "-2.8 [-5.4, -0.4] points, LAMBADA without examples at CR 6, -2.4 [-4.2, -0.8], and "
        "ARC-Challenge at CR 8, -2.4 [-4.2, -0.6]. One is above: ARC-Easy at CR 6, "
        "+2.0 [+0.2, +3.8]."
    ) in text
    assert outside(found, SCHOOL) == {
        ("cr3", "gsm8k_cot"): "-3.2 [-6.2, -0.4]",
        ("cr8", "gsm8k_cot"): "-3.6 [-6.8, -0.2]",
    }
    assert "loses 3.2 [0.4, 6.2] points at CR 3 and 3.6 [0.2, 6.8] at CR 8." in text


def outside(found: dict[str, dict[str, Any]], tasks: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """Return the differences whose intervals exclude 0."""
    every = {(n, key): found[n]["tasks"][key]["difference"] for n in RATIOS for key in tasks}
    return {k: difference(each) for k, each in every.items() if each["low"] * each["high"] > 0}


def test_the_page_compares_the_run_with_the_one_above() -> None:
    text, found, other = page_text(QWEN_PAGE), named(RECORD), named("qwen25_coder_0_5b.json")
    own, above = (
        [model[name]["perplexity"]["continuation"] for name in RATIOS] for model in (found, other)
    )
    perplexities = [each["perplexity"] for each in above]
    ends = (perplexities[0], perplexities[-1], above[0]["cr_factor"], above[-1]["cr_factor"])
    assert (
        "perplexities of continuations of {:.2f} to {:.2f}, at ratios of {:.2f} to {:.2f}."
    ).format(*ends) in text
    lower = [a["perplexity"] < b["perplexity"] for a, b in zip(own, above, strict=True)]
    higher = [a["cr_factor"] > b["cr_factor"] for a, b in zip(own, above, strict=True)]
    assert (lower, higher) == ([True] * 4 + [False], [True] * 3 + [False, True])
    assert "lower perplexities at CR 2 to CR 6 and higher ratios except at CR 6." in text
    runs = [named(f"qwen25_coder_0_5b{kind}_seconds.json") for kind in ("", "_ratios")]
    code = {
        name: "{:.2f} and {:.2f}".format(
            *(run[name]["perplexity"]["continuation"]["perplexity"] for run in runs)
        )
        for name in ("cr4", "cr8")
    }
    assert f"perplexities of {code['cr4']} at CR 4, and of {code['cr8']} at CR 8." in text


def test_the_parts_of_the_cost_agree() -> None:
    found, text = record(RECORD), page_text(QWEN_PAGE)
    ((sampled, generating, speed, hours, training, steps, minutes),) = re.findall(
        r"Sampling took (\d+) s, (\d+) s of it generation, at ([\d,]+) tokens/s in up to 1,024 "
        r"sequences, or ([\d.]+) GPU hours per million tokens. .* validation took (\d+) s, of "
        r"which (\d+) s are its 840 steps. .* export it was ([\d.]+) minutes",
        text,
    )
    rate = int(speed.replace(",", ""))
    assert f"{1e6 / rate / 3600:.4f}" == hours
    assert int(generating) < int(sampled)
    assert found["trainings"]["train"]["steps"] == 840
    assert f"{60 * found['trainings']['train']['minutes']:.0f}" == steps
    assert int(sampled) + int(training) <= 60 * float(minutes) + 3
    assert f"Measured at: {found['commit'][:7]}, {found['date']}, when" in text


def test_the_page_says_where_the_exports_differ() -> None:
    text, first, later = page_text(QWEN_PAGE), {}, {}
    for kind in ("gsm8k", "math500", "humaneval"):
        for end in ("", "_defaults"):
            name = f"qwen25_coder_0_5b_prompts_{kind}_template{end}.json"
            for model, found in record(name, "cpu_x86_64")["models"].items():
                first[kind + end, model], later[kind + end, model] = found["first"], found["later"]
    own = [first["gsm8k_defaults", name]["value"] for name in ("cr4", "cr8")]
    more = later["gsm8k_defaults", "cr8"]["value"] / later["gsm8k", "cr8"]["value"]
    assert round(more) == 2
    assert (
        "{:.2f} nats at CR 4 and {:.2f} at CR 8, and the later tokens of CR 8 differ twice as much"
    ).format(*own) in text
    for name in ("cr4", "cr8"):
        assert first["math500_defaults", name]["value"] < first["math500", name]["value"]
        a, b = (first[f"humaneval{end}", name] for end in ("", "_defaults"))
        assert max(a["low"], b["low"]) < min(a["high"], b["high"])
    assert "MATH-500 does not show this" in text
    assert "intervals of the first token overlap with those of the first table" in text
    problems = RECIPES["qwen25_coder_0_5b"].word_problems
    assert f"therefore asks {problems:,} word problems of its own" in text
    assert f"made from {len(_PROBLEMS)} patterns, in place of {problems:,} of its" in text
