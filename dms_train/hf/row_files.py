"""Rows of JSON-lines, JSON and CSV files that users hand over; one clear error for each fault.

Text must be UTF-8; a byte-order mark is allowed. Lines end at line feeds, with or without a
carriage return: a JSON string may hold other separators, such as U+2028.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dms_train.hf.errors import HFError
from dms_train.hf.text_files import decode_text

_LONGEST_CELL = 1 << 26  # maximum number of characters of a CSV cell


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, after its number."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.removeprefix(BOM_UTF8).strip():
                yield number, line


def json_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse one line of a JSON-lines file.

    Raises:
        HFError: The line is no JSON object in UTF-8; the message names it.
    """
    return _row(
        f"{path}:{number}", _parsed(f"{path}:{number}", decode_text(str(path), line, number))
    )


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSON-lines file, each after its file and line.

    Raises:
        HFError: A line is no JSON object in UTF-8; the message names it.
    """
    for number, line in numbered_lines(path):
        yield f"{path}:{number}", json_line(path, number, line)


def json_array(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON file that holds a list of objects.

    Raises:
        HFError: The file holds something else, or is not UTF-8.
    """
    values = _parsed(str(path), decode_text(str(path), path.read_bytes()))
    if not isinstance(values, list):
        raise HFError(f"{path}: not a list of rows; name JSON lines .jsonl")
    return [_row(f"{path}: row {number}", value) for number, value in enumerate(values)]


def csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file whose first row names the columns; blank lines are left out.

    Raises:
        HFError: A row has another number of cells than the first one, or cannot be read; names the
            line.
    """
    csv.field_size_limit(_LONGEST_CELL)
    with path.open("rb") as stream:
        lines = (decode_text(str(path), line, n) for n, line in enumerate(stream, 1))
        rows = csv.reader(lines, strict=True)
        try:
            names = next(rows, [])
            if len(set(names)) != len(names):
                raise csv.Error("two columns have the same name")
            for cells in filter(None, rows):
                if len(cells) != len(names):
                    raise csv.Error(f"{len(cells)} cells for {len(names)} columns")
                yield dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise HFError(f"{path}:{rows.line_num}: cannot be read ({error})") from None


def _parsed(where: str, text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HFError(f"{where}: the text holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # drops Python's advice on integers of 4,300 digits
        raise HFError(f"{where}: not valid JSON ({reason})") from None
    return value


def _row(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise HFError(f"{where}: give an object with named columns, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
