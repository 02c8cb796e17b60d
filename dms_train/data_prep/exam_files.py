"""Files of exam sheets: text to train on, and questions with known answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dms_train.data_prep.exam_sheets import HeldOutSheet, document, sheet
from dms_train.data_prep.exam_tokenizer import EOD_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetText:
    """Settings of the text to write.

    Attributes:
        documents: Number of documents.
        n_range: Fewest and most questions on a sheet.
        document_tokens: Length of every document, filled with sheets; None for one whole sheet.
        seed: Seed of all draws.
    """

    documents: int
    n_range: tuple[int, int]
    document_tokens: int | None
    seed: int


def write_sheets(path: Path, text: SheetText) -> None:
    """Write JSON lines with a `text` field, for `dms-data tokenize`."""
    rng = random.Random(text.seed)
    write_rows(path, ({"text": _document(rng, text)} for _ in range(text.documents)))


def _document(rng: random.Random, text: SheetText) -> str:
    if text.document_tokens is None:
        return sheet(rng, rng.randint(*text.n_range), "train")
    return document(rng, text.document_tokens, text.n_range, EOD_TOKEN)


def write_problems(path: Path, sheets: list[HeldOutSheet]) -> None:
    """Write JSON lines with `prompt`, `answers` and `stop`, for the task `exam_sheets`."""
    rows = ({"prompt": s.prompt, "answers": [str(a) for a in s.answers]} for s in sheets)
    write_rows(path, ({**row, "stop": "\n\n"} for row in rows))


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write JSON lines atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
