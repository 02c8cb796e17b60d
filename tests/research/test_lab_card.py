"""The model card of a teacher, from stored chains that are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from research.lab import card
from tests.research.lab_model import write_lab_model
from tests.research.stored_runs import stored

RIGHT, WRONG, LATE = (100, True), (100, False), (600, True)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A teacher with four chains of each problem at temperature 0.6 and one at 0."""
    write_lab_model(tmp_path / "teacher" / "exports" / "final" / "hf", None)
    config = {
        "data": {"global_batch_size": 8, "seq_length": 500, "paths": ["lab/data_x/train"]},
        "stage": {"pretrain": {"steps": 1000, "lr": 0.0015}},
        "optim": {"weight_decay": 0.05},
        "parallel": {"params_dtype": "bf16"},
        "run": {"seed": 7},
    }
    (tmp_path / "teacher" / "config.yaml").write_text(yaml.safe_dump(config))
    sampled = {0: [RIGHT, RIGHT, WRONG, LATE], 1: [RIGHT, LATE, LATE, LATE]}
    run(tmp_path, "teacher", sampled, temperature=0.6)
    run(tmp_path, "teacher_greedy", {0: [RIGHT], 1: [WRONG], 2: [WRONG], 3: [WRONG]}, 0.0)
    return tmp_path


def run(root: Path, name: str, chains: dict, temperature: float) -> None:
    folder = root / "eval" / name
    stored(folder, chains, "countdown", 1000.0)
    header = json.loads((folder / "run.json").read_text())
    header["config"]["sampling"] = {"temperature": temperature}
    (folder / "run.json").write_text(json.dumps(header))
    (folder / "summary.json").write_text("{}")


def test_the_card_has_the_accuracies_counted_by_hand(lab: Path, capsys) -> None:
    assert card.main([str(lab), "--experiment", "lab_teacher_x"]) == 0
    path = lab / "teacher" / "README.md"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| Countdown")]
    cells = [[cell.strip().partition(" [")[0] for cell in row] for row in rows]
    assert cells == [
        ["Countdown", "512", "0.250", "0.375"],
        ["Countdown", "1,024", "0.250", "0.875"],
    ]
    with safe_open(next(lab.rglob("model.safetensors")), "np") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert f"| weights | {count:,}, bf16 in training |" in text
    assert "1,000 steps of 8 x 500 tokens (4 M)" in text
    assert "dms-train experiment=lab_teacher_x" in text


def test_a_teacher_that_was_not_trained_or_evaluated_has_no_card(lab: Path, capsys) -> None:
    for name in ("teacher", "teacher_greedy"):
        (lab / "eval" / name / "summary.json").unlink()
    assert card.main([str(lab), "--experiment", "x"]) == 2
    assert "has not been evaluated" in capsys.readouterr().err
    assert card.main([str(lab / "absent"), "--experiment", "x"]) == 2
    assert str(lab / "absent") in capsys.readouterr().err
    assert not (lab / "teacher" / "README.md").exists()


@pytest.mark.parametrize("text", ["", "data: {}", "a: [", "7"])
def test_another_configuration_is_named(lab: Path, text: str, capsys) -> None:
    (lab / "teacher" / "config.yaml").write_text(text)
    assert card.main([str(lab), "--experiment", "x"]) == 2
    refusal = capsys.readouterr().err
    assert "config.yaml" in refusal
    assert refusal.count("\n") == 1
