"""Journal of an unfinished preparation, so that a killed command can be continued.

The folder holds files that only grow, and `state.json` with their valid lengths. A restart cuts the
files to these lengths and continues with the next row. The result therefore does not depend on
interruptions.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from dms_train.data.errors import DataError
from dms_train.data_prep.conversations import MaskedTokens

_TOKENS, _MASK, _LENGTHS, VERDICTS = "tokens.int32", "mask.uint8", "lengths.int32", "verdicts.jsonl"
_FILES = (_TOKENS, _MASK, _LENGTHS, VERDICTS)
_STATE = "state.json"


class Journal:
    """Folder of one preparation; use it as a context manager.

    Attributes:
        next_row: Number of the first row that is not in the folder.
        counts: Counts so far.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        rows_per_commit: int,
        overwrite: bool = False,
    ) -> None:
        """Open the folder, or make it.

        Args:
            folder: Folder of the files.
            settings: All settings that affect the documents, as JSON returns them.
            rows_per_commit: Rows after which `add` commits.
            overwrite: Start over if the folder holds work with other settings.

        Raises:
            DataError: Another process works in the folder, or it was begun with other settings.
        """
        self._folder = folder
        self._settings = settings
        self.next_row = 0
        self.counts: Counter[str] = Counter()
        self._open_rows = 0
        self._rows_per_commit = rows_per_commit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be made ({error.strerror})") from None
        self._lock = (folder / "lock").open("w")
        self._take_lock()
        sizes = self._restore(overwrite)
        self._streams: dict[str, BinaryIO] = {}
        for name in _FILES:
            stream = self._streams[name] = (folder / name).open("ab")
            size = sizes.get(name, 0)
            if stream.tell() < size:
                raise DataError(
                    f"{folder / name}: {stream.tell()} bytes, {_STATE} says {size}; "
                    "remove the folder to begin again"
                )
            stream.truncate(size)

    def __enter__(self) -> Journal:
        """Return the journal itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; rows added since the last commit are lost.

        A folder without committed rows is removed.
        """
        for stream in self._streams.values():
            with suppress(OSError):
                stream.close()
        if not (self._folder / _STATE).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self._folder}: another process works on this output; wait until it ends"
            ) from None

    def _restore(self, overwrite: bool) -> dict[str, int]:
        """Return the valid sizes of a folder that was begun with the same settings."""
        try:
            state = json.loads((self._folder / _STATE).read_text("utf-8"))
        except FileNotFoundError:
            return {}
        if state["settings"] != self._settings:
            if overwrite:
                return {}
            names = self._settings.keys() | state["settings"].keys()
            differing = sorted(
                name for name in names if self._settings.get(name) != state["settings"].get(name)
            )
            raise DataError(
                f"{self._folder}: was begun with another {', '.join(differing)}; "
                "pass --overwrite to begin again"
            )
        self.next_row = int(state["next_row"])
        self.counts = Counter(state["counts"])
        return {name: int(size) for name, size in state["sizes"].items()}

    def add(self, number: int, record: dict[str, Any], documents: list[MaskedTokens]) -> None:
        """Append one row; rows come in the order of their numbers."""
        for tokens, mask in documents:
            self._streams[_TOKENS].write(tokens.astype(np.int32).tobytes())
            self._streams[_MASK].write(mask.tobytes())
            self._streams[_LENGTHS].write(np.int32(len(tokens)).tobytes())
        line = json.dumps(record, ensure_ascii=False)
        self._streams[VERDICTS].write(line.encode("utf-8", "surrogatepass") + b"\n")
        self.next_row = number + 1
        self._open_rows += 1
        if self._open_rows >= self._rows_per_commit:
            self.commit()

    def commit(self) -> None:
        """Write all added rows to disk, so that they survive a kill or a loss of power."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        state = {
            "settings": self._settings,
            "next_row": self.next_row,
            "counts": dict(self.counts),
            "sizes": {name: stream.tell() for name, stream in self._streams.items()},
        }
        partial = self._folder / f"{_STATE}.partial"
        with partial.open("w", encoding="utf-8") as written:
            json.dump(state, written)
            written.flush()
            os.fsync(written.fileno())
        partial.replace(self._folder / _STATE)
        self._open_rows = 0

    def documents(self) -> Iterator[MaskedTokens]:
        """Yield all documents in the order in which they were added."""
        folder = self._folder
        with (
            (folder / _TOKENS).open("rb") as tokens,
            (folder / _MASK).open("rb") as masks,
            (folder / _LENGTHS).open("rb") as lengths,
        ):
            while size := lengths.read(4):
                count = int(np.frombuffer(size, np.int32)[0])
                ids = np.frombuffer(tokens.read(4 * count), np.int32)
                yield MaskedTokens(ids, np.frombuffer(masks.read(count), np.uint8))

    def copy_verdicts(self, path: Path) -> None:
        """Copy the verdicts of all rows to a file, replacing it atomically."""
        partial = path.with_name(path.name + ".partial")
        try:
            shutil.copyfile(self._folder / VERDICTS, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder after the shard is complete."""
        shutil.rmtree(self._folder)
