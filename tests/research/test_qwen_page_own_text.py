"""The page of Qwen2.5-Coder quotes the record of the recipe's own text."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from research.recipe.steps import RECIPES
from research.recipe.word_problems import _PROBLEMS
from tests.research.models_page import (
    CHOICES,
    EARLIER,
    LAMBADA,
    PAGE,
    QWEN_PAGE,
    difference,
    loss,
    named,
    page_rows,
    page_text,
    record,
)

RATIOS = ("cr2", "cr3", "cr4", "cr6", "cr8")
SCHOOL = ("gsm8k@5", "gsm8k_cot")
TASKS = (*CHOICES, "mmlu@5", *LAMBADA)
RECORD = "qwen25_coder_0_5b_defaults.json"
INSTRUCTIONS = "qwen25_coder_0_5b_instructions.json"  # before the recipe had word problems


@pytest.mark.parametrize(
    ("page", "first", "name"),
    [(QWEN_PAGE, "own text", RECORD), (EARLIER, "instructions", INSTRUCTIONS)],
)
def test_the_pages_have_the_runs_on_the_own_text(page: str, first: str, name: str) -> None:
    rows, found = page_rows(page), named(name)
    assert list(found) == ["original", *RATIOS]
    for name, model in found.items():
        of_original, validation = name == "original", model.get("validation")
        window, continuation = (model["perplexity"][part] for part in ("window", "continuation"))
        assert rows[f"{first}, {name.replace('cr', 'CR ')}"] == [
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


def perplexities(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        name: model["perplexity"]["continuation"]["perplexity"] for name, model in found.items()
    }


def test_the_page_has_the_needles_of_the_run() -> None:
    text, found = page_text(QWEN_PAGE), named(RECORD)
    needles = {name: model["needles"] for name, model in found.items()}
    lengths = ["1024", "4096", "8192", "16384"]
    assert all(list(of_model) == lengths for of_model in needles.values())
    missed = {
        (name, length): round(100 * (1 - each["value"]))
        for name, of_model in needles.items()
        for length, each in of_model.items()
        if each["value"] < 1
    }
    assert missed == {("cr6", "16384"): 1}
    first, *reads = (f"{each['16384']['reads_per_token']:,.0f}" for each in needles.values())
    assert (
        "CR 8 find all 400 in 1,024 to 16,384 tokens, and CR 6 misses one in 16,384. There a token "
        f"reads {first} others with the original, and {', '.join(reads[:-1])} and {reads[-1]} from"
    ) in text
    before = {name: m["needles"] for name, m in named(INSTRUCTIONS).items() if m["needles"]}
    assert list(before) == ["original", "cr4", "cr8"]
    assert {each["value"] for of_model in before.values() for each in of_model.values()} == {1}
    assert "The original, CR 4 and CR 8 found all 400." in page_text(EARLIER)


def test_the_pages_say_what_perplexity_changes() -> None:
    text, found = page_text(QWEN_PAGE), named(RECORD)
    texts, before = perplexities(found), perplexities(named(INSTRUCTIONS))
    now, then = (
        {name: 100 * (1 - each[name] / each["original"]) for name in RATIOS}
        for each in (texts, before)
    )
    changes = {name: found[name]["perplexity"]["continuation"]["difference"] for name in RATIOS}
    assert [n for n, each in changes.items() if each["high"] > 0] == ["cr4", "cr8"]
    assert f"{now['cr2']:.1f}" == f"{now['cr3']:.1f}"
    own = [found[name]["validation"]["cr_factor"] for name in ("cr4", "cr8")]
    for sentence in (
        f"is {now['cr2']:.1f} % lower than the original's at CR 2 and CR 3, and {now['cr6']:.1f} % "
        f"lower at CR 6. At CR 4 and CR 8 it is {now['cr4']:.1f} and {now['cr8']:.1f} % lower",
        "the model's own text CR 4 and CR 8 reach {:.1f} and {:.1f}".format(*own),
        f"of {before['cr2']:.2f} to {before['cr8']:.2f}. They were lower up to CR 6, most at CR 2,",
    ):
        assert sentence in text
    assert (
        f"was {then['cr2']:.0f} % lower than the original's at CR 2, {then['cr4']:.0f} % lower at "
        f"CR 4 and {-then['cr8']:.0f} % higher at CR 8"
    ) in page_text(EARLIER)
    more = [texts[name] - before[name] for name in RATIOS]
    assert max(more) == more[0]
    assert [change > 0 for change in more] == [True] * 4 + [False]
    assert "had lower perplexities up to CR 6" in page_text(PAGE)
    assert "perplexities up to CR 6 are higher" in page_text("CHANGELOG.md")


def test_the_pages_compare_gsm8k_without_word_problems() -> None:
    solved, before = (
        {(n, k): each[n]["tasks"][k]["score"] for n in RATIOS for k in SCHOOL}
        for each in (named(RECORD), named(INSTRUCTIONS))
    )
    fewer = {key for key in solved if solved[key] < before[key]}
    few_shot, reasoning = ([name for name in RATIOS if (name, key) in fewer] for key in SCHOOL)
    assert few_shot == ["cr2", "cr6", "cr8"]
    assert "with five examples at CR 2, CR 6 and CR 8. Each text" in page_text(PAGE)
    assert "With five examples it solved more of GSM8K at CR 2, CR 6 and CR 8" in page_text(
        QWEN_PAGE
    )
    assert reasoning == ["cr6"]
    assert solved["cr4", SCHOOL[1]] == before["cr4", SCHOOL[1]]
    assert "with reasoning more at CR 6, as many at CR 4 and fewer at the others" in page_text(
        QWEN_PAGE
    )


def outside(found: dict[str, dict[str, Any]], tasks: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """Return the differences whose intervals exclude 0."""
    every = {(n, key): found[n]["tasks"][key]["difference"] for n in RATIOS for key in tasks}
    return {k: difference(each) for k, each in every.items() if each["low"] * each["high"] > 0}


def test_the_page_names_the_tasks_whose_intervals_exclude_zero() -> None:
    text, found = page_text(QWEN_PAGE), named(RECORD)
    assert outside(found, TASKS) == {
        ("cr3", "piqa@20"): "+1.4 [+0.2, +2.6]",
        ("cr4", "arc_easy@25"): "+1.8 [+0.2, +3.6]",
        ("cr6", "arc_easy@25"): "+1.8 [+0.2, +3.4]",
        ("cr8", "openbookqa@5"): "-1.2 [-2.4, -0.2]",
        ("cr8", "mmlu@5"): "-3.0 [-5.0, -0.8]",
    }
    lost = {key: -100 * found["cr4"]["tasks"][key]["difference"]["value"] for key in TASKS}
    assert max(lost, key=lost.__getitem__) == "mmlu@5"
    most = f"{lost['mmlu@5']:.1f} points"
    for sentence in (
        f"At CR 4 no task of multiple choice, nor LAMBADA, loses more than {most}, those of MMLU",
        f"Of their {len(RATIOS) * len(TASKS)} differences two have intervals below 0, both at "
        "CR 8: MMLU, -3.0 [-5.0, -0.8] points, and OpenBookQA, -1.2 [-2.4, -0.2]. Three are above: "
        "PIQA at CR 3, +1.4 [+0.2, +2.6], and ARC-Easy at CR 4, +1.8 [+0.2, +3.6], and CR 6, "
        "+1.8 [+0.2, +3.4].",
    ):
        assert sentence in text
    assert f"loses at most {most} of a task of multiple choice" in page_text("CHANGELOG.md")


def test_the_page_says_what_gsm8k_loses() -> None:
    found = named(RECORD)
    assert set(outside(found, SCHOOL)) == {
        ("cr6", "gsm8k@5"),
        ("cr6", "gsm8k_cot"),
        ("cr8", "gsm8k@5"),
    }
    lost = {
        (name, key): loss(found[name]["tasks"][key]["difference"])
        for name in RATIOS
        for key in SCHOOL
    }
    few, reasoning = ({name: lost[name, key] for name in RATIOS} for key in SCHOOL)
    assert (
        f"with five examples loses {few['cr6']} points at CR 6 and {few['cr8']} at CR 8, and with "
        f"reasoning {reasoning['cr6']} at CR 6. All other intervals of its ten differences include "
        f"0; CR 4 loses {few['cr4']} and {reasoning['cr4']}."
    ) in page_text(QWEN_PAGE)


def test_the_page_of_earlier_runs_names_those_of_the_run_without_word_problems() -> None:
    text, found = page_text(EARLIER), named(INSTRUCTIONS)
    assert outside(found, TASKS) == {
        ("cr4", "mmlu@5"): "-2.8 [-5.4, -0.4]",
        ("cr6", "arc_easy@25"): "+2.0 [+0.2, +3.8]",
        ("cr6", "lambada_openai@0"): "-2.4 [-4.2, -0.8]",
        ("cr8", "arc_challenge@25"): "-2.4 [-4.2, -0.6]",
    }
    assert (
        f"Of {len(RATIOS) * len(TASKS)} differences three have intervals below 0: MMLU at CR 4, "
        "-2.8 [-5.4, -0.4] points, LAMBADA without examples at CR 6, -2.4 [-4.2, -0.8], and "
        "ARC-Challenge at CR 8, -2.4 [-4.2, -0.6]. One is above: ARC-Easy at CR 6, "
        "+2.0 [+0.2, +3.8]."
    ) in text
    assert set(outside(found, SCHOOL)) == {("cr3", "gsm8k_cot"), ("cr8", "gsm8k_cot")}
    lost = [loss(found[name]["tasks"]["gsm8k_cot"]["difference"]) for name in ("cr3", "cr8")]
    assert "lost {} points at CR 3 and {} at CR 8.".format(*lost) in text
    commit = record(INSTRUCTIONS)
    assert f"Measured at: {commit['commit'][:7]}, {commit['date']}, when these" in text


def test_the_page_compares_the_run_with_the_one_above() -> None:
    text, found, other = page_text(QWEN_PAGE), named(RECORD), named("qwen25_coder_0_5b.json")
    own, above = (
        [model[name]["perplexity"]["continuation"] for name in RATIOS] for model in (found, other)
    )
    values = [each["perplexity"] for each in above]
    ends = (min(values), max(values), above[0]["cr_factor"], above[-1]["cr_factor"])
    assert (
        "perplexities of continuations of {:.2f} to {:.2f}, at ratios of {:.2f} to {:.2f}."
    ).format(*ends) in text
    assert all(a["perplexity"] < b["perplexity"] for a, b in zip(own, above, strict=True))
    higher = [a["cr_factor"] > b["cr_factor"] for a, b in zip(own, above, strict=True)]
    assert higher == [True] * 3 + [False, True]
    assert "lower perplexities at every ratio, and higher ratios except at CR 6." in text
    runs = [named(f"qwen25_coder_0_5b{kind}_seconds.json") for kind in ("", "_ratios")]
    code = {
        name: "{:.2f} and {:.2f}".format(*(perplexities(run)[name] for run in runs))
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
    assert abs(int(sampled) + int(training) - 60 * float(minutes)) < 4  # one runs after the other
    assert f"Measured at: {found['commit'][:7]}, {found['date']}." in text


def test_the_page_says_where_the_exports_differ() -> None:
    text, first, later = page_text(QWEN_PAGE), {}, {}
    ends = ("", "_defaults", "_instructions")
    for kind, end in product(("gsm8k", "math500", "humaneval"), ends):
        name = f"qwen25_coder_0_5b_prompts_{kind}_template{end}.json"
        for model, found in record(name, "cpu_x86_64")["models"].items():
            first[kind + end, model], later[kind + end, model] = found["first"], found["later"]
    above, own, before = (
        [first[f"gsm8k{end}", name]["value"] for name in ("cr4", "cr8")] for end in ends
    )
    more = later["gsm8k_defaults", "cr8"]["value"] / later["gsm8k", "cr8"]["value"]
    for sentence in (
        f"its exports differ by {own[0]:.3f} nats at CR 4 and {own[1]:.3f} at CR 8, those of the "
        f"run with questions of GSM8K by {above[0]:.3f} and {above[1]:.3f}. Without word problems "
        "these were "
        f"{before[0]:.2f} and {before[1]:.2f}.",
        f"still differs {own[1] / above[1]:.1f} times as much as that of the run with questions of "
        f"GSM8K, and later tokens {more:.1f} times.",
    ):
        assert sentence in text
    removed = [1 - now / then for now, then in zip(own, before, strict=True)]
    assert [round(10 * share) for share in removed] == [9, 9]
    assert "the KL is nine tenths smaller at both ratios" in text
    assert "first token of an answer to GSM8K is nine tenths smaller" in page_text("CHANGELOG.md")
    for name in ("cr4", "cr8"):
        of_math500 = [first[f"math500{end}", name]["value"] for end in ends]
        assert max(of_math500) < 0.01
        code = [first[f"humaneval{end}", name] for end in ends]
        assert max(each["low"] for each in code) < min(each["high"] for each in code)
    problems = RECIPES["qwen25_coder_0_5b"].word_problems
    assert f"With {problems:,} of them, made from {len(_PROBLEMS)} patterns" in text
    prompts = RECIPES["qwen25_coder_0_5b"].prompts
    assert f"answered {prompts:,} instructions and {problems:,} word problems twice" in text
    assert f"with {prompts + problems:,} instructions and no word problems" in page_text(EARLIER)
