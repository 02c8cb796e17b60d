"""Differences over seeds, counted by hand from stored chains."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.lab import differences
from tests.research.stored_runs import stored


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """The teacher and two seeds, of which the second was stopped before its document 1."""
    chain = {"fast": (100, True), "slow": (900, True), "wrong": (100, False)}

    def run(name: str, *documents: str, left_out: tuple[int, ...] = ()) -> None:
        chains = {n: [chain[w] for w in words.split()] for n, words in enumerate(documents)}
        kept = {n: found for n, found in chains.items() if n not in left_out}
        stored(tmp_path / "eval" / name, kept)

    run("teacher", "fast wrong", "slow slow", "fast fast")
    run("seed1_cr8", "fast fast", "slow wrong", "wrong fast")
    run("seed2_cr8", "wrong wrong", "fast fast", "fast fast", left_out=(1,))
    run("seed1_window_4_cr8", "wrong", "wrong", "wrong")
    return tmp_path


def test_differences_are_those_counted_by_hand(lab: Path, capsys) -> None:
    assert differences.main([str(lab)]) == 0
    _, _, short, long, counts = capsys.readouterr().out.splitlines()
    # 512 tokens: seed 1 gains 50, 0, -50 on documents 0, 1, 2; seed 2 loses 50 on document 0
    mean = (0 + 0 - 50) / 3  # document 0 has the mean of +50 and -50
    assert short.split("|")[2].strip().startswith(f"{mean:+.1f} [")
    assert short.rstrip(" |").endswith("-50.0 to +0.0")
    # 1,024 tokens: document 1 is solved by every chain of the teacher and by half of seed 1's
    mean = (0 - 50 - 50) / 3
    assert long.split("|")[2].strip().startswith(f"{mean:+.1f} [")
    assert long.rstrip(" |").endswith(f"-50.0 to {-50 / 3:+.1f}")
    assert counts == "CR 8: problems of each seed: 3, 1"


def test_problems_that_the_teacher_lacks_do_not_count(lab: Path, capsys) -> None:
    stored(lab / "eval" / "seed3_cr8", {n: [(100, True)] for n in range(4)})
    assert differences.main([str(lab)]) == 0
    # documents 0, 1, 2 of the teacher have 1/2, 0 and 1 within 512 tokens; it has no document 3
    assert capsys.readouterr().out.splitlines()[2].rstrip(" |").endswith(f"-50.0 to {150 / 3:+.1f}")


def test_an_evaluation_without_its_first_problem_is_refused(lab: Path, capsys) -> None:
    stored(lab / "eval" / "seed3_cr8", {2: [(100, True)]})
    assert differences.main([str(lab)]) == 2
    assert "seed3_cr8" in capsys.readouterr().err


def test_folders_without_evaluations_are_refused(tmp_path: Path, lab: Path, capsys) -> None:
    assert differences.main([str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    for path in (lab / "eval").glob("seed*"):
        path.rename(lab / path.name)
    assert differences.main([str(lab)]) == 2
    assert "no retrofitted model" in capsys.readouterr().err
