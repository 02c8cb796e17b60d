"""The page of models and the README quote the stored records."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dms_train.evaluation.analysis.comparison import line
from dms_train.evaluation.analysis.pareto import margin
from research import prompt_kl
from research.recipe.figures import chain_tasks
from research.recipe.report import report_text
from research.recipe.sweep import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results"
H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
POLICIES = {
    "Quest": "quest",
    "R-KV": "r_kv",
    "TOVA": "tova_prefill_dense",
    "StreamingLLM": "streaming_llm",
    "KeyDiff": "keydiff",
    "SnapKV": "snapkv",
    "H2O": "h2o_prefill_dense",
    "Knorm": "knorm",
}
MODELS = {
    "original": "original",
    **{f"DMS, CR {ratio}": f"cr{ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"window 16, CR {ratio}": f"window_16_cr{ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"DMC, CR {ratio}": f"dmc_cr{ratio}" for ratio in (4, 8)},
    **{
        f"{title}, CR {ratio}": f"{name}_cr{ratio}"
        for title, name in POLICIES.items()
        for ratio in (4, 8)
    },
}
CHOICES = ("hellaswag@10", "arc_easy@25", "arc_challenge@25", "piqa@20", "winogrande@5")
CHOICES += ("openbookqa@5",)
LAMBADA = ("lambada_openai@0", "lambada_openai@10")
QWEN = {
    "original": "original",
    **{f"cr{ratio}": f"DMS at CR {ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"dmc_cr{ratio}": f"DMC at CR {ratio}" for ratio in (4, 8)},
    "control": "no eviction",
}
VARIANTS = {
    "none": (H100, "base"),
    "eviction channel 0": (H100, "channel-0"),
    "learning rate 5e-5": (H100, "lr-5e-5"),
    "all, learning rate 2e-4": (H200, "base"),
    "attention, learning rate 2e-4": (H200, "train-attention"),
    "adapters (`lora`, rank 16), learning rate 1e-3": (H200, "train-lora"),
}
GATES = {
    "not trained": "original",
    "DMS, window 16": "base",
    "DMS, window 64": "window-64",
    "DMS, window 256": "window-256",
    "TRIM-KV, a budget at CR 4": "trim-kv",
    "KVzap, threshold exp(-5)": "kvzap",
    **{f"KVzap, threshold exp(-{offset})": f"kvzap-offset-{offset}" for offset in (4.5, 4, 3.5)},
}
WINDOW_64 = {
    "window 64, learning rate 2e-4": "base",
    "25 steps for each unit of the ratio, not 50": "25-steps-per-unit",
    "learning rate 1e-4": "lr-1e-4",
    "learning rate 5e-4": "lr-5e-4",
}

TEXTS = {
    "plain text": "base",
    "its first four tokens stay": "sinks",
    "half of the text is the model's own": "both-texts",
}


PROMPTS = {
    "GSM8K": "gsm8k_template",
    "GSM8K without a system prompt": "gsm8k_auto",
    "MATH-500": "math500_template",
    "HumanEval": "humaneval_template",
    "HumanEval without a system prompt": "humaneval_auto",
    "HumanEval, textbooks": "humaneval_template_textbooks",
    "GSM8K without a system prompt, textbooks": "gsm8k_auto_textbooks",
}
STORED = {"a live original": "base", "a stored original, 64 tokens": "stored-teacher"}
FP8 = {"all products in bf16": "bf16-layers", "MLPs and output projections in FP8": "fp8"}


def record(name: str, device: str = H200) -> dict[str, Any]:
    return json.loads((RESULTS / device / name).read_text(encoding="utf-8"))


def models() -> dict[str, dict[str, Any]]:
    """Models of the newest record, and of the one before, whose DMS has window 16.

    The oldest record has the perplexity of some policies.
    """
    oldest, before, newest = (
        {model["name"]: dict(model) for model in record(name, device)["models"]}
        for name, device in (
            ("smollm2_135m.json", H100),
            ("smollm2_135m_window_16.json", H200),
            ("smollm2_135m.json", H200),
        )
    )
    for name, model in before.items():
        if "perplexity" not in model and name in oldest:
            model["perplexity"] = oldest[name]["perplexity"]
    named = {f"window_16_{name}" if name in newest else name: before[name] for name in before}
    return named | newest


def page_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of every table row by the first cell up to a colon."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return {row[0].partition(":")[0]: row[1:] for row in cells}


def interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def test_the_page_has_the_numbers_of_the_record() -> None:
    rows, known = page_rows("docs/models.md"), models()
    for title, name in MODELS.items():
        model, cells = known[name], rows[title]
        perplexity, validation = model.get("perplexity"), model.get("validation")
        assert cells[1] == (f"{validation['kl_nats_per_token']:.4f}" if validation else "")
        if perplexity:
            assert cells[0] == f"{perplexity['continuation']['cr_factor']:.2f}"
            assert cells[2] in (f"{perplexity['window']['perplexity']:.2f}", "")
            assert cells[3] == f"{perplexity['continuation']['perplexity']:.2f}"
        else:
            assert cells[0] == cells[2] == cells[3] == ""
        assert cells[4:7] == [interval(model["needles"][key]) for key in ("1024", "2048", "4096")]
        assert cells[7] == f"{model['needles']['4096']['reads_per_token']:,.0f}"


def test_the_page_has_the_scores_of_the_record() -> None:
    rows = page_rows("docs/models.md")
    for model in record("smollm2_135m.json")["models"]:
        title = "tasks, " + model["name"].replace("cr", "CR ")
        _check_scores(rows[title], model)


def test_the_page_has_three_runs() -> None:
    rows = page_rows("docs/models.md")
    runs = [record(f"smollm2_135m{name}.json")["models"] for name in ("", "_second", "_first")]
    for same in zip(*(models[1:] for models in runs), strict=True):
        (name,) = {model["name"] for model in same}
        cells: list[str] = []
        for model in same:
            window, continuation = (model["perplexity"][p] for p in ("window", "continuation"))
            cells.append(f"{continuation['cr_factor']:.2f}")
            cells.append(f"{model['validation']['kl_nats_per_token']:.4f}")
            cells += [f"{part['perplexity']:.2f}" for part in (window, continuation)]
            needles = model["needles"].get("4096")
            cells.append(f"{needles['value']:.2f}" if needles else "")
        assert rows[name.replace("cr", "runs, CR ")] == cells
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
    for model in runs[1]:
        if model["name"] in ("cr4", "cr8"):
            for key in CHOICES[:2]:
                assert _difference(model["tasks"][key]["difference"]) in text


def _check_scores(cells: list[str], model: Mapping[str, Any]) -> None:
    """Check the cells of multiple choice, their mean, LAMBADA and the paired difference."""
    choices, tasks = (*CHOICES, "mmlu@5"), model["tasks"]
    assert cells[:7] == [_score(tasks[key]) for key in choices]
    assert cells[7] == f"{100 * statistics.fmean(tasks[key]['score'] for key in choices):.2f}"
    assert cells[8:10] == [_score(tasks[key]) for key in LAMBADA]
    of_original = model["name"] == "original"
    assert cells[10] == ("" if of_original else _difference(model["choices"]["difference"]))


def test_the_page_has_the_scores_with_window_16() -> None:
    rows = page_rows("docs/models.md")
    known = {m["name"]: m for m in record("smollm2_135m_window_16.json")["models"]}
    titles = {title: name for title, name in MODELS.items() if not title.startswith("window")}
    for title, name in titles.items():
        if "tasks" not in (model := known[name]):
            continue
        cells = rows["the original" if name == "original" else title.replace(",", " at")]
        scores = {key: _score(model["tasks"].get(key)) for key in (*CHOICES, *LAMBADA)}
        assert cells[:6] == [scores[key] for key in CHOICES]
        assert cells[7:] == [scores[key] for key in LAMBADA]
        whole = all(scores[key] for key in CHOICES)
        mean = statistics.fmean(model["tasks"][key]["score"] for key in CHOICES) if whole else None
        assert cells[6] == ("" if mean is None else f"{100 * mean:.2f}")


def _score(task: Mapping[str, Any] | None) -> str:
    return "" if task is None else f"{100 * task['score']:.1f} ± {100 * task['half_width']:.1f}"


def _difference(found: Mapping[str, float]) -> str:
    ends = (100 * found[key] for key in ("value", "low", "high"))
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*ends)


def _difference_of(task: Mapping[str, Any]) -> str:
    return _difference(task["difference"]) if task["difference"] else ""


def percent(found: Mapping[str, float]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * found[key] for key in ("value", "low", "high")))


def test_the_page_has_the_needles_of_qwen_with_policies() -> None:
    rows = page_rows("docs/models.md")
    of_dms = {f"dms_{m['name']}": m for m in record("qwen25_coder_0_5b.json")["models"]}
    found = {m["name"]: m for m in record("qwen25_coder_0_5b_policies.json")["models"]} | of_dms
    longer = {
        m["name"]: m for m in record("qwen25_coder_0_5b_policies_16k.json")["models"]
    } | of_dms
    titles = {"DMS": "dms", **{title: name for title, name in POLICIES.items() if title != "Knorm"}}
    for title, name in titles.items():
        for ratio in (4, 8):
            needles = found[f"{name}_cr{ratio}"]["needles"]
            cells = [interval(needles[n]) if n in needles else "" for n in ("1024", "4096", "8192")]
            reads = f"{needles['8192']['reads_per_token']:,.0f}" if "8192" in needles else ""
            in_16k = longer.get(f"{name}_cr{ratio}")
            cells.append(interval(in_16k["needles"]["16384"]) if in_16k else "")
            assert rows[f"needles, {title}, CR {ratio}"] == [*cells, reads]


def test_the_page_has_the_perplexities_of_qwen_with_policies() -> None:
    rows = page_rows("docs/models.md")
    of_dms = {f"dms_{m['name']}": m for m in record("qwen25_coder_0_5b.json")["models"]}
    found = {m["name"]: m for m in record("qwen25_coder_0_5b_perplexity.json")["models"]} | of_dms
    for title, name in {"DMS": "dms", **POLICIES}.items():
        cells = []
        for ratio in (4, 8):
            perplexity = found[f"{name}_cr{ratio}"]["perplexity"]["continuation"]
            cells += [f"{perplexity['cr_factor']:.2f}", f"{perplexity['perplexity']:.2f}"]
        assert rows[f"perplexity, {title}"] == cells


@pytest.mark.parametrize("prefix", ["", "window 16, "])
def test_the_page_has_the_numbers_of_qwen(prefix: str) -> None:
    rows, found = page_rows("docs/models.md"), _qwen(prefix)
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
    rows, found = page_rows("docs/models.md"), _qwen(prefix)
    names, tasks = CHAINS[prefix]
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
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


@pytest.mark.parametrize("prefix", ["", "textbooks, "])
def test_the_page_has_one_chain_of_qwen(prefix: str) -> None:
    """Also those of the run whose plain text had no code."""
    rows, found = page_rows("docs/models.md"), _qwen(prefix)
    points, names = _points(found), ["original", *RATIOS]
    solved_by = {task for task, *_ in points}
    for title, task in CHAIN_TASKS.items():
        if task in solved_by:
            row = [points.get((task, name, 16, 2)) for name in names]
            cells = [f"{100 * point['chain_accuracy']:.1f}" if point else "" for point in row]
            cells += [f"{point['tokens']:.0f}" if point else "" for point in row]
            assert rows[f"{prefix or 'one chain, '}{title}"] == cells
    _check_margins(found, " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split()))


def test_the_page_states_what_chains_of_qwen_lose() -> None:
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
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


def test_the_page_has_the_margins_of_qwen_without_cr_2() -> None:
    """As the run with textbooks, which has none."""
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
    numbers = _qwen("")
    points = [point for point in numbers["chains"]["points"] if point["model"] != "cr2"]
    grouped = chain_tasks({"chains": {"points": points}})
    margins = [margin(*(line(grouped[t], m) for m in ("DMS", "Vanilla"))) for t in TWO]
    shown = " and ".join(f"{value:+.1f}" for value in margins if value is not None)
    assert f"without it they are {shown} now" in text


@pytest.mark.parametrize("prefix", ["", "window 16, "])
def test_the_page_has_the_scores_of_qwen(prefix: str) -> None:
    rows = page_rows("docs/models.md")
    for model in _qwen(prefix)["models"]:
        title = f"choices, {prefix}{QWEN[model['name']]}"
        finished = all(model.get("tasks", {"none": None}).values())
        if finished:
            _check_scores(rows[title], model)
        else:
            assert title not in rows
        if finished and not prefix:
            solved = [model["tasks"][key] for key in ("gsm8k@5", "gsm8k_cot")]
            cells = [f(task) for task in solved for f in (_score, _difference_of)]
            assert rows[f"greedy, {QWEN[model['name']]}"] == cells


def _qwen(prefix: str) -> dict[str, Any]:
    """Record of the recipe, or the one of the rows of the page that begin with a prefix."""
    name = {
        "": "",
        "textbooks, ": "_textbooks",
        "bare, ": "_questions",
        "window 16, ": "_window_16",
    }[prefix]
    return record(f"qwen25_coder_0_5b{name}.json")


def test_the_page_has_the_numbers_of_qwen_with_bare_questions() -> None:
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
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
    difference = _difference(found["cr2"]["choices"]["difference"])
    assert f"differed from the original's by {difference}" in text


def test_the_page_has_the_divergence_on_the_prompts_of_qwen() -> None:
    rows = page_rows("docs/models.md")
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
    text = " ".join((ROOT / "docs/models.md").read_text(encoding="utf-8").split())
    models = {model["name"]: model for model in _qwen("")["models"]}
    sizes = [
        f"{models[name]['needles']['16384']['peak_tokens'] * bytes_of_token / 1e6:.0f} MB"
        for name in ("original", "cr4", "cr8")
    ]
    assert f"takes {bytes_of_token:,} bytes in bf16" in text
    assert f"holds {sizes[0]}, CR 4 holds {sizes[1]} and CR 8 holds {sizes[2]}" in text


def test_the_readme_has_the_numbers_of_the_record() -> None:
    rows, known = page_rows("README.md"), models()
    shown = [known[n] for n in ("original", "cr4", "cr8", "streaming_llm_cr4", "snapkv_cr4")]
    by_title = {
        "perplexity of": lambda m: f"{m['perplexity']['continuation']['perplexity']:.2f}",
        "needles found in 2,048": lambda m: f"{m['needles']['2048']['value']:.2f}",
        "needles found in 4,096": lambda m: f"{m['needles']['4096']['value']:.2f}",
        "tokens that a": lambda m: f"{m['needles']['4096']['reads_per_token']:,.0f}",
    }
    for title, number in by_title.items():
        (cells,) = (row for name, row in rows.items() if name.startswith(title))
        assert cells == [number(model) for model in shown]
    (cells,) = (row for name, row in rows.items() if name.startswith("seven tasks"))
    assert cells == [
        *(f"{100 * model['choices']['score']:.1f}" for model in shown[:3]),
        *("not measured",) * 2,
    ]


def test_the_readme_has_the_numbers_of_qwen() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = _qwen("")
    needles = {model["name"]: model["needles"]["16384"] for model in found["models"]}
    reads = [f"{needles[name]['reads_per_token']:,.0f}" for name in ("cr8", "original")]
    assert f"finds {100 * needles['cr8']['value']:.0f} of 100 needles in 16,384 tokens" in text
    assert f"reads {reads[0]} tokens instead of {reads[1]}" in text
    points = _points(found)
    solved, reads = [], []
    for name in ("math500", "gsm8k"):
        own, original = (points[name, model, 16, 2] for model in ("cr4", "original"))
        solved.append([f"{100 * point['accuracy']['value']:.1f} %" for point in (own, original)])
        reads.append(f"{100 * own['kv_reads'] / original['kv_reads']:.0f} %")
    (math, first), (school, second) = solved
    assert f"CR 4 solve {math} of MATH-500 and {school} of GSM8K, with {reads[0]} and" in text
    assert f"{reads[1]} of the KV reads of the original, which solves {first} and {second}." in text
    for name, chains in (("cr8", 4), ("original", 1)):
        point = points["humaneval", name, chains, 2]
        assert f"{100 * point['accuracy']['value']:.0f} %" in text
        assert f"{point['kv_reads']:,.0f}" in text


def test_the_variants_have_the_numbers_of_the_sweep() -> None:
    rows = page_rows("docs/models.md")
    for title, (device, name) in VARIANTS.items():
        found = record("smollm2_sweep.json", device)["rows"]
        (row,) = (row for row in found if row["variant"] == name)
        kl, *cells = rows[title]
        if device == H200:
            assert cells.pop(0) == f"{row['window']['cr_factor']:.2f}"
        assert kl == f"{row['kl']:.4f}"
        assert cells[0] == f"{row['window']['perplexity']:.2f}"
        assert cells[1] == f"{row['continuation']['perplexity']:.2f}"
        for cell, key in zip(cells[2:], ("needles_2048", "needles_4096"), strict=True):
            assert cell == "{:.2f} [{:.2f}, {:.2f}]".format(*row[key])


def test_gates_and_windows_are_those_of_the_record() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_gates.json")["rows"]}
    rows = page_rows("docs/models.md")
    assert set(found) == set(GATES.values())
    for title, name in GATES.items():
        row, cells = found[name], rows[title]
        parts = (("continuation", "cr_factor"), ("window", "perplexity"))
        parts += (("continuation", "perplexity"),)
        for cell, (part, key) in zip(cells[:3], parts, strict=True):
            assert cell == (f"{row[part][key]:.2f}" if part in row else "")
        assert cells[3:] == _found(row)


def test_short_runs_with_window_64_are_those_of_the_record() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_window_64.json")["rows"]}
    rows = page_rows("docs/models.md")
    assert set(found) == set(WINDOW_64.values())
    for title, name in WINDOW_64.items():
        row = found[name]
        cells = [f"{row['tokens'] / 1e6:.1f}", f"{row['kl']:.4f}"]
        cells.append(_ratio(row))
        cells += [f"{row[part]['perplexity']:.2f}" for part in ("window", "continuation")]
        assert rows[title] == [*cells, *_found(row)]


@pytest.mark.parametrize(
    ("name", "titles"), [("texts", TEXTS), ("fp8", FP8), ("stored_teacher", STORED)]
)
def test_other_short_runs_are_those_of_the_record(name: str, titles: dict[str, str]) -> None:
    found = {row["variant"]: row for row in record(f"smollm2_sweep_{name}.json")["rows"]}
    rows = page_rows("docs/models.md")
    assert set(found) - {"original"} == set(titles.values())
    for title, name in titles.items():
        row = found[name]
        cells = [f"{row['kl']:.4f}" if "kl" in row else "", _ratio(row)]
        cells += [f"{row[part]['perplexity']:.2f}" for part in ("window", "continuation")]
        assert rows[title] == [*cells, *_found(row)]


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['continuation']['cr_factor']:.2f}"


def _found(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of the needles in 2,048 and 4,096 tokens."""
    keys = ("needles_2048", "needles_4096")
    return ["{:.2f} [{:.2f}, {:.2f}]".format(*row[key]) if key in row else "" for key in keys]


def test_the_records_print() -> None:
    for device in (H100, H200):
        assert "| cr8 |" in report_text(record("smollm2_135m.json", device))
        assert "| base |" in table(record("smollm2_sweep.json", device))
    for name in ("second", "first"):
        assert "| cr8 |" in report_text(record(f"smollm2_135m_{name}.json"))
    assert "| quest_cr8 |" in report_text(record("qwen25_coder_0_5b_policies_16k.json"))
    for prefix in CHAINS:
        assert "| DMS minus Vanilla | GSM8K |" in report_text(_qwen(prefix))
