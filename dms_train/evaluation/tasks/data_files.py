"""Files of benchmarks: JSON lines, JSON, CSV and parquet, local or in the cache of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.errors import HFError
from dms_train.hf.row_files import csv_rows, json_array, json_lines

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Location of a benchmark's file on the hub.

    Attributes:
        repo: Data set on the hub.
        file: File in that data set.
        rows: Number of published documents.
    """

    repo: str
    file: str
    rows: int

    def from_hub(self, *, download: bool) -> Path:
        """Return the file in the local cache of the hub; only `download` uses the network.

        Raises:
            EvaluationError: The file is not in the cache, or cannot be downloaded.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = hf_hub_download(
                self.repo, self.file, repo_type="dataset", local_files_only=not download
            )
        except Exception as error:  # errors of the hub, the network and the disk
            reason = " ".join(str(error).split())[:200]
            if not download and isinstance(error, LocalEntryNotFoundError):
                reason = "not in the local cache of the hub; task.download=true fetches it"
            raise EvaluationError(f"{self.repo}/{self.file}: {reason}") from None
        return Path(path)


def read_rows(path: Path, *, sha256: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows of a file as mappings.

    Args:
        path: `.jsonl`, `.json` (a list), `.csv` or `.parquet`.
        sha256: Required hash of the file; None skips the check.

    Raises:
        EvaluationError: The file is another one, damaged, or of an unknown kind.
        FileNotFoundError: There is no such file.
    """
    if sha256 is not None and file_sha256(path) != sha256.lower():
        raise EvaluationError(f"{path}: its SHA-256 is {file_sha256(path)}, not {sha256}")
    readers: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {
        ".jsonl": _json_lines,
        ".json": json_array,
        ".csv": csv_rows,
        ".parquet": _parquet,
    }
    if path.suffix not in readers:
        raise EvaluationError(f"{path}: give a file that ends in {', '.join(readers)}")
    try:
        yield from readers[path.suffix](path)
    except HFError as error:
        raise EvaluationError(str(error)) from None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    return (row for _, row in json_lines(path))


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    path.open("rb").close()  # a refusal of the system is no damage of the file
    try:
        yield from parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:  # pyarrow raises OSError for a damaged page
        reason = str(error).strip().partition("\n")[0]
        raise EvaluationError(f"{path}: not a parquet file, or damaged ({reason})") from None
