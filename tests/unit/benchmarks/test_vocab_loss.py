"""The loss benchmark on a CPU: every way that it times gives the same loss and gradients."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import vocab_loss
from benchmarks.__main__ import main


def test_every_way_gives_what_the_plain_one_gives(tmp_path: Path) -> None:
    assert main(["vocab_loss", "--device", "cpu", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/vocab_loss.json")
    cases = json.loads(file.read_text())["cases"]
    assert [case["loss"] for case in cases] == list(vocab_loss.WAYS)
    for case in cases:
        assert case["rows"][0]["name"] == vocab_loss.PRODUCTS
        assert [row["name"] for row in case["rows"]] == list(vocab_loss.WAYS[case["loss"]])
        for row in case["rows"][1:]:
            loss, d_hidden, d_weight = row["errors"]
            assert loss < 1e-4
            assert max(d_hidden, d_weight) < 1e-2, row["name"]  # rounded to bf16
