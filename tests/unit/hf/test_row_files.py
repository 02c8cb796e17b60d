"""Files of rows in odd encodings and with odd line ends: the right rows, or one line of error.

Every case runs through both readers that users meet: `dms-eval` tasks and the `dms-data` commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dms_train.data.errors import DataError
from dms_train.data_prep.rows import HubOptions, Shard, open_rows
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.tasks.data_files import read_rows

Read = Callable[[Path], list[dict[str, Any]]]
ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg 中 é"
PLAIN = [{"q": "Wie groß?", "a": "1"}, {"q": ODD, "a": "2"}]


def _for_data(path: Path) -> list[dict[str, Any]]:
    rows = open_rows([str(path)], ("q", "a"), HubOptions())
    found = [row.values for row in rows.read(0, Shard())]
    assert rows.total == len(found)
    return found


READERS = pytest.mark.parametrize(
    "read", [lambda path: list(read_rows(path)), _for_data], ids=["evaluation", "data_prep"]
)


def json_lines(rows: list[dict[str, Any]], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def csv_text(end: str) -> str:
    return f'q,a{end}Wie groß?,1{end}{end}"{ODD}",2{end}'


@READERS
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", json_lines(PLAIN).encode("utf-8-sig")),
        ("crlf.jsonl", json_lines(PLAIN, "\r\n").encode()),
        ("blank.jsonl", b"\xef\xbb\xbf\n \n" + json_lines(PLAIN, "\n\n").encode()),
        ("cut.jsonl", json_lines(PLAIN).rstrip("\n").encode()),
        ("escaped.jsonl", "".join(json.dumps(row) + "\n" for row in PLAIN).encode()),
        ("bom.json", json.dumps(PLAIN, ensure_ascii=False).encode("utf-8-sig")),
        ("bom.csv", csv_text("\n").encode("utf-8-sig")),
        ("crlf.csv", csv_text("\r\n").encode()),
    ],
)
def test_rows_are_read_whatever_marks_and_separators_they_hold(
    tmp_path: Path, read: Read, name: str, content: bytes
) -> None:
    # json.dumps does not escape U+2028 and U+0085; control characters of ASCII it must
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == PLAIN


LINE = b'{"q": "1", "a": "2"}\n'
REFUSED = [
    ("utf16.jsonl", json_lines(PLAIN).encode("utf-16"), ": UTF-16 text; save the file as UTF-8"),
    ("utf16le.jsonl", json_lines(PLAIN).encode("utf-16-le"), ":1: .*UTF-8"),
    ("utf16.json", json.dumps(PLAIN).encode("utf-16"), ": UTF-16 text; save the file as UTF-8"),
    ("utf16.csv", csv_text("\n").encode("utf-16"), ": UTF-16 text; save the file as UTF-8"),
    ("latin1.jsonl", LINE + '{"q": "é"}\n'.encode("latin-1"), ":2: not UTF-8"),
    ("latin1.json", '[\n{"q": "é"}]'.encode("latin-1"), ":2: not UTF-8"),
    ("latin1.csv", "q,a\né,1\n".encode("latin-1"), ":2: not UTF-8"),
    ("nul.jsonl", LINE + b'{"q": "\0"}\n', ":2: a NUL byte"),
    ("nul.csv", b"q,a\n1,2\n\0,1\n", ":3: a NUL byte"),
    ("mac.jsonl", LINE.replace(b"\n", b"\r") * 2, ":1: not valid JSON"),
    ("deep.jsonl", LINE + b"[" * 100_000, ":2: not valid JSON"),
    ("deep.json", b"[" * 100_000, ": not valid JSON"),
    ("huge.jsonl", LINE + b'{"q": ' + b"9" * 5000 + b"}\n", ":2: not valid JSON .*4300 digits"),
    ("half.jsonl", LINE + b'{"q": "\\ud800"}\n', ":2: the text holds half of a surrogate pair"),
    ("list.jsonl", LINE + b"[1]\n", ":2: give an object with named columns, not a list"),
    ("null.json", b"[null]", ": row 0: give an object with named columns, not null"),
    ("object.json", b"{}", ": not a list of rows"),
    ("short.csv", b"q,a\n1,2\n3\n", ":3: cannot be read .1 cells for 2 columns"),
    ("twice.csv", b"q,q\n1,2\n", ":1: cannot be read .two columns have the same name"),
]


@READERS
@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, read: Read, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, EvaluationError), match=f"{name}{message}") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
