"""Tables whose measured code has changed since they were measured.

    python -m benchmarks.stale

Every benchmark lists its records in `TABLES` of its package, with the code that they measure. A
record, or each of its rows, names its commit; where none is named, the commit that added the file
is taken. Prints the tables with later commits to that code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import benchmarks
import research
from benchmarks.records import ROOT, Table, git
from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError


class Stale(NamedTuple):
    """Rows of a record that were measured at one commit.

    Attributes:
        file: Record, relative to the repository.
        page: Page that shows it.
        commit: Of the measurement.
        later: One line for each later commit to the measured code, the newest first.
    """

    file: str
    page: str
    commit: str
    later: list[str]


def tables() -> list[Table]:
    """Return the tables of all benchmarks and experiments."""
    found: list[Table] = []
    for parent in (benchmarks, research):
        for package in pkgutil.iter_modules(parent.__path__, f"{parent.__name__}."):
            if package.ispkg:
                found += getattr(importlib.import_module(package.name), "TABLES", ())
    return found


def commits(value: Any) -> set[str]:
    """Commits that a record names, its own and those of its rows."""
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
        EvaluationError: A file is no record, or a commit is unknown.
    """
    for table in known:
        for file in sorted(root.glob(f"*/results/{table.records}")):
            name = str(file.relative_to(root))
            for commit in sorted(_commits_of(root, file)):
                span = ("log", "--format=%h %as %s", f"{commit}..HEAD", "--", *table.measures)
                later = git(root, *span)
                if later is None:
                    raise EvaluationError(
                        f"{name}: commit {commit} is not in this repository; fetch its history"
                    )
                if later:
                    yield Stale(name, table.page, commit, later.splitlines())


def _commits_of(root: Path, file: Path) -> set[str]:
    """Commits of a record, else the one that last wrote the file; none if git does not know it."""
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


def lines(found: list[Stale]) -> Iterator[str]:
    """The output: a Markdown table."""
    yield "| record | page | measured at | later commits to its code | newest |"
    yield "|---|---|---|---|---|"
    for entry in found:
        yield (
            f"| {entry.file} | {entry.page} | {entry.commit[:7]} | {len(entry.later)} "
            f"| {entry.later[0]} |"
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    return run_main(_run)


def _run() -> int:
    if git(ROOT, "rev-parse", "HEAD") is None:
        raise EvaluationError(f"{ROOT}: not a git repository; the history of the code is needed")
    found = list(stale(ROOT, tables()))
    print("\n".join(lines(found)) if found else "no stale table")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
