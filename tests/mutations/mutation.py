"""A mistake that a test must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake.

    Attributes:
        name: What is wrong then.
        file: Where, relative to the repository.
        before: Text that is there exactly once.
        after: What replaces it.
        test: A pytest id.
    """

    name: str
    file: str
    before: str
    after: str
    test: str

    def applies(self, tree: Path) -> bool:
        """Return True if the text occurs exactly once."""
        path = tree / self.file
        return path.is_file() and path.read_text().count(self.before) == 1

    def apply(self, tree: Path) -> None:
        """Make the mistake in a copy of the repository."""
        path = tree / self.file
        path.write_text(path.read_text().replace(self.before, self.after))
