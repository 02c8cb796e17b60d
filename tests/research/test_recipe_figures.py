"""Figures of a recipe's report are drawn from its numbers."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from research.recipe import run as recipe
from research.recipe.figures import figures
from research.recipe.report import report_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results" / "nvidia_h200"
QWEN = RESULTS / "qwen25_coder_0_5b.json"


def point(model: str, accuracy: float, kv_reads: float, task: str = "math500") -> dict[str, Any]:
    interval = {"value": accuracy, "low": 0.0, "high": 1.0}
    costs = {"kv_reads": kv_reads, "peak_tokens": kv_reads / 16}
    return {"task": task, "model": model, "length": 0.5, "chains": 8, "accuracy": interval, **costs}


CELLS = [
    {"label": "cr4", "length": 2048, "depth": 41, "accuracy": 0.625, "documents": 8},
]
NUMBERS = {
    "needles": CELLS,
    "chains": {
        "points": [
            point("original", 0.5, 4000.0),
            point("cr4", 0.25, 1000.0),
            point("control", 0.75, 4000.0),
            point("dmc_cr4", 0.125, 1500.0),
            point("control", 0.75, 4000.0, "humaneval"),
            point("cr6", 1.0, 500.0, "gsm8k"),
        ]
    },
}


def shown(figure: str) -> list[str]:
    """Return what the points of a figure show on hover."""
    return re.findall("<title>(.*?)</title>", figure)


def test_points_of_the_original_and_of_dms_are_drawn() -> None:
    drawn = figures(NUMBERS)
    files = {f"{cost}_{name}.svg" for cost in ("chains", "peak") for name in ("math500", "gsm8k")}
    assert set(drawn) == {"needles.svg", *files}
    assert shown(drawn["chains_math500.svg"]) == [
        "Vanilla 0.5-8-1: 50.0 %, 4,000.0 KV reads",
        "DMS 0.5-8-4: 25.0 %, 1,000.0 KV reads",
    ]
    assert shown(drawn["chains_gsm8k.svg"]) == ["DMS 0.5-8-6: 100.0 %, 500.0 KV reads"]
    assert "MATH 500: accuracy against KV reads" in drawn["chains_math500.svg"]
    assert shown(drawn["peak_math500.svg"]) == [
        "Vanilla 0.5-8-1: 50.0 %, 250.0 peak tokens",
        "DMS 0.5-8-4: 25.0 %, 62.5 peak tokens",
    ]
    assert "MATH 500: accuracy against peak tokens" in drawn["peak_math500.svg"]
    assert {"62", "41%", "2k", "cr4"} <= set(re.findall(">([^<>]+)</text>", drawn["needles.svg"]))


SECONDS = {
    "gsm8k": {
        "settings": {"task": "gsm8k", "problems": 4, "cache_bytes": 256_000_000, "repeats": 3},
        "models": {
            name: {"budgets": [budget | {"width": 8, "seconds_least": 1, "seconds_most": 3}]}
            for name, budget in {
                "original": {"length": 1, "seconds": 2.5, "accuracy": 0.5, "tokens_s": 1234},
                "cr8": {"length": 0.5, "seconds": 1.5, "accuracy": 0.25, "tokens_s": 5678},
                "dmc_cr8": {"length": 0.5, "seconds": 1.25, "accuracy": 0.1, "tokens_s": 91011},
            }.items()
        },
    }
}


def test_accuracy_against_seconds_is_drawn_and_printed() -> None:
    numbers = {"needles": [], "seconds": SECONDS}
    (drawn,) = figures(numbers).items()
    assert drawn[0] == "seconds_gsm8k.svg"
    assert shown(drawn[1]) == [
        "Vanilla 1-8-1: 50.0 %, 625.0 milliseconds",
        "DMS 0.5-8-8: 25.0 %, 375.0 milliseconds",
    ]
    assert "GSM8K: accuracy against seconds" in drawn[1]
    printed = report_text(json.loads(QWEN.read_text("utf-8")) | numbers)
    assert "gsm8k: 4 problems submitted together;" in printed
    assert "into a cache of 256 MB." in printed
    assert "seconds are the median of 3 repetitions" in printed
    assert "| dmc_cr8 | 0.5-8 | 0.100 | 1.25 (1.00 to 3.00) | 91,011 |" in printed
    assert "](seconds_gsm8k.svg)" in printed


def test_a_record_without_chains_has_no_figure_of_them() -> None:
    assert set(figures({"needles": CELLS})) == {"needles.svg"}
    assert figures({"needles": [], "chains": {"points": []}}) == {}


@pytest.mark.parametrize(
    ("record", "name", "page"),
    [
        ("qwen25_coder_0_5b", "qwen25_coder", "models/qwen25_coder.md"),
        ("qwen25_coder_0_5b_defaults_seconds", "qwen25_coder_seconds", "models/seconds.md"),
        ("smollm2_135m_needles", "smollm2", "models/smollm2.md"),
    ],
)
def test_a_page_shows_its_record(record: str, name: str, page: str) -> None:
    drawn = figures(json.loads((RESULTS / f"{record}.json").read_text("utf-8")))
    folder = ROOT / "docs" / "figures" / name
    assert {path.name for path in folder.iterdir()} == set(drawn)
    text = (ROOT / "docs" / page).read_text("utf-8")
    for file, figure in drawn.items():
        stored = (folder / file).read_text("utf-8")
        assert shown(stored) == shown(figure)
        assert re.findall(">([^<>]+)</text>", stored) == re.findall(">([^<>]+)</text>", figure)
        assert f"figures/{name}/{file})" in text


def test_the_figures_of_a_stored_report_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "figures"
    assert recipe.main(["--table", str(QWEN), "--figures", str(folder)]) == 0
    printed = capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    charts = product(("chains", "peak"), ("gsm8k", "math500", "humaneval"))
    assert names == {f"{cost}_{name}.svg" for cost, name in charts} | {"needles.svg"}
    assert all(f"]({name})" in printed for name in names)


def test_a_report_links_to_the_figures_that_are_drawn() -> None:
    """No export of a task has finished, only its control."""
    numbers = json.loads(QWEN.read_text("utf-8"))
    numbers["chains"]["points"].append(point("control", 0.75, 4000.0, "countdown"))
    links = re.findall(r"\]\((.*?\.svg)\)", report_text(numbers))
    assert sorted(links) == sorted(figures(numbers))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"needles": [], "chains": {}},
            "no needles, chains or seconds to draw; leave out --figures",
        ),
        ({"needles": [{"label": "cr4"}]}, "not a record of this command"),
        ({"needles": 5}, "not a record of this command"),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused(
    changes: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "report.json"
    record.write_text(json.dumps(json.loads(QWEN.read_text("utf-8")) | changes))
    assert recipe.main(["--table", str(record), "--figures", str(tmp_path / "figures")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error
    assert not (tmp_path / "figures").exists()


def test_figures_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    assert recipe.main(["--table", str(QWEN), "--figures", str(tmp_path / "file")]) == 2
    assert "file: a file; name a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_figures_need_a_stored_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(["toy", "--figures", str(tmp_path / "figures")]) == 2
    assert "--figures: give --table too" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()
