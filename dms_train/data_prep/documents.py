"""Reader of text and `.jsonl` files that yields one document at a time, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.data.errors import DataError
from dms_train.hf.errors import HFError
from dms_train.hf.text_files import decode_text

Message = dict[str, str]

TEXT_TYPES = (".txt", ".md", ".rst", ".tex")
DOCUMENT_TYPES = (*TEXT_TYPES, ".jsonl")
WHOLE_FILE, BLANK_LINE, EVERY_LINE = "whole file", "blank line", "every line"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRule:
    """Rule that divides input files into documents.

    Attributes:
        text_split: End of a document in a text file: `WHOLE_FILE`, `BLANK_LINE` or
            `EVERY_LINE`.
        passage: Fewest characters of a document in a text file, which then ends at the end of a
            line; the last document of a file may be shorter. None divides by `text_split`.
        text_key: Field of a `.jsonl` row with the text.
        messages_key: Field of a `.jsonl` row with a conversation, used in place of `text_key`.
    """

    text_split: str = WHOLE_FILE
    passage: int | None = None
    text_key: str = "text"
    messages_key: str | None = None


class Document(NamedTuple):
    """One document before tokenisation.

    Attributes:
        where: File and line of its beginning, for error messages.
        content: Text, or the messages of a conversation.
        size: Number of bytes of the input file in this document.
    """

    where: str
    content: str | list[Message]
    size: int


def read_documents(path: Path, rule: InputRule) -> Iterator[Document]:
    """Yield the documents of one file; empty ones are left out.

    Raises:
        DataError: The file type is unknown, or a line is not UTF-8, not JSON or lacks its field.
    """
    if path.suffix == ".jsonl":
        yield from _json_lines(path, rule)
    elif path.suffix in TEXT_TYPES:
        for document in _text(path, rule):
            if str(document.content).strip():
                yield document
    else:
        raise DataError(f"{path}: unknown file type; give {', '.join(DOCUMENT_TYPES)} files")


def files_below(inputs: Iterable[Path], types: tuple[str, ...]) -> list[Path]:
    """Return the inputs, each folder replaced by its files of some types, sorted by path.

    Files and folders with a name that begins with a dot are left out.

    Raises:
        DataError: A folder has no such file.
    """
    files: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            files.append(path)
            continue
        inner = sorted(file for file in path.rglob("*") if _is_input(file, path, types))
        if not inner:
            raise DataError(f"{path}: no {', '.join(types)} file in this folder")
        files += inner
    return files


def _is_input(file: Path, folder: Path, types: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix in types and not hidden and file.is_file()


def _lines(path: Path) -> Iterator[Document]:
    """Yield lines with their line ends, split only at newline characters."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = decode_text(str(path), line, number)
            except HFError as error:
                raise DataError(str(error)) from None
            yield Document(f"{path}:{number}", text, len(line))


def _text(path: Path, rule: InputRule) -> Iterator[Document]:
    group: list[Document] = []
    length = 0
    for line in _lines(path):
        if rule.text_split == EVERY_LINE:
            yield line._replace(content=str(line.content).rstrip("\r\n"))
            continue
        group.append(line)
        length += len(line.content)
        if _ends(line, length, rule):
            yield _join(group, rule)
            group, length = [], 0
    if group:
        yield _join(group, rule)


def _ends(line: Document, length: int, rule: InputRule) -> bool:
    """Return whether a document of `length` characters ends with its newest line."""
    if rule.passage is not None:
        return length >= rule.passage
    return rule.text_split == BLANK_LINE and not str(line.content).strip()


def _join(lines: list[Document], rule: InputRule) -> Document:
    text = "".join(str(line.content) for line in lines)
    if rule.passage is not None:
        text = text.lstrip("\r\n")
    elif rule.text_split == BLANK_LINE:
        text = text.rstrip()
    return Document(lines[0].where, text, sum(line.size for line in lines))


def _json_lines(path: Path, rule: InputRule) -> Iterator[Document]:
    for line in _lines(path):
        if not str(line.content).strip():
            continue
        try:
            row = json.loads(str(line.content))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{line.where}: not valid JSON ({error})") from None
        key = rule.text_key if rule.messages_key is None else rule.messages_key
        if not isinstance(row, dict) or key not in row:
            raise DataError(f'{line.where}: has no field "{key}"; name another with --text-key')
        if rule.messages_key is not None:
            yield line._replace(content=checked_messages(line.where, row[key]))
        elif checked_text(line.where, row[key]).strip():
            yield line._replace(content=row[key])


def checked_messages(where: str, value: Any) -> list[Message]:
    """Return the role and content of every message of a conversation.

    Raises:
        DataError: It is not a conversation; the message names the row, `where`.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: the conversation is not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise DataError(f"{where}: a message needs a role and a content")
        checked_text(where, message["role"])
        checked_text(where, message["content"])
    return [{"role": message["role"], "content": message["content"]} for message in value]


def checked_text(where: str, value: Any) -> str:
    """Return the value itself, if it is text that UTF-8 can encode.

    Raises:
        DataError: It is not such a text; the message names the row, `where`.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, found {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: the text holds half of a surrogate pair") from None
    return value
