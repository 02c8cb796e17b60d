"""Rows of the pages of models, stored records, and numbers in the form of the page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results"
H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
PAGE = "docs/models.md"
SMOLLM2_PAGE, QWEN_PAGE = "docs/models/smollm2.md", "docs/models/qwen25_coder.md"
SETTINGS, EARLIER = "docs/models/settings.md", "docs/models/earlier_runs.md"
METHODS = "docs/models/policies.md"
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
TRIATTENTION = "triattention_statistics_queries_safetensors"
CHOICES = ("hellaswag@10", "arc_easy@25", "arc_challenge@25", "piqa@20", "winogrande@5")
CHOICES += ("openbookqa@5",)
LAMBADA = ("lambada_openai@0", "lambada_openai@10")


def record(name: str, device: str = H200) -> dict[str, Any]:
    return json.loads((RESULTS / device / name).read_text(encoding="utf-8"))


def named(name: str) -> dict[str, dict[str, Any]]:
    """Return the models of a record by their names."""
    return {model["name"]: model for model in record(name)["models"]}


def needles_of_policies() -> dict[str, dict[str, Any]]:
    """Return the needles of SmolLM2's original with each policy; a later run has some in 8,192."""
    first, later = (
        {model["name"]: model["needles"] for model in record(f"smollm2_135m_{name}.json")["models"]}
        for name in ("policies", "policies_8k")
    )
    return first | {name: later[name] | first[name] for name in later}


def page_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of every table row by the first cell up to a colon."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return {row[0].partition(":")[0]: row[1:] for row in cells}


def page_text(page: str) -> str:
    """Return the words of a page, with one space between two."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def check_scores(cells: list[str], model: Mapping[str, Any]) -> None:
    """Check the cells of multiple choice, their mean, LAMBADA and the paired difference."""
    choices, tasks = (*CHOICES, "mmlu@5"), model["tasks"]
    assert cells[:7] == [score(tasks[key]) for key in choices]
    assert cells[7] == f"{100 * statistics.fmean(tasks[key]['score'] for key in choices):.2f}"
    assert cells[8:10] == [score(tasks[key]) for key in LAMBADA]
    of_original = model["name"] == "original"
    assert cells[10] == ("" if of_original else difference(model["choices"]["difference"]))


def score(task: Mapping[str, Any] | None) -> str:
    return "" if task is None else f"{100 * task['score']:.1f} ± {100 * task['half_width']:.1f}"


def difference(found: Mapping[str, float]) -> str:
    ends = (100 * found[key] for key in ("value", "low", "high"))
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*ends)


def loss(found: Mapping[str, float]) -> str:
    """Return a loss in points; its lower end is the higher end of the difference."""
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(-100 * found[k] for k in ("value", "high", "low")))


def needles_with_textbooks() -> list[float]:
    """Return the share of needles in 4,096 tokens that CR 8 of SmolLM2 finds, of three runs."""
    runs = [named(f"smollm2_135m{run}.json") for run in ("", "_first", "_needles")]
    return [models["cr8"]["needles"]["4096"]["value"] for models in runs]


def percent(found: Mapping[str, float]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * found[key] for key in ("value", "low", "high")))
