"""Overlap of problems with evaluation sets."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dms_train.data.errors import DataError
from dms_train.data_prep.rows import FileRows, Shard

NGRAM = 13  # words; the usual length for contamination checks, of GPT-3 (arXiv:2005.14165, app. C)
# GPQA and LiveCodeBench use the last two names
_FIELDS = ("problem", "question", "prompt", "Question", "question_content")
_WORD = re.compile(r"[^\W_]+")


class Overlap(NamedTuple):
    """Overlap of a text with an evaluation set.

    Attributes:
        kind: `exact` for the whole text, `13-gram` for consecutive words.
        where: File and row of the evaluation problem.
        words: Shared text.
    """

    kind: str
    where: str
    words: str

    @property
    def label(self) -> str:
        """Label for counts: file and kind."""
        return f"{self.where.rpartition(': row')[0]}, {self.kind}"


def words_of(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _whole(text: str) -> str:
    """Return a text in lower case without white space; signs stay, because x+1 is not x-1."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


class EvaluationSets:
    """The problems of evaluation sets, indexed by their text and by their n-grams."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the files.

        Args:
            paths: `.jsonl`, `.json`, `.csv` or `.parquet` files with a column `problem`,
                `question`, `prompt`, `Question` or `question_content`.

        Raises:
            DataError: A file cannot be read, has none of these columns, or holds no problem.
        """
        self._exact: dict[str, str] = {}
        self._ngrams: dict[str, str] = {}
        self.sets: list[dict[str, object]] = []
        for path in paths:
            rows = FileRows([path], _FIELDS)
            for row in rows.read(0, Shard()):
                self._add(f"{path.name}: row {row.number}", _problem(row.where, row.values))
            source = rows.sources[0]
            self.sets.append({"name": path.name, "sha256": source.sha256, "problems": rows.total})

    def _add(self, where: str, problem: str) -> None:
        self._exact.setdefault(_whole(problem), where)
        words = words_of(problem)
        for start in range(len(words) - NGRAM + 1):
            self._ngrams.setdefault(" ".join(words[start : start + NGRAM]), where)

    def find(self, text: str) -> Overlap | None:
        """Return the first overlap of a text, or None."""
        whole = _whole(text)
        if whole in self._exact:
            return Overlap("exact", self._exact[whole], text)
        words = words_of(text)
        for start in range(len(words) - NGRAM + 1):
            ngram = " ".join(words[start : start + NGRAM])
            if ngram in self._ngrams:
                return Overlap(f"{NGRAM}-gram", self._ngrams[ngram], ngram)
        return None


def _problem(where: str, values: dict[str, object]) -> str:
    for name in _FIELDS:
        value = values.get(name)
        if isinstance(value, str):
            return value
    raise DataError(f"{where}: an evaluation set needs a text in {', '.join(_FIELDS)}")
