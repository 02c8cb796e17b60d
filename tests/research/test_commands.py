"""Every command answers `--help`, and the documentation names commands and options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from research.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "research").rglob("*.md"),
    ROOT / "dms_train" / "assets" / "exam_teacher" / "README.md",
]


def documented() -> Iterator[tuple[str, ...]]:
    """Words of the commands that the pages show, in a line of their own or between backquotes."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^python -m research ([^#\n]+)", text, re.MULTILINE)
        for command in [*lines, *re.findall(r"`python -m research ([^`]+)`", text)]:
            yield tuple(command.split())


@cache
def help_of(*names: str) -> str:
    with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        main([*names, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_and_answers_help(name: str) -> None:
    assert f"  {name} " in help_of()
    assert "usage: " in help_of(name)


@pytest.mark.parametrize("words", sorted(set(documented())), ids=" ".join)
def test_a_documented_command_exists_with_its_options(words: tuple[str, ...]) -> None:
    names = words[:2] if words[0] in ("data", "ablations") and len(words) > 1 else words[:1]
    if names == ("--help",):
        return
    shown = help_of(*names)
    assert "usage: " in shown
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", shown), word
