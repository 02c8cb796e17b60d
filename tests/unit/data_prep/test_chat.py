"""`dms-data chat`: conversations of several turns, and pairs of prompt and completion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.data_prep.prepare import main
from tests.support.r1_tokenizer import ASSISTANT, BEGIN, END, USER

WriteRows = Callable[..., str]
TALK = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def make(tmp_path: Path, r1: str, *words: str) -> int:
    return main(["chat", *words, "--output", str(tmp_path / "out"), "--tokenizer", r1])


def test_conversations_and_pairs_become_documents(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    rows = [
        {"id": 5, "messages": TALK},
        {"prompt": "One?", "completion": "Two."},
        {"prompt": TALK[:3], "completion": TALK[3:]},
    ]
    assert make(tmp_path, r1, write_rows(rows)) == 0
    decode = AutoTokenizer.from_pretrained(r1).decode
    first, second, third = ShardReader(tmp_path / "out")
    talk = (
        f"{BEGIN}{USER}One?{ASSISTANT}<think>\nHm.\n</think>\n\nTwo.{END}"
        f"{USER}Sure?{ASSISTANT}Yes.{END}"
    )
    assert decode(first.tokens) == talk
    assert decode(third.tokens) == talk
    assert decode(second.tokens) == f"{BEGIN}{USER}One?{ASSISTANT}Two.{END}"
    counted = decode(first.tokens[first.mask.astype(bool)])
    assert counted == f"<think>\nHm.\n</think>\n\nTwo.{END}Yes.{END}"
    manifest = read_manifest(tmp_path / "out")
    assert manifest.preparation is not None
    assert manifest.preparation["rows"] == {"read": 3, "kept": 3}


def test_conversations_without_an_answer_are_left_out(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    rows = [{"talk": TALK}, {"talk": TALK[:1]}, {"talk": [{"role": "assistant", "content": " "}]}]
    assert make(tmp_path, r1, write_rows(rows), "--messages-key", "talk") == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.preparation is not None
    assert manifest.preparation["rows"] == {"read": 3, "missing_value": 2, "kept": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "row 0: needs a column messages, or prompt and completion"),
        ({"messages": "a"}, "row 0: the conversation is not a list of messages"),
        ({"messages": [{"role": "user"}]}, "row 0: a message needs a role and a content"),
        ({"prompt": 3, "completion": "a"}, "row 0: expected text, found int"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path,
    r1: str,
    write_rows: WriteRows,
    capsys: pytest.CaptureFixture[str],
    row: Any,
    message: str,
) -> None:
    assert make(tmp_path, r1, write_rows([row])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("command", ["chat", "tokenize", "generate"])
def test_a_template_file_in_another_encoding_is_refused(
    tmp_path: Path, r1: str, write_rows: WriteRows, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    template = tmp_path / "a.jinja"
    words = [write_rows([{"messages": TALK}]), "--chat-template", str(template)]
    words += ["--model" if command == "generate" else "--tokenizer", r1]
    words += ["--max-new-tokens", "1"] if command == "generate" else []
    words += ["--messages-key", "messages"] if command == "tokenize" else []
    for content, reason in ((b"\xff\xfe{\0", "UTF-16 text"), (b"{# #}\n\xe9", ":2: not UTF-8")):
        template.write_bytes(content)
        assert main([command, *words, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1


def test_a_mark_in_front_of_a_template_is_not_part_of_it(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    template = tmp_path / "a.jinja"
    template.write_bytes("{% for m in messages %}{{ m.content }}{% endfor %}".encode("utf-8-sig"))
    rows = write_rows([{"messages": TALK}])
    assert make(tmp_path, r1, rows, "--chat-template", str(template)) == 0
    (document,) = ShardReader(tmp_path / "out")
    decoded = AutoTokenizer.from_pretrained(r1).decode(document.tokens)
    assert decoded == "".join(message["content"] for message in TALK)


def test_an_answer_without_a_token_in_the_loss_is_left_out(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    """The tokenizer of this test deletes a sign before it forms tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    described = json.loads((Path(r1) / "tokenizer.json").read_text("utf-8"))
    described["normalizer"] = {"type": "Replace", "pattern": {"String": "¤"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    template = tmp_path / "a.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = write_rows([{"prompt": "One?", "completion": text} for text in ("¤¤", "Two.")])
    assert make(tmp_path, str(folder), rows, "--chat-template", str(template)) == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.preparation is not None
    assert manifest.preparation["rows"] == {"read": 2, "missing_value": 1, "kept": 1}


@pytest.mark.parametrize("command", ["chat", "tokenize"])
def test_a_row_with_a_role_that_the_template_does_not_know_is_refused(
    tmp_path: Path,
    r1: str,
    write_rows: WriteRows,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    template = tmp_path / "a.jinja"
    template.write_text("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    rows = write_rows(
        [{"messages": TALK}, {"messages": [{"role": "tool", "content": "72"}, *TALK]}]
    )
    words = [rows, "--chat-template", str(template), "--messages-key", "messages"]
    words += ["--tokenizer", r1, "--output", str(tmp_path / "out")]
    assert main([command, *words]) == 2
    error = capsys.readouterr().err
    assert "leaves out message 1 of role 'tool'" in error
    assert error.count("\n") == 1
