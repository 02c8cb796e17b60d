"""`dms-generate` prints text, a table and a picture."""

from __future__ import annotations

import json

import pytest

from dms_train.cli.generate import main
from tests.unit.inference.conftest import small_spec


def test_table_json_and_picture(folder, tmp_path, capsys):
    directory = folder("qwen3", small_spec("dms"))
    files = [tmp_path / "out.json", tmp_path / "heat.png"]
    command = [str(directory), "--token-ids", "1,2,3,4,5", "--token-ids", "9", "--max-tokens", "30"]
    assert main([*command, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    shown = capsys.readouterr().out
    assert "peak_allocated_bytes" in shown
    assert "cr_factor by layer" in shown
    record = json.loads(files[0].read_text())
    assert [len(r["token_ids"]) for r in record["requests"]] == [30, 30]
    assert record["total"]["cr_factor"] > 1.1
    assert len(record["total"]["cr_factors"]) == 2
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], "no prompt"),
        (["--token-ids", "1,x"], "whole numbers"),
        (["--prompt", "text"], "no tokenizer"),
        (["--token-ids", "1", "--top-p", "2"], "top_p"),
    ],
)
def test_refusals_are_one_line(folder, capsys, extra, named):
    assert main([str(folder("qwen3", small_spec("dms"))), *extra]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_absent_model(tmp_path, capsys):
    assert main([str(tmp_path / "absent"), "--prompt", "x"]) == 2
    assert "no such directory" in capsys.readouterr().err
