"""The benchmark of decode steps under policies, in Triton's interpreter: what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import policies_decode
from benchmarks.__main__ import main
from dms_train.kernels import dispatch

pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(torch.device("cpu")), reason="needs triton's interpreter"
)
CONTEXT, BUDGET, STEPS = 64, 16, 5


def test_policies_hold_their_budget_and_dms_grows(tmp_path: Path) -> None:
    words = [
        "policies_decode",
        "dms",
        "snapkv",
        "tova",
        "quest",
        "--device",
        "cpu",
        "--sequences",
        "1",
        "--context",
        "64",
    ]
    words += ["--cr", "4", "--steps", str(STEPS), "--output", str(tmp_path)]
    assert main(words) == 0
    (file,) = tmp_path.glob("*/policies_decode.json")
    record = json.loads(file.read_text())
    found = {case["policy"]: case for case in record["cases"]}
    assert record["budget"] == BUDGET
    assert found["tova"]["live"] == BUDGET
    assert found["tova"]["read"] == BUDGET + 1
    for grows in ("dms", "snapkv"):  # the tokens filled in stay, and all of the steps
        assert found[grows]["live"] == found[grows]["read"] == BUDGET + STEPS
    assert found["quest"]["live"] == CONTEXT + STEPS
    assert found["quest"]["read"] == STEPS  # one page for each query head: that of the newest token
    assert found["quest"]["bytes"] == 2 * 2 * (STEPS + (CONTEXT + STEPS) / 16) * 2 * 32 * 4
    lines = policies_decode.tables(record).splitlines()
    assert len(lines) == 4 + 4
    assert "| 1.000 |" in lines[4]


@pytest.mark.parametrize("words", [["lru"], ["dms", "--steps", "2"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["policies_decode", *words])
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err
