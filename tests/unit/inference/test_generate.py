"""`dms-generate` prints text, a table and a picture."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from benchmarks.word_tokenizer import write_word_tokenizer
from dms_train.cli.generate import main
from tests.support import served_model
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


def test_a_prompt_file_holds_one_prompt_a_line(folder, tmp_path, capsys):
    """Other separators stay in the prompt; a byte-order mark is removed."""
    directory = folder("qwen3", small_spec("dms"))
    write_word_tokenizer(directory, ("<eod>", "a", "cat", "was", "there", "naïve"))
    prompts = ["a cat\u2028was\u0085there\x0c", "naïve"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join([prompts[0], "", prompts[1]]).encode("utf-8-sig"))
    command = [str(directory), "--max-tokens", "1", "--prompt-file", str(file)]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert [request["prompt"] for request in record["requests"]] == prompts
    capsys.readouterr()
    file.write_bytes(b"one\n\xff")
    assert main(command) == 2
    assert f"{file}:2: not UTF-8" in capsys.readouterr().err


def test_chat_makes_a_prompt_a_user_turn(tmp_path):
    model, file = str(served_model.write_model(tmp_path)), tmp_path / "out.json"
    command = [model, "--max-tokens", "1", "--json", str(file)]
    assert main([*command, "--chat", "--prompt", "Hello.", "--prompt", "<b>"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    for request, text in zip(
        json.loads(file.read_text())["requests"], ["Hello.", "<b>"], strict=True
    ):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert request["prompt_token_ids"] == expected


def test_chat_needs_a_template_and_text(tmp_path, capsys):
    model = str(served_model.write_model(tmp_path, chat=False))
    assert main([model, "--chat", "--prompt", "Hello."]) == 2
    assert "the model has no chat template" in capsys.readouterr().err
    assert main([model, "--chat", "--token-ids", "1,2"]) == 2
    assert "--token-ids: --chat takes text" in capsys.readouterr().err
