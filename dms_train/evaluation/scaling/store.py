"""Results of a run on disk: one JSON line for each chain, in a folder that several processes share.

    run.json                  configuration, its hash, model hash, versions; written once
    chains/00000-of-00004.jsonl   chains of one process
    summary.json              scores and costs of every budget

The chains of a document are written at once and synchronised. A killed process therefore leaves
whole documents and at most one damaged end, and the next process removes that end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.durable import sync_folder
from dms_train.observe import locks

RUN, CHAINS, SUMMARY = "run.json", "chains", "summary.json"
Row = dict[str, Any]


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 of the settings that decide the result of a run, in any order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def open_run(folder: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Start a run in a folder, or join the run that exists there.

    Args:
        folder: Folder of the run; created if absent.
        header: Content of `run.json`; `config` and `config_hash` decide whether it is the same run.

    Returns:
        The header of the run.

    Raises:
        EvaluationError: The folder holds a run of another configuration.
    """
    (folder / CHAINS).mkdir(parents=True, exist_ok=True)
    written = folder / f".{RUN}.{os.getpid()}"
    with written.open("w", encoding="utf-8") as stream:
        json.dump(header, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    try:
        os.link(written, folder / RUN)  # several processes may start; one is the first
        sync_folder(folder)
    except FileExistsError:
        pass
    finally:
        written.unlink()
    known = read_header(folder)
    if known["config_hash"] != header["config_hash"]:
        differing = differing_keys(known["config"], header["config"])
        raise EvaluationError(
            f"{folder}: holds a run with another {', '.join(differing)}; choose another run.dir"
        )
    return known


def differing_keys(first: dict[str, Any], second: dict[str, Any], path: str = "") -> list[str]:
    """Return dotted keys whose values are not the same."""
    keys = []
    for key in sorted({*first, *second}):
        here, a, b = f"{path}{key}", first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differing_keys(a, b, f"{here}.")
        elif a != b:
            keys.append(here)
    return keys


def read_header(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json` in a folder.

    Raises:
        EvaluationError: The file is absent, damaged, or from another program.
    """
    try:
        content = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvaluationError(f"{folder}: no {RUN}; give the folder of a dms-eval run") from None
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{folder / RUN}: not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{folder / RUN}: not valid JSON ({error})") from None
    header: dict[str, Any] = content if isinstance(content, dict) else {}
    if not isinstance(header.get("config"), dict) or not header.get("config_hash"):
        raise EvaluationError(f"{folder / RUN}: not of a dms-eval run; leave the folder out")
    return header


def read_chains(folder: Path) -> list[Row]:
    """Return all chains of a run, each once, by document and number; damaged ends are left out.

    Raises:
        EvaluationError: A file is damaged elsewhere than at its end.
    """
    chains: dict[tuple[str, int], Row] = {}
    for path in sorted((folder / CHAINS).glob("*.jsonl")):
        for row in _whole_documents(path)[0]:
            chains.setdefault((row["document"], row["chain"]), row)
    return [chains[key] for key in sorted(chains)]


def _whole_documents(path: Path) -> tuple[list[Row], int]:
    """Return rows of documents that were written whole, and their size in bytes."""
    data = path.read_bytes()
    rows: list[Row] = []
    pending: list[Row] = []
    good = position = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        position += len(line)
        row = _row(line)
        if row is None:
            if position < len(data):
                raise EvaluationError(f"{path}:{number}: damaged; remove the line and resume")
            break
        pending.append(row)
        if len(pending) == row["chains"]:
            rows += pending
            pending, good = [], position
    return rows, good


def _row(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    needed = {"document", "chain", "chains"}
    return value if isinstance(value, dict) and needed <= value.keys() else None


class ChainWriter:
    """Writer of the chains of documents to the file of one process; use it as a context manager.

    Args:
        folder: Folder of the run.
        shard: Number of this process.
        shards: Number of shards.
        job: SLURM job of this process (`locks.Holder.job`).
    """

    def __init__(self, folder: Path, shard: int, shards: int, job: str = "") -> None:
        self._job = job
        self._path = folder / CHAINS / f"{shard:05d}-of-{shards:05d}.jsonl"
        self._stream: IO[bytes] | None = None
        self._open = ExitStack()  # the file and its lock

    def __enter__(self) -> ChainWriter:
        """Take the file and remove a damaged end.

        Raises:
            LockedError: Another process writes it.
        """
        lock = self._path.with_suffix(".lock")
        with ExitStack() as stack:
            stack.enter_context(locks.held(lock, str(self._path), self._job))
            stream = stack.enter_context(self._path.open("ab"))
            stream.truncate(_whole_documents(self._path)[1])
            sync_folder(self._path.parent)
            self._stream, self._open = stream, stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file and release it."""
        self._open.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Append all chains of a document; they are on the disk when this returns."""
        assert self._stream is not None
        self._stream.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        self._stream.flush()
        os.fsync(self._stream.fileno())


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Replace the summary of a run at once."""
    written = folder / f".{SUMMARY}.{os.getpid()}"
    written.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    written.replace(folder / SUMMARY)


def find_runs(paths: Iterable[Path]) -> Iterator[Path]:
    """Return the folders of runs at or below the given paths.

    Raises:
        EvaluationError: No run lies at or below a path.
    """
    for path in paths:
        folders = sorted({file.parent for file in path.rglob(RUN)})
        if not folders:
            raise EvaluationError(f"{path}: no {RUN} here or below; give folders of dms-eval runs")
        yield from folders
