"""Texts that consist of lines with fixed fields, and the type of every word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MARKER, OTHER = "markers", "other"


class Field(NamedTuple):
    """Field of a line.

    Attributes:
        types: Type of a word, by the regular expression that the whole word matches.
        repeats: True if the field takes any number of words, also none.
    """

    types: dict[str, str]
    repeats: bool = False

    def type_of(self, word: str) -> str | None:
        """Return the type of a word; None if the field does not take it."""
        names = (name for pattern, name in self.types.items() if re.fullmatch(pattern, word))
        return next(names, None)


class Line(NamedTuple):
    """Fields in their order; the first one does not repeat.

    Attributes:
        fields: Fields in their order.
        continues: True if a picture puts the line into the row of the previous line.
    """

    fields: tuple[Field, ...]
    continues: bool = False


class TypedWord(NamedTuple):
    """Word of a text with its type.

    Attributes:
        word: The word.
        type: One of `Grammar.types`.
        begins: True if a picture starts a row with the word.
    """

    word: str
    type: str
    begins: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """Lines of a task.

    Attributes:
        lines: Lines in any order; the first line that a word can begin is taken.
    """

    lines: tuple[Line, ...]

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the lines in their order, then `MARKER`, then `OTHER` for other words."""
        fields = (field for line in self.lines for field in line.fields)
        named = dict.fromkeys(name for field in fields for name in field.types.values())
        named.pop(MARKER, None)
        return (*named, MARKER, OTHER)

    def read(self, words: Iterable[str]) -> list[TypedWord]:
        """Return the type of every word.

        A line may be cut off anywhere. A word that neither continues its line nor begins another
        one is `OTHER`, like all words after it up to the next line.
        """
        typed: list[TypedWord] = []
        rest: tuple[Field, ...] = ()
        for word in words:
            begins, read = False, _read(word, rest)
            for line in self.lines if read is None else ():
                read = _read(word, line.fields[:1])
                if read is not None:
                    begins, read = not line.continues, (read[0], line.fields[1:])
                    break
            name, rest = read or (OTHER, ())
            typed.append(TypedWord(word, name, begins))
        return typed


def _read(word: str, fields: tuple[Field, ...]) -> tuple[str, tuple[Field, ...]] | None:
    """Return the type of a word at the first field that takes it, and the fields after it.

    Only fields that repeat are passed over.
    """
    for number, each in enumerate(fields):
        name = each.type_of(word)
        if name is not None:
            return name, fields[number + (not each.repeats) :]
        if not each.repeats:
            return None
    return None
