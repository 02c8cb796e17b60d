"""Stored records of benchmarks: their tables, and the code that they measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.evaluation.errors import EvaluationError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VARIABLE = "DMS_COMMIT"
_NOT_RECORDED = f"no git repository, and {VARIABLE} is not set"


class Table(NamedTuple):
    """Records of one kind; every benchmark lists its records as `stored`.

    Attributes:
        records: Pattern of the file names below `RESULTS`.
        page: Page that shows them, relative to the repository.
        measures: Files and folders of the code that is measured, relative to the repository.
    """

    records: str
    page: str
    measures: tuple[str, ...]


def origin(root: Path = ROOT) -> dict[str, Any]:
    """Return the commit that is measured now, and the date, for a record.

    The commit comes from the environment variable `DMS_COMMIT`, because a copy of the tree on
    another machine may lack `.git`, and otherwise from git.

    Returns:
        `date`, `commit`, and `changed` if tracked files differ from the commit. Without a commit
        `no_commit` says why.

    Raises:
        EvaluationError: The variable holds no commit.
    """
    date = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    given = os.environ.get(VARIABLE)
    if given:
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise EvaluationError(f"{VARIABLE}={given}: a commit of 7 to 40 hexadecimal digits")
        return date | {"commit": given}
    commit = git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        print(f"warning: the record has no commit: {_NOT_RECORDED}", file=sys.stderr)
        return date | {"commit": None, "no_commit": _NOT_RECORDED}
    changed = git(root, "status", "--porcelain", "--untracked-files=no")
    return date | {"commit": commit} | ({"changed": True} if changed else {})


def git(root: Path, *words: str) -> str | None:
    """Return the output of a git command; None if it fails or git is missing."""
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()


def measured_at(entry: dict[str, Any]) -> str:
    """Return commit and date of a record or of one of its rows, as tables show them."""
    date, commit = entry.get("date", "no date"), entry.get("commit")
    if commit is None:
        return f"no commit ({entry.get('no_commit', 'not recorded')}), {date}"
    if entry.get("commit_from") == "history":  # recorded before records had commits
        return f"added in {commit[:7]}, {date}"
    changed = " with changes" if entry.get("changed") else ""
    return f"{commit[:7]}{changed}, {date}"


def folder_of(device: str, results: Path = RESULTS) -> Path:
    """Return the folder that holds the records of a device.

    Args:
        device: Name of the device.
        results: Folder of all devices.
    """
    return results / re.sub(r"\W+", "_", device.lower())


def print_record(record: dict[str, Any], text: Callable[[Any], str]) -> None:
    """Print the tables of a record, and its commit and date if it has them.

    Args:
        record: Record.
        text: Shows a record as text.
    """
    print(text(record))
    if "date" in record:
        print(f"\nMeasured at: {measured_at(record)}.")


def show(path: Path, text: Callable[[Any], str]) -> int:
    """Print the tables of a stored record.

    Args:
        path: JSON file.
        text: Shows a record as text.

    Returns:
        0.

    Raises:
        EvaluationError: The file is not a record of this benchmark.
    """
    refused = EvaluationError(f"{path}: not a record of this command")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise refused from None
    try:
        print_record(record, text)
    except (KeyError, TypeError, AttributeError):
        raise refused from None
    return 0


def stored_records(results: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of all GPUs: those that name their commits first, then the newest.

    Args:
        results: Folders of devices.
        name: File name of the records.
    """
    records = [json.loads(file.read_text()) for file in results.glob(f"*/{name}")]
    on_gpus = [record for record in records if not record["device"].startswith("CPU")]
    return sorted(
        on_gpus, key=lambda record: (_names_commits(record), newest(record)), reverse=True
    )


def _names_commits(record: dict[str, Any]) -> bool:
    return any("commit" in each and "commit_from" not in each for each in (record, *_rows(record)))


def newest(record: dict[str, Any]) -> str:
    """Return the date of a record or of its newest row."""
    return max(str(each.get("date", "")) for each in (record, *_rows(record)))


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = record.get("cases") or record.get("rows") or []
    return rows


def write_page(page: Path, results: str, name: str = "results") -> None:
    """Replace the text between the markers `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        EvaluationError: The page lacks a marker.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, opened, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise EvaluationError(f"{page}: add the lines {begin} and {end} around the results")
    page.write_text(f"{before}{begin}\n{results}\n{end}{after}", encoding="utf-8")
