"""Needles by length and depth: accuracies are those of a count by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dms_train.evaluation.analysis import charts
from dms_train.evaluation.analysis.needles import NeedleCell, grid, needle_cells
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult
from dms_train.evaluation.tasks.niah import needles

COUNT, SEED, BANDS = 60, 5, 4


def run(label: str, length: int, right: set[int], model: str = "m", **task) -> RunResult:
    drawn = list(needles(COUNT, SEED))
    config = {
        "task": {
            **{"name": "niah", "seed": SEED, "context_length": length, "fixture": False},
            **task,
        },
        "model": {"sha256": model},
        "policy": {"name": "auto"},
    }
    documents = {
        str(n): [{"correct": [n in right], "answers": [drawn[n].value if n in right else None]}]
        for n in range(COUNT)
    }
    header = {"config": config, "label": label}
    return RunResult(folders=(Path("folder"),), header=header, documents=documents)


def test_cells_count_the_prompts_of_their_band():
    draw = random.Random(0)
    right = {
        (label, length): {n for n in range(COUNT) if draw.random() < share}
        for label, length, share in (("A", 1024, 0.9), ("A", 4096, 0.4), ("B", 1024, 0.7))
    }
    runs = [run(label, length, found) for (label, length), found in right.items()]
    cells = needle_cells([*runs, run("C", 1024, set(), name="gsm8k")], BANDS)
    assert [(c.label, c.length) for c in cells[::BANDS]] == [("A", 1024), ("A", 4096), ("B", 1024)]
    depths = [needle.depth for needle in needles(COUNT, SEED)]
    edges = [0, 26, 51, 76, 101]  # 101 depths in four bands
    for cell in cells:
        at = edges.index(cell.depth)
        inside = [n for n, depth in enumerate(depths) if edges[at] <= depth < edges[at + 1]]
        assert cell.documents == len(inside)
        hits = len(right[cell.label, cell.length] & set(inside))
        assert cell.accuracy == pytest.approx(hits / len(inside))


def test_runs_without_known_depths_are_refused():
    with pytest.raises(EvaluationError, match="no run of the task niah"):
        needle_cells([run("A", 1024, set(), name="gsm8k")], BANDS)
    with pytest.raises(EvaluationError, match="its prompts came from a file"):
        needle_cells([run("A", 1024, set(range(COUNT)), seed=SEED + 1)], BANDS)


def test_different_models_of_one_name_are_refused():
    with pytest.raises(EvaluationError, match="A: runs of different models or policies"):
        needle_cells([run("A", 1024, set()), run("A", 2048, set(), model="n")], BANDS)


def test_the_figure_has_a_panel_for_each_label_and_a_number_for_each_cell(monkeypatch):
    cells = [
        NeedleCell(label="A", length=n, depth=d, accuracy=(d + n) / 5000, documents=3)
        for n in (1024, 2048)
        for d in (0, 50)
    ]
    cells.append(NeedleCell(label="B", length=1024, depth=0, accuracy=1.0, documents=3))
    lengths, depths, accuracies = grid(cells[:4])
    assert (lengths, depths) == ([1024, 2048], [0, 50])
    assert accuracies == [[1024 / 5000, 2048 / 5000], [1074 / 5000, 2098 / 5000]]
    figures = []
    write = charts._svg

    def kept(figure, title, texts):
        figures.append(figure)
        return write(figure, title, texts)

    monkeypatch.setattr(charts, "_svg", kept)
    assert charts.needle_chart("Needles", cells).startswith("<svg")
    (figure,) = figures
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["A", "B"]
    assert [text.get_text() for text in panels[0].texts] == ["20", "41", "21", "42"]
    assert panels[0].images[0].get_array().tolist() == accuracies
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["1k", "2k"]


def test_the_command_draws_runs_of_the_engine(tmp_path, monkeypatch, capsys):
    from dms_train.cli.evaluate import main
    from dms_train.evaluation.scaling import results

    monkeypatch.setattr(results, "load_all", lambda paths: [run("A", 1024, {0, 1, 2})])
    words = ["needles", str(tmp_path), "--bands", "2", "--output", str(tmp_path / "map.svg")]
    assert main(words) == 0
    rows = json.loads((tmp_path / "map.json").read_text())
    assert [row["depth"] for row in rows] == [0, 51]
    assert (tmp_path / "map.svg").read_text().startswith("<svg")
    assert capsys.readouterr().out.split() == [str(tmp_path / f"map.{x}") for x in ("json", "svg")]
