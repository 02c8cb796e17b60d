"""Text files in other encodings and with other separators of lines: right, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dms_train.data.errors import DataError
from dms_train.data_prep.documents import BLANK_LINE, EVERY_LINE, InputRule, read_documents
from dms_train.hf.errors import HFError
from dms_train.hf.text_files import read_lines, read_text

# separators at which str.splitlines splits, and which prompts and JSON strings may hold
ODD = "a\u2028b\u2029c\u0085d\x0ce\x0bf\x1cg"


def test_marks_and_line_ends_are_not_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(f"{ODD}\r\n\r\ntwo\rthree\n".encode("utf-8-sig"))
    assert read_text(file) == f"{ODD}\n\ntwo\nthree\n"
    assert read_lines(file) == [
        (f"{file}:1", ODD),
        (f"{file}:3", "two"),
        (f"{file}:4", "three"),
    ]


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("one\ntwo".encode("utf-16"), "", "UTF-16 text"),
        ("one\ntwo".encode("utf-16-be"), ":1", "a NUL byte"),
        (b"one\ntwo\xff\n", ":2", "not UTF-8"),
        (b"one\n\ntwo\0", ":3", "a NUL byte"),
        ("one\nnaïve".encode("latin-1"), ":2", "not UTF-8"),
    ],
)
def test_what_is_not_utf_8_is_named_with_its_line(
    tmp_path: Path, content: bytes, where: str, reason: str
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    for read, error in ((read_text, HFError), (documents, DataError)):
        with pytest.raises(error, match=reason) as caught:
            read(file)
        assert str(caught.value).startswith(f"{file}{where}: ")
        assert str(caught.value).endswith("; save the file as UTF-8")


def documents(path: Path, split: str = EVERY_LINE) -> list[str]:
    return [str(document.content) for document in read_documents(path, InputRule(text_split=split))]


def test_documents_begin_after_the_mark_and_keep_odd_separators(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(f"{ODD}\r\n\r\ntwo\r\n".encode("utf-8-sig"))
    assert documents(text) == [ODD, "two"]
    assert documents(text, BLANK_LINE) == [ODD, "two"]
    rows = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": ODD}), json.dumps({"text": ODD}, ensure_ascii=False)]
    rows.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert documents(rows) == [ODD, ODD]
