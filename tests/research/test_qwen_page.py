"""The page of Qwen2.5-Coder quotes its stored records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from dms_train.evaluation.analysis.comparison import READS, line
from dms_train.evaluation.analysis.pareto import BudgetPoint, margin
from research import prompt_kl
from research.recipe.figures import chain_tasks
from research.recipe.report import report_text
from tests.research.models_page import (
    EARLIER,
    POLICIES,
    QWEN_PAGE,
    check_scores,
    difference,
    interval,
    named,
    page_rows,
    page_text,
    percent,
    record,
    score,
)

QWEN = {
    "original": "original",
    **{f"cr{ratio}": f"DMS at CR {ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"dmc_cr{ratio}": f"DMC at CR {ratio}" for ratio in (4, 8)},
    "control": "no eviction",
}
PROMPTS = {
    "GSM8K": "gsm8k_template",
    "GSM8K without a system prompt": "gsm8k_auto",
    "MATH-500": "math500_template",
    "HumanEval": "humaneval_template",
    "HumanEval without a system prompt": "humaneval_auto",
    "HumanEval, textbooks": "humaneval_template_textbooks",
    "GSM8K without a system prompt, textbooks": "gsm8k_auto_textbooks",
    "GSM8K, own text": "gsm8k_template_defaults",
    "MATH-500, own text": "math500_template_defaults",
    "HumanEval, own text": "humaneval_template_defaults",
    "GSM8K, no word problems": "gsm8k_template_instructions",
    "MATH-500, no word problems": "math500_template_instructions",
    "HumanEval, no word problems": "humaneval_template_instructions",
}


def with_policies() -> dict[str, dict[str, Any]]:
    """Return the needles of the original with policies, and of the recipe's exports as `dms_`."""
    records = [named(f"qwen25_coder_0_5b_policies{part}.json") for part in ("", "_16k", "_more")]
    found = {f"dms_{name}": model["needles"] for name, model in _own_text().items()}
    for name, model in (pair for models in records for pair in models.items()):
        found[name] = found.get(name, {}) | model["needles"]
    return found


def perplexities_with_policies() -> dict[str, dict[str, Any]]:
    """Return the same for the perplexity of continuations."""
    own = {f"dms_{name}": model for name, model in _own_text().items()}
    models = named("qwen25_coder_0_5b_perplexity.json") | own
    return {name: model["perplexity"]["continuation"] for name, model in models.items()}


def _own_text() -> dict[str, dict[str, Any]]:
    return named("qwen25_coder_0_5b_defaults.json")


def test_the_page_has_the_needles_of_qwen_with_policies() -> None:
    rows, found = page_rows(QWEN_PAGE), with_policies()
    titles = {"DMS": "dms", **{title: name for title, name in POLICIES.items() if title != "Knorm"}}
    for title, name in titles.items():
        for ratio in (4, 8):
            needles = found[f"{name}_cr{ratio}"]
            lengths = ("1024", "4096", "8192", "16384")
            cells = [interval(needles[n]) if n in needles else "" for n in lengths]
            reads = f"{needles['8192']['reads_per_token']:,.0f}" if "8192" in needles else ""
            assert rows[f"needles, {title}, CR {ratio}"] == [*cells, reads]
    of_dms = [found[f"dms_cr{ratio}"] for ratio in (4, 8)]
    assert {each["value"] for needles in of_dms for each in needles.values()} == {1}
    more = [
        found[f"quest_cr{ratio}"]["8192"]["reads_per_token"] / needles["8192"]["reads_per_token"]
        for ratio, needles in zip((4, 8), of_dms, strict=True)
    ]
    assert ("reads {:.1f} (CR 4) and {:.1f} times (CR 8) as many as DMS in 8,192 tokens.").format(
        *more
    ) in page_text(QWEN_PAGE)


def test_the_page_has_the_perplexities_of_qwen_with_policies() -> None:
    rows, found = page_rows(QWEN_PAGE), perplexities_with_policies()
    for title, name in {"DMS": "dms", **POLICIES}.items():
        both = [found[f"{name}_cr{ratio}"] for ratio in (4, 8)]
        cells = [(f"{each['cr_factor']:.2f}", f"{each['perplexity']:.2f}") for each in both]
        assert rows[f"perplexity, {title}"] == [*cells[0], *cells[1]]
    others = [found[f"{name}_cr4"]["perplexity"] for name in POLICIES.values()]
    assert max(found[f"dms_cr{ratio}"]["perplexity"] for ratio in (4, 8)) < min(others)
    ratios = [f"{found[f'dms_cr{ratio}']['cr_factor']:.1f}" for ratio in (4, 8)]
    assert f"Its ratios are {ratios[0]} and {ratios[1]}." in page_text(QWEN_PAGE)


@pytest.mark.parametrize("prefix", ["", "window 16, "])
def test_the_page_has_the_numbers_of_qwen(prefix: str) -> None:
    rows, found = page_rows(_page(prefix)), _qwen(prefix)
    for model in found["models"]:
        cells, needles = rows[f"Qwen, {prefix}{QWEN[model['name']]}"], model["needles"]
        assert cells[0] == f"{model['perplexity']['continuation']['cr_factor']:.2f}"
        if model["name"] != "original":
            assert cells[1] == f"{model['validation']['kl_nats_per_token']:.4f}"
        assert cells[2] == f"{model['perplexity']['window']['perplexity']:.2f}"
        assert cells[3] == f"{model['perplexity']['continuation']['perplexity']:.2f}"
        lengths = ("1024", "4096", "8192", "16384")
        assert cells[4:8] == [f"{needles[key]['value']:.2f}" for key in lengths]
        assert cells[8] == f"{needles['16384']['reads_per_token']:,.0f}"


RATIOS = ["cr2", "cr4", "cr8"]
CHAIN_TASKS = {"GSM8K": "gsm8k", "MATH-500": "math500", "HumanEval": "humaneval"}
CHAINS = {
    "": (["original", *RATIOS], CHAIN_TASKS),
    "bare, ": (["original", "cr4", "cr8"], {"GSM8K": "gsm8k", "HumanEval": "humaneval"}),
    "window 16, ": (["original", "control", *RATIOS], CHAIN_TASKS),
}
TWO = ("humaneval", "gsm8k")
NOT_FINISHED = {"": {("math500", "cr2")}}


@pytest.mark.parametrize("prefix", CHAINS)
def test_the_page_has_the_chains_of_qwen(prefix: str) -> None:
    rows, found = page_rows(_page(prefix)), _qwen(prefix)
    names, tasks = CHAINS[prefix]
    text = page_text(_page(prefix))
    points = _points(found)
    known = {(task, name) for task, name, *_ in points}
    assert known == set(product(tasks.values(), names)) - NOT_FINISHED.get(prefix, set())
    for title, task in tasks.items():
        for chains in (1, 4, 16):
            row = [points.get((task, name, chains, 2)) for name in names]
            cells = [percent(point["accuracy"]) if point else "" for point in row]
            reads = [p for p, name in zip(row, names, strict=True) if name != "control"]
            cells += [f"{point['kv_reads']:,.0f}" if point else "" for point in reads]
            assert rows[f"{prefix}{title}, {chains}"] == cells
        if prefix == "bare, ":
            solved = [f"{100 * point['chain_accuracy']:.1f}" for point in row if point]
            ends = [f"{point['tokens']:.0f}" for point in row if point]
            for numbers, unit in ((solved, "%"), (ends, "tokens")):
                assert f"{numbers[0]}, {numbers[1]} and {numbers[2]} {unit}" in text
    _check_margins(found, text)


def _points(found: Mapping[str, Any]) -> dict[tuple[str, str, int, float], dict[str, Any]]:
    return {(p["task"], p["model"], p["chains"], p["length"]): p for p in found["chains"]["points"]}


def _check_margins(found: Mapping[str, Any], text: str) -> None:
    for each in found["chains"]["margins"]:
        if each["cost"] == "KV reads":
            low, high = each["interval"]
            number = f"{each['value']:+.1f} [{low:.1f}, {high:.1f}]"
            title = each["task"].replace("MATH 500", "MATH-500")
            assert re.search(f"{re.escape(number)}( points more)? of {title}", text)


def test_the_page_has_the_margins_of_qwen_at_equal_peak_tokens() -> None:
    (sentence,) = [
        text for text in page_text(QWEN_PAGE).split("**") if text.startswith(" the margins are")
    ]
    margins = {m["task"]: m for m in _qwen("")["chains"]["margins"] if m["cost"] == "peak tokens"}
    for task, name in (("MATH 500", "MATH-500"), ("HumanEval", "HumanEval"), ("GSM8K", "GSM8K")):
        low, high = margins[task]["interval"]
        assert f"{margins[task]['value']:+.1f} [{low:.1f}, {high:.1f}] of {name}" in sentence


@pytest.mark.parametrize("prefix", ["", "textbooks, "])
def test_the_page_has_one_chain_of_qwen(prefix: str) -> None:
    """Also those of the run whose plain text had no code."""
    rows, found = page_rows(QWEN_PAGE), _qwen(prefix)
    points, names = _points(found), ["original", *RATIOS]
    solved_by = {task for task, *_ in points}
    for title, task in CHAIN_TASKS.items():
        if task in solved_by:
            row = [points.get((task, name, 16, 2)) for name in names]
            cells = [f"{100 * point['chain_accuracy']:.1f}" if point else "" for point in row]
            cells += [f"{point['tokens']:.0f}" if point else "" for point in row]
            assert rows[f"{prefix or 'one chain, '}{title}"] == cells
    _check_margins(found, page_text(QWEN_PAGE))


def test_the_page_states_what_chains_of_qwen_lose() -> None:
    text = page_text(QWEN_PAGE)
    points, before = _points(_qwen("")), _points(_qwen("textbooks, "))

    def lost(task: str, found: Mapping[Any, Any]) -> str:
        ratios = [found[task, name, 16, 2]["chain_accuracy"] for name in ("cr4", "cr8")]
        whole = found[task, "original", 16, 2]["chain_accuracy"]
        return " and ".join(f"{100 * (whole - share):.1f}" for share in ratios)

    def gained(task: str, names: tuple[str, ...]) -> list[float]:
        return [
            points[task, name, chains, 2]["accuracy"]["value"]
            - points[task, "original", chains, 2]["accuracy"]["value"]
            for name in names
            for chains in (1, 4, 16)
        ]

    def ends(values: list[float]) -> str:
        found = sorted(abs(100 * value) for value in values)
        return f"{found[0]:.1f} to {found[-1]:.1f}"

    reads = [
        points["math500", "cr4", n, 2]["kv_reads"] / points["math500", "original", n, 2]["kv_reads"]
        for n in (1, 4, 16)
    ]
    assert min(gained("math500", ("cr4",))) > 0 >= max(gained("math500", ("cr8",)))
    assert max(gained("gsm8k", ("cr4", "cr8"))) < 0 > max(gained("humaneval", ("cr4", "cr8")))
    for sentence in (
        f"CR 4 solves {ends(gained('math500', ('cr4',)))} points more of MATH-500",
        f"with {100 * min(reads):.0f} to {100 * max(reads):.0f} % of its KV reads",
        f"and CR 8 {ends(gained('math500', ('cr8',)))} fewer",
        f"{ends(gained('gsm8k', ('cr4', 'cr8')))} points fewer of GSM8K",
        f"{ends(gained('humaneval', ('cr4', 'cr8')))} fewer of HumanEval",
        f"one chain loses {lost('gsm8k', points)} points of GSM8K at CR 4 and CR 8",
        f"and {lost('humaneval', points)} of HumanEval",
        f"With textbooks one chain lost {lost('humaneval', before)} points of HumanEval",
        f"Of GSM8K one chain lost {lost('gsm8k', before)} points with textbooks",
    ):
        assert sentence in text


def test_the_page_has_the_control_of_qwen() -> None:
    models = {model["name"]: model for model in _qwen("window 16, ")["models"]}
    control = models["control"]
    found = {each["value"] for each in control["needles"].values()}
    assert found == {1.0}
    assert (
        "has a perplexity of continuations of "
        f"{control['perplexity']['continuation']['perplexity']:.2f} and finds all needles. In "
        "multiple choice it differs from the original by "
        f"{difference(control['choices']['difference'])} points."
    ) in page_text(QWEN_PAGE)


def test_the_page_has_the_margins_of_each_export_of_qwen() -> None:
    points = _qwen("")["chains"]["points"]

    def of(task: str, model: str) -> float:
        both = (
            [p for p in points if (p["task"], p["model"]) == (task, name)]
            for name in (model, "original")
        )
        own, other = ([BudgetPoint(p["kv_reads"], p["accuracy"]["value"]) for p in x] for x in both)
        found = margin(own, other)
        assert found is not None
        return found

    exports = {"math500": ("cr4", "cr8"), "humaneval": RATIOS, "gsm8k": RATIOS}
    values = {task: [of(task, name) for name in names] for task, names in exports.items()}
    math500, humaneval, gsm8k = ([f"{x:+.1f}" for x in found] for found in values.values())
    text = page_text(QWEN_PAGE)
    assert (
        "has margins of {} (CR 4) and {} (CR 8) of MATH-500, {} (CR 2), {} and {} of HumanEval, "
        "and {}, {} and {} of GSM8K."
    ).format(*math500, *humaneval, *gsm8k) in text
    pooled = [m for m in _qwen("")["chains"]["margins"] if m["cost"] == "KV reads"]
    (of_gsm8k,) = (m["value"] for m in pooled if m["task"] == "GSM8K")
    assert of_gsm8k > max(values["gsm8k"])
    assert "that of all exports on GSM8K is above each of them" in text


def test_the_page_has_the_margins_of_qwen_without_cr_2() -> None:
    """As the run with textbooks, which has none."""
    text = page_text(QWEN_PAGE)
    numbers = _qwen("")
    points = [point for point in numbers["chains"]["points"] if point["model"] != "cr2"]
    grouped = chain_tasks({"chains": {"points": points}}, READS)
    margins = [margin(*(line(grouped[t], m) for m in ("DMS", "Vanilla"))) for t in TWO]
    shown = " and ".join(f"{value:+.1f}" for value in margins if value is not None)
    assert f"without it they are {shown} now" in text


def _difference_of(task: Mapping[str, Any]) -> str:
    return difference(task["difference"]) if task["difference"] else ""


@pytest.mark.parametrize("prefix", ["", "own text, ", "window 16, "])
def test_the_page_has_the_scores_of_qwen(prefix: str) -> None:
    rows = page_rows(_page(prefix))
    for model in _qwen(prefix)["models"]:
        title = f"choices, {prefix}{QWEN[model['name']]}"
        finished = all(model.get("tasks", {"none": None}).values())
        if finished:
            check_scores(rows[title], model)
        else:
            assert title not in rows
        if finished and not prefix:
            solved = [model["tasks"][key] for key in ("gsm8k@5", "gsm8k_cot")]
            cells = [f(task) for task in solved for f in (score, _difference_of)]
            assert rows[f"greedy, {QWEN[model['name']]}"] == cells


def _page(prefix: str) -> str:
    """Return the page whose rows begin with a prefix."""
    return EARLIER if prefix in ("bare, ", "window 16, ") else QWEN_PAGE


def _qwen(prefix: str) -> dict[str, Any]:
    """Record of the recipe, or the one of the rows of the page that begin with a prefix."""
    name = {
        "": "",
        "own text, ": "_defaults",
        "textbooks, ": "_textbooks",
        "bare, ": "_questions",
        "window 16, ": "_window_16",
    }[prefix]
    return record(f"qwen25_coder_0_5b{name}.json")


def test_the_page_has_the_numbers_of_qwen_with_bare_questions() -> None:
    text = page_text(EARLIER)
    found = {model["name"]: model for model in _qwen("bare, ")["models"]}
    kl = [
        f"{model['validation']['kl_nats_per_token']:.4f}"
        for model in found.values()
        if "validation" in model
    ]
    assert f"a KL of {', '.join(kl[:-1])} and {kl[-1]} at CR 2, 3, 4, 6 and 8" in text
    continuation = found["cr4"]["perplexity"]["continuation"]["perplexity"]
    assert f"a perplexity of {continuation:.2f} of continuations at CR 4" in text
    assert [found[name]["needles"]["16384"]["value"] for name in ("cr6", "cr8")] == [0.98, 0.98]
    lost = difference(found["cr2"]["choices"]["difference"])
    assert f"differed from the original's by {lost}" in text


def test_the_page_has_the_divergence_on_the_prompts_of_qwen() -> None:
    rows = page_rows(QWEN_PAGE)
    for title, name in PROMPTS.items():
        found = record(f"qwen25_coder_0_5b_prompts_{name}.json", "cpu_x86_64")
        assert found["problems"] == 32
        for model, label in (("cr4", "CR 4"), ("cr8", "CR 8")):
            numbers, original = found["models"][model], found["models"]["original"]
            cells = [f"{numbers[key]['value']:.4f}" for key in ("first", "later")]
            cells += [f"{each['probability']['value']:.2f}" for each in (original, numbers)]
            assert rows[f"prompts, {title}, {label}"] == cells
    for name in PROMPTS.values():
        shown = prompt_kl.table(
            record(f"qwen25_coder_0_5b_prompts_{name}.json", "cpu_x86_64")["models"]
        )
        assert "| cr8 |" in shown


def test_the_page_has_the_memory_of_the_longest_prompts() -> None:
    """24 layers, 2 KV heads, keys and values of 64 numbers with 2 bytes each."""
    bytes_of_token = 24 * 2 * 2 * 64 * 2
    text = page_text(QWEN_PAGE)
    models = {model["name"]: model for model in _qwen("")["models"]}
    sizes = [
        f"{models[name]['needles']['16384']['peak_tokens'] * bytes_of_token / 1e6:.0f} MB"
        for name in ("original", "cr4", "cr8")
    ]
    assert f"takes {bytes_of_token:,} bytes in bf16" in text
    assert f"holds {sizes[0]}, CR 4 holds {sizes[1]} and CR 8 holds {sizes[2]}" in text


def test_the_records_of_qwen_print() -> None:
    assert "| quest_cr8 |" in report_text(record("qwen25_coder_0_5b_policies_16k.json"))
    for prefix in CHAINS:
        assert "| DMS minus Vanilla | GSM8K |" in report_text(_qwen(prefix))
