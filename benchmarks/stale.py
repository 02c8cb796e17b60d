"""Records whose measured code has changed since they were measured.

    python -m benchmarks stale

Every benchmark lists its stored records with the measured code. A record, or each of its rows,
names its commit; otherwise the commit that added the file is taken. The command prints the records
with later commits to that code.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import research
from benchmarks.benchmark import find
from benchmarks.records import ROOT, Table, git
from benchmarks.tables import Column, table
from dms_train.evaluation.errors import EvaluationError


class Stale(NamedTuple):
    """Rows of a record that were measured at one commit.

    Attributes:
        file: Record, relative to the repository.
        page: Page that shows it.
        commit: Commit that was measured.
        later: One line for each later commit to the measured code, the newest first.
    """

    file: str
    page: str
    commit: str
    later: list[str]


def tables() -> list[Table]:
    """Return the stored records of all benchmarks and experiments."""
    stored = [records for source in find().values() for records in source.load().stored]
    for package in pkgutil.iter_modules(research.__path__, "research."):
        if package.ispkg:
            stored += getattr(importlib.import_module(package.name), "TABLES", ())
    return stored


def commits(value: Any) -> set[str]:
    """Return the commits that a record names, its own and those of its rows."""
    if isinstance(value, list):
        return set().union(*map(commits, value))
    if not isinstance(value, dict):
        return set()
    own = {value["commit"]} if isinstance(value.get("commit"), str) else set()
    return own.union(*map(commits, value.values()))


def stale(root: Path, known: list[Table]) -> Iterator[Stale]:
    """Yield the rows of records whose measured code has changed, by file and commit.

    Args:
        root: A git repository with `benchmarks/results` and `research/results`.
        known: Tables to check.

    Raises:
        EvaluationError: A file is not a record, or a commit is unknown.
    """
    for records in known:
        for file in sorted(root.glob(f"*/results/{records.records}")):
            name = str(file.relative_to(root))
            for commit in sorted(_commits_of(root, file)):
                span = ("log", "--format=%h %as %s", f"{commit}..HEAD", "--", *records.measures)
                later = git(root, *span)
                if later is None:
                    raise EvaluationError(
                        f"{name}: commit {commit} is not in this repository; fetch its history"
                    )
                if later:
                    yield Stale(name, records.page, commit, later.splitlines())


def _commits_of(root: Path, file: Path) -> set[str]:
    """Return the commits of a record, else the one that last wrote the file, if git knows it."""
    text = file.read_text(encoding="utf-8")
    try:
        record = (
            [json.loads(line) for line in text.splitlines()]
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except ValueError:
        raise EvaluationError(f"{file}: not JSON") from None
    named = commits(record)
    added = git(root, "log", "-1", "--format=%H", "--", str(file))
    return named or ({added} if added else set())


COLUMNS: tuple[Column, ...] = (
    ("record", lambda entry: entry["file"]),
    ("page", lambda entry: entry["page"]),
    ("measured at", lambda entry: entry["commit"][:7]),
    ("later commits to its code", lambda entry: len(entry["later"])),
    ("newest", lambda entry: entry["later"][0]),
)


def text(entries: list[Stale]) -> str:
    """Return a table of stale records."""
    return table(COLUMNS, [entry._asdict() for entry in entries])


def report() -> None:
    """Print all stale records.

    Raises:
        EvaluationError: The history of the code is missing.
    """
    if git(ROOT, "rev-parse", "HEAD") is None:
        raise EvaluationError(f"{ROOT}: not a git repository; the history of the code is needed")
    entries = list(stale(ROOT, tables()))
    print(text(entries) if entries else "no stale table")
