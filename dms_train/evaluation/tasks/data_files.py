"""Files of benchmarks: JSON lines, JSON, CSV and parquet, local or in the cache of the hub."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError

_BLOCK = 1 << 20
_LONGEST_CELL = 1 << 26  # characters of a cell of a CSV file


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where the file of a benchmark comes from.

    Attributes:
        repo: Data set on the hub.
        file: Its file.
        rows: Documents that were published.
    """

    repo: str
    file: str
    rows: int

    def from_hub(self, *, download: bool) -> Path:
        """The file in the local cache of the hub; the network is used only for `download`.

        Raises:
            EvaluationError: It is not there, or cannot be downloaded.
        """
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import LocalEntryNotFoundError
        except ImportError:
            raise EvaluationError(
                "the hub needs huggingface_hub; pip install 'dms-train[hf]'"
            ) from None
        try:
            found = hf_hub_download(
                self.repo, self.file, repo_type="dataset", local_files_only=not download
            )
        except Exception as error:  # of the hub, the network and the disk
            reason = " ".join(str(error).split())[:200]
            if not download and isinstance(error, LocalEntryNotFoundError):
                reason = "not in the local cache of the hub; task.download=true fetches it"
            raise EvaluationError(f"{self.repo}/{self.file}: {reason}") from None
        return Path(found)


def read_rows(path: Path, *, sha256: str | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a file as mappings.

    Args:
        path: `.jsonl`, `.json` (a list), `.csv` or `.parquet`.
        sha256: What the file must hash to; None skips the check.

    Raises:
        EvaluationError: The file is another one, damaged, or of an unknown kind.
        FileNotFoundError: There is no such file.
    """
    if sha256 is not None and file_sha256(path) != sha256.lower():
        raise EvaluationError(f"{path}: its SHA-256 is {file_sha256(path)}, not {sha256}")
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise EvaluationError(f"{path}: give a file that ends in {', '.join(readers)}")
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: not UTF-8 ({error.reason})") from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _mapping(line, f"{path}:{number}")


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{where}: not valid JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise EvaluationError(f"{where}: give an object with named columns")
    return value


def _json(path: Path) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{path}: not valid JSON ({error.msg})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EvaluationError(f"{path}: give a list of objects")
    yield from rows


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        try:
            yield from rows
        except csv.Error as error:
            raise EvaluationError(
                f"{path}:{rows.reader.line_num}: cannot be read ({error})"
            ) from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise EvaluationError(
            f"{path}: parquet needs pyarrow; pip install 'dms-train[data]'"
        ) from None
    path.open("rb").close()  # what the system refuses is no damage
    try:
        yield from parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:  # OSError: of a damaged page
        reason = str(error).strip().partition("\n")[0]
        raise EvaluationError(f"{path}: not a parquet file, or damaged ({reason})") from None
