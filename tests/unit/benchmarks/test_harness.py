"""The benchmark of lm-evaluation-harness: both models answer alike."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")

from benchmarks.__main__ import main
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from tests.unit.evaluation.conftest import SPEC, write_model


@pytest.mark.parametrize("spec", [SPEC, None], ids=["dms", "dense"])
def test_both_models_answer_alike(tmp_path, spec, capsys):
    write_exam_tokenizer(tmp_path / "tokenizer")
    write_model(tmp_path / "model", spec, 0, tmp_path / "tokenizer")
    words = [
        *("harness", str(tmp_path / "model"), "--device", "cpu", "--output", str(tmp_path / "out")),
        *("--documents", "4", "--prompt-tokens", "60", "--new-tokens", "12", "--choices", "3"),
        *("--repeats", "1", "--batch-size", "4", "--dtype", "float32"),
    ]
    assert main(words) == 0
    (file,) = tmp_path.glob("out/*/harness.json")
    record = json.loads(file.read_text())
    cases = record["cases"]
    assert [cases[name]["requests"] for name in ("generate", "choices", "rolling")] == [4, 12, 4]
    assert cases["generate"]["equal_texts"] == 1
    assert cases["choices"]["largest_difference"] < 1e-4
    assert cases["rolling"]["largest_difference"] < 1e-3
    for case in cases.values():
        (ours,), (theirs,) = case["seconds"]["ours"], case["seconds"]["transformers"]
        assert case["ratio"] == pytest.approx(theirs / ours)
    assert record["cr_factor"] > 1.2 if spec else record["cr_factor"] == pytest.approx(1)
    assert "choices" in capsys.readouterr().out


def test_a_shape_is_exported_with_random_weights(tmp_path):
    words = [
        *("harness", "small", "--device", "cpu", "--output", str(tmp_path)),
        *("--documents", "2", "--prompt-tokens", "40"),
        *("--new-tokens", "6", "--choices", "2", "--repeats", "1", "--batch-size", "2"),
    ]
    assert main([*words, "--dtype", "float32"]) == 0
    (file,) = tmp_path.glob("*/harness.json")
    cases = json.loads(file.read_text())["cases"]
    assert cases["generate"]["equal_texts"] == 1
    assert cases["choices"]["largest_difference"] < 1e-4
