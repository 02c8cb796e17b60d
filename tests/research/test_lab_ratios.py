"""The table of methods, counted by hand from stored chains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from research.lab import ratios
from tests.research.stored_runs import stored

RIGHT, WRONG = (100, True), (100, False)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """One task, two seeds of DMS at two ratios, one of DMC, and a policy."""

    def run(name: str, words: str, peak: float) -> None:
        chains = {n: [RIGHT if word == "y" else WRONG] for n, word in enumerate(words)}
        folder = tmp_path / "eval" / name
        stored(folder, chains, name.partition("lab_")[1] + name.partition("lab_")[2], peak)
        (folder / "summary.json").write_text("{}")

    run("teacher_lab_niah", "yyyy", 2000)
    run("seed1_cr2_lab_niah", "yyyn", 1000)
    run("seed2_cr2_lab_niah", "yyyy", 1100)
    run("seed1_cr4_lab_niah", "yynn", 500)
    run("seed1_dmc_cr2_lab_niah", "ynnny", 900)  # the teacher lacks the last one
    run("seed1_cr2_lab_countdown", "nnnn", 1)
    run("h2o_as_cr2_lab_niah", "nnnn", 1000)
    run("seed1_window_4_cr2_lab_niah", "nnnn", 1)
    run("teacher_lab_variable_tracking", "yyyy", 2000)  # without retrofits: no table
    return tmp_path


def test_the_table_is_the_one_counted_by_hand(lab: Path, capsys) -> None:
    assert ratios.main([str(lab)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert [row[0] for row in rows] == ["", "---", "original", "DMS", "DMC", "h2o"]
    assert rows[0][1:] == ["CR 2", "CR 4"]
    cells = {(row[0], cr): row[place] for row in rows[2:] for place, cr in ((1, 2), (2, 4))}
    assert cells["original", 2] == "1.000 [1.000, 1.000]; 2,000"
    assert re.fullmatch(r"0\.875 \[.*\], 0\.750 to 1\.000; 1,050", cells["DMS", 2])
    assert re.fullmatch(r"0\.500 \[.*\]; 500", cells["DMS", 4])
    assert re.fullmatch(r"0\.250 \[.*\]; 900", cells["DMC", 2])
    assert cells["h2o", 2] == "0.000 [0.000, 0.000]; 1,000"
    assert cells["DMC", 4] == cells["h2o", 4] == ""
    assert [line for line in lines if "problems" in line] == ["Countdown, 4 problems"]


def test_the_figure_has_the_numbers_of_the_table(lab: Path, tmp_path: Path, capsys) -> None:
    table = ratios.table(*ratios.runs_of(lab, "lab_niah"))
    (panel,) = ratios.drawn([table]).axes
    lines = {each.get_label(): each.lines[0].get_xydata().tolist() for each in panel.containers}
    assert lines == {"DMS": [[2, 0.875], [4, 0.5]], "DMC": [[2, 0.25]], "h2o": [[2, 0]]}
    assert panel.lines[0].get_label() == "original"
    assert set(panel.lines[0].get_ydata()) == {1.0}
    right = table.rows["DMS"][2].right
    (ends,) = panel.containers[0].lines[2][0].get_segments()[:1]
    assert ends[:, 1].tolist() == pytest.approx([right.low, right.high])
    assert ratios.main([str(lab), "--figure", str(tmp_path / "ratios.svg")]) == 0
    assert (tmp_path / "ratios.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name", ["ratios.xyz", "ratios"])
def test_a_figure_of_another_format_is_refused(name: str, lab: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        ratios.main([str(lab), "--figure", str(lab / name)])
    assert ended.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]
    assert not (lab / name).exists()


def test_a_folder_without_a_table_is_refused(tmp_path: Path, capsys) -> None:
    assert ratios.main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no folder of a lab" in capsys.readouterr().err
