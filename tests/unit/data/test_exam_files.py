"""Documents of one length, and problems with answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dms_train.data.manifest import read_manifest
from dms_train.data_prep.exam_sheets import document
from dms_train.data_prep.prepare import main
from dms_train.evaluation.problems import read_problems


@pytest.mark.parametrize("length", [1, 100, 320, 1000])
def test_documents_start_with_a_sheet_and_have_one_length(length: int) -> None:
    text = document(random.Random(0), length, (1, 2), "<eod>")
    assert len(text.replace("<eod>", "E")) == length
    assert text.startswith("1: Solve"[:length])
    for following in text.split("<eod>")[1:]:
        assert following.startswith("1: Solve"[: len(following)])


def test_documents_become_samples_that_start_with_a_sheet(tmp_path: Path) -> None:
    command = ["exam-sheets", "--out", str(tmp_path), "--sheets", "12", "--document-tokens", "320"]
    assert main(command) == 0
    manifest = read_manifest(str(tmp_path / "train"))
    assert (manifest.documents, manifest.tokens) == (12, 12 * 320)


def test_problems_are_what_validation_reads(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    command = ["exam-problems", "--out", str(path), "--sheets", "7", "--n", "3"]
    assert main(command) == 0
    sheets = read_problems(path, 100)
    assert len(sheets) == 7
    assert all(len(sheet.gold) == 3 for sheet in sheets)
    assert all(sheet.details == {"stop": "\n\n"} for sheet in sheets)
    assert json.loads(path.read_text().splitlines()[0])["prompt"].endswith("Solution 1.")
    assert main(command) == 2  # exists already
    assert main([*command, "--overwrite"]) == 0
