"""Text follows the rules of CONTRIBUTING.md: docstrings begin well, and some words are not used."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.definitions import definitions

ROOT = Path(__file__).resolve().parents[2]
CODE = ("dms_train", "benchmarks", "research", "examples", "scripts")
FIXTURES = ROOT / "tests" / "fixtures"  # code as earlier versions wrote it
FIRST = re.compile(
    r"(What|Who|Whose|Which|Whether|Of|Those|That of|From which|Has|How many|How much)\b"
)
# word: what to write instead
WORDS = {
    "behind": "after, following or beyond",
    "(on|upon) (its|their) way": "in flight",
    "but for": "except",
    "whatever": "regardless of, or any",
    "nobody": "the one who does not: no thread, no caller",
    "settles?": "the verb of what is done",
    "suits?": "is_supported, or fits",
    "KVLists": "PageTables",
    "(Row|Cache)Memory": "KVCacheManager",
    "LoopParts": "TrainerComponents",
    "Findings": "ValidationResult",
    "neurons?": "eviction channel",
}


def files(folders: tuple[str, ...], pattern: str) -> list[Path]:
    found = (file for folder in folders for file in (ROOT / folder).rglob(pattern))
    return sorted(file for file in found if not file.is_relative_to(FIXTURES))


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in (tree, *definitions(tree)):
        text = ast.get_docstring(node)
        if text:
            yield getattr(node, "lineno", 1), text


def test_a_docstring_begins_with_a_verb_or_a_noun():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in files((*CODE, "tests"), "*.py")
        for line, text in docstrings(file)
        if FIRST.match(text)
    ]
    assert found == []


@functools.cache
def texts() -> dict[Path, str]:
    found = [*files(CODE, "*.py"), *files(("docs",), "*.md"), *ROOT.glob("*.md")]
    return {file: file.read_text(encoding="utf-8") for file in found}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_a_better_one(word):
    pattern = re.compile(rf"\b({word})\b")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}: write {WORDS[word]}"
        for file, text in texts().items()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
