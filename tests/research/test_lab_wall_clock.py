"""Time and accuracy of a lab's models: what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.data import command as data
from research.folders import RESULTS
from research.lab import wall_clock
from tests.research.lab_model import write_lab_model
from tests.unit.inference import conftest as inference

PROBLEMS = 3
BUDGETS = [[1 / 64, 1], [1 / 32, 2]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random models as the teacher and as a retrofit: neither solves anything."""
    root = tmp_path_factory.mktemp("lab")
    for name, spec in (("teacher", None), ("cr4", inference.small_spec("dms"))):
        write_lab_model(wall_clock.model_path(root, name, seed=1234), spec, target_cr=4.0)
    made = ["countdown-problems", "--out", str(root / "problems.jsonl"), "--problems"]
    assert data.main([*made, str(PROBLEMS)]) == 0
    return root


def arguments(lab: Path, *more: str) -> list[str]:
    budgets = ",".join(f"{length}-{width}" for length, width in BUDGETS)
    small = ["--budgets", budgets, "--repeats", "2", "--cache-mb", "8", "--rows", "2"]
    return [str(lab), "--device", "cpu", "--problems", str(PROBLEMS), *small, *more]


def test_every_model_is_measured_at_every_budget(lab: Path, tmp_path: Path, capsys) -> None:
    output = ["--models", "teacher,cr4", "--output", str(tmp_path)]
    assert wall_clock.main(arguments(lab, *output)) == 0
    (file,) = tmp_path.glob("cpu*/wall_clock.json")
    record = json.loads(file.read_text())
    assert record["settings"]["cache_mb"] == 8
    for model in record["models"].values():
        assert [[b["length"], b["width"]] for b in model["budgets"]] == BUDGETS
        for found in model["budgets"]:
            assert 0 < found["seconds_least"] <= found["seconds"] <= found["seconds_most"]
            most = PROBLEMS * found["width"] * 1024 * found["length"]
            assert found["tokens_s"] * found["seconds_least"] <= most * 1.01
    printed = capsys.readouterr().out
    assert printed.count("| cr4 |") == len(BUDGETS)
    figure = tmp_path / "wall_clock.svg"
    assert wall_clock.main(["--table", str(file), "--figure", str(figure)]) == 0
    again, _, measured = capsys.readouterr().out.partition("\n\nMeasured at: ")
    assert set(again.splitlines()) < set(printed.splitlines())
    assert record["date"] in measured
    assert "<svg" in figure.read_text()


def test_points_are_drawn_where_they_were_measured() -> None:
    budgets = [(1.0, 1, 2.0, 0.7), (0.5, 1, 1.0, 0.4), (0.5, 4, 8.0, 0.9)]
    names = ("length", "width", "seconds", "accuracy")
    rows = [dict(zip(names, budget, strict=True)) for budget in budgets]
    (axes,) = wall_clock.drawn({"models": {"teacher": {"budgets": rows}}}).axes
    found = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert found == [[(1.0, 0.4), (2.0, 0.7)], [(8.0, 0.9)]]


def test_a_folder_or_a_record_is_needed(lab: Path, capsys) -> None:
    for words in ([], [str(lab), "--table", "wall_clock.json"]):
        with pytest.raises(SystemExit) as ended:
            wall_clock.main(words)
        assert ended.value.code == 2
        assert "--table" in capsys.readouterr().err


def test_a_problem_counts_when_one_of_its_chains_is_right(lab: Path) -> None:
    model = wall_clock.model_path(lab, "teacher", seed=1234)
    checked = wall_clock.checked_problems(model, lab, PROBLEMS, [1.0])
    right = [f"R x ANS {document.gold[0]}" for document in checked.documents]
    texts = [["ANS 1 + 1", right[0]], [right[1], right[1]], ["", right[0]]]
    assert wall_clock.solved(checked, texts) == pytest.approx(2 / 3)


def test_nothing_is_measured_where_a_model_is_not_there(lab: Path, tmp_path: Path, capsys) -> None:
    more = ["--output", str(tmp_path / "results"), "--models", "teacher,cr9"]
    assert wall_clock.main(arguments(lab, *more)) == 2
    assert "cr9" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_chain_that_does_not_fit_is_refused(lab: Path, tmp_path: Path, capsys) -> None:
    """It would count as wrong, and as fast."""
    small = ["--models", "teacher", "--budgets", "4-1", "--output", str(tmp_path)]
    assert wall_clock.main(arguments(lab, *small)) == 2
    assert "4096 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--budgets", "2x4"),
        ("--budgets", "0-1"),
        ("--budgets", "1-1,1-1"),
        ("--models", "teacher,teacher"),
        ("--models", ""),
        ("--repeats", "0"),
        ("--seed", "-1"),
    ],
)
def test_values_are_checked(lab: Path, capsys, option: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        wall_clock.main([str(lab), f"{option}={value}"])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_the_stored_record_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert wall_clock.main(["--table", str(RESULTS / "nvidia_h200" / "wall_clock.json")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": {"teacher": {}}}', "\x80"])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    assert wall_clock.main(["--table", str(file)]) == 2
    refusal = capsys.readouterr().err
    assert str(file) in refusal
    assert refusal.count("\n") == 1
