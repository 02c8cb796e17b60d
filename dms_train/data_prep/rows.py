"""Readers of parquet, JSON, CSV and text files and hub data sets that can start at any row.

`datasets` reads only the hub here. For local files it would guess types (`007` becomes 7.0, `NA`
becomes None, dates become objects), and its errors name neither file nor line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dms_train.data.errors import DataError
from dms_train.data.manifest import Source, file_sha256
from dms_train.data_prep.documents import (
    EVERY_LINE,
    TEXT_TYPES,
    InputRule,
    files_below,
    read_documents,
)
from dms_train.hf.errors import HFError
from dms_train.hf.row_files import csv_rows, json_array, json_line, numbered_lines

_ROWS_PER_BATCH = 64
_FILE_TYPES = (".parquet", ".jsonl", ".json", ".csv")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Row(NamedTuple):
    """One row.

    Attributes:
        number: Number of the row over all inputs, from 0.
        source: Number of its input.
        where: File and row, for messages.
        values: Values by column.
    """

    number: int
    source: int
    where: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th row, from row `index` on."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Return whether a row belongs to the shard."""
        return number % self.count == self.index

    def size(self, rows: int) -> int:
        """Return how many of the first `rows` rows belong to the shard."""
        return len(range(self.index, rows, self.count))


class Rows(Protocol):
    """Source of rows.

    Attributes:
        sources: Name and hash of every input; `rows` is 0.
        total: Number of rows of all inputs; None if unknown before reading.
    """

    sources: tuple[Source, ...]
    total: int | None

    def read(self, first: int, shard: Shard) -> Iterator[Row]:
        """Yield the rows of a shard with numbers from `first` on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options that select a part of a hub data set.

    Attributes:
        config: Configuration; None takes the default one.
        split: Split.
        revision: Branch, tag or commit.
        allow_network: Stream from the hub; otherwise the local cache must hold the data set.
    """

    config: str | None = None
    split: str = "train"
    revision: str = "main"
    allow_network: bool = False


class TextRows(NamedTuple):
    """Rule that makes rows of text files; a row has the text in the first column.

    Attributes:
        types: Suffixes of the files.
        read: Function that yields the texts of a file.
    """

    types: tuple[str, ...]
    read: Callable[[Path], Iterator[str]]


def _texts(path: Path, rule: InputRule) -> Iterator[str]:
    return (str(document.content) for document in read_documents(path, rule))


LINES = TextRows((".txt",), partial(_texts, rule=InputRule(text_split=EVERY_LINE)))
"""Each line of a `.txt` file is a row; blank lines are left out."""


def passages(size: int) -> TextRows:
    """Return the rule that cuts text files into passages.

    Args:
        size: Fewest characters of a passage, which ends at the end of a line; the last passage of a
            file may be shorter.
    """
    return TextRows(TEXT_TYPES, partial(_texts, rule=InputRule(passage=size)))


def open_rows(
    inputs: list[str], columns: tuple[str, ...], hub: HubOptions, text: TextRows | None = None
) -> Rows:
    """Return the rows of local files, or of one data set of the hub.

    Args:
        inputs: `.parquet`, `.jsonl`, `.json` and `.csv` files in order, folders of such files, or
            one hub id `owner/name`.
        columns: Columns to read.
        hub: Options for a hub id.
        text: Rule for text files; None accepts none.

    Raises:
        DataError: A file has another type or cannot be read, or the data set is not in the cache.
        OSError: A file is missing.
    """
    types = _types(text)
    if len(inputs) == 1 and _is_hub_id(inputs[0], types):
        return HubRows(inputs[0], columns, hub)
    return FileRows(files_below(map(Path, inputs), types), columns, text)


def _types(text: TextRows | None) -> tuple[str, ...]:
    return _FILE_TYPES if text is None else (*_FILE_TYPES, *text.types)


def _is_hub_id(name: str, types: tuple[str, ...]) -> bool:
    looks = _HUB_ID.fullmatch(name) is not None and Path(name).suffix not in types
    return looks and not Path(name).exists()


class FileRows:
    """Rows of local files; all files are hashed and counted first."""

    def __init__(
        self, paths: list[Path], columns: tuple[str, ...], text: TextRows | None = None
    ) -> None:
        """Hash and count the files; `text` as in `open_rows`."""
        self._paths = paths
        self._columns = columns
        self._text = text
        try:
            counts = [_count(path, text) for path in paths]
        except HFError as error:
            raise DataError(str(error)) from None
        self._starts = [0, *accumulate(counts)]
        self.total: int | None = sum(counts)
        self.sources = tuple(Source(name=p.name, sha256=file_sha256(p), rows=0) for p in paths)

    def read(self, first: int, shard: Shard) -> Iterator[Row]:
        """Yield the rows of a shard with numbers from `first` on.

        Raises:
            DataError: A row is damaged.
        """
        for source, path in enumerate(self._paths):
            start, end = self._starts[source : source + 2]
            if end <= first:
                continue

            def wanted(inner: int, start: int = start) -> bool:
                return start + inner >= first and shard.holds(start + inner)

            try:
                for inner, values in self._numbered(path, wanted):
                    yield Row(start + inner, source, f"{path}: row {inner}", values)
            except HFError as error:
                raise DataError(str(error)) from None

    def _numbered(self, path: Path, wanted: _Wanted) -> _Numbered:
        if self._text is None or path.suffix not in self._text.types:
            return _READERS[path.suffix](path, self._columns, wanted)
        texts = enumerate(self._text.read(path))
        return ((n, {self._columns[0]: text}) for n, text in texts if wanted(n))


_Numbered = Iterator[tuple[int, dict[str, Any]]]
_Wanted = Callable[[int], bool]


def _count(path: Path, text: TextRows | None) -> int:
    types = _types(text)
    if path.suffix not in types:
        raise DataError(f"{path}: unknown file type; give {', '.join(types)} files or a hub id")
    if text is not None and path.suffix in text.types:
        return sum(1 for _ in text.read(path))
    if path.suffix == ".parquet":
        return int(_parquet(path).metadata.num_rows)
    if path.suffix == ".jsonl":
        return sum(1 for _ in numbered_lines(path))
    if path.suffix == ".csv":
        return sum(1 for _ in csv_rows(path))
    return len(json_array(path))


def _parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    path.open("rb").close()  # raises OSError, which is not a damaged file
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a parquet file ({reason}); copy it again") from None


def _read_parquet(path: Path, columns: tuple[str, ...], wanted: _Wanted) -> _Numbered:
    import pyarrow

    file = _parquet(path)
    number = 0
    try:
        present = [name for name in columns if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if not any(wanted(inner) for inner in range(number, number + rows)):
                number += rows
                continue
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=present):
                for values in batch.to_pylist():
                    if wanted(number):
                        yield number, values
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: rows from {number} on cannot be read ({error}); copy it again"
        ) from None


def _read_lines(path: Path, columns: tuple[str, ...], wanted: _Wanted) -> _Numbered:
    for number, (line_number, line) in enumerate(numbered_lines(path)):
        if wanted(number):
            yield number, json_line(path, line_number, line)


def _read_array(path: Path, columns: tuple[str, ...], wanted: _Wanted) -> _Numbered:
    return ((n, values) for n, values in enumerate(json_array(path)) if wanted(n))


def _read_csv(path: Path, columns: tuple[str, ...], wanted: _Wanted) -> _Numbered:
    return ((n, dict(values)) for n, values in enumerate(csv_rows(path)) if wanted(n))


_READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".json": _read_array,
    ".csv": _read_csv,
}


class HubRows:
    """Rows of a data set of the hub, streamed by `datasets`."""

    def __init__(self, name: str, columns: tuple[str, ...], hub: HubOptions) -> None:
        """Find the data set.

        Raises:
            DataError: It is not in the cache, or cannot be reached.
        """
        import datasets

        datasets.disable_progress_bars()
        self._name = name
        self.total: int | None = None
        commit, location = _resolve(name, hub)
        revision = {"revision": commit} if hub.allow_network else {}
        try:
            dataset = datasets.load_dataset(
                location, hub.config, split=hub.split, streaming=True, **revision
            )
            present = [name for name in columns if name in (dataset.column_names or ())]
            # for some formats the column names are unknown before the first row
            self._rows = dataset.select_columns(present) if present else dataset
        except Exception as error:  # each file format and network raises its own class
            reason = " ".join(str(error).split())
            raise DataError(f"{name}: cannot be opened ({reason})") from None
        config = hub.config or "default"
        label = f"{name}:{config}:{hub.split}@{commit}"
        digest = hashlib.sha256(label.encode()).hexdigest()
        self.sources: tuple[Source, ...] = (Source(name=label, sha256=digest, rows=0),)

    def read(self, first: int, shard: Shard) -> Iterator[Row]:
        """Yield the rows of a shard with numbers from `first` on.

        Raises:
            DataError: The hub has become unreachable.
        """
        number = first
        try:
            for values in self._rows.skip(first) if first else self._rows:
                if shard.holds(number):
                    yield Row(number, 0, f"{self._name}: row {number}", values)
                number += 1
        except OSError as error:
            raise DataError(f"{self._name}: row {number} cannot be read ({error})") from None


def _resolve(name: str, hub: HubOptions) -> tuple[str, str]:
    """Return the commit of the data set, and the directory or id to open."""
    import huggingface_hub

    try:
        if hub.allow_network:
            info = huggingface_hub.HfApi().dataset_info(name, revision=hub.revision)
            return str(info.sha), name
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=hub.revision, local_files_only=True
        )
        return Path(folder).name, folder
    except Exception as error:  # offline, no such data set, no permission
        if hub.allow_network:
            reason = " ".join(str(error).split())
            raise DataError(f"{name}: not found on the hub ({reason})") from None
        raise DataError(
            f"{name}: no such file, and no data set of that name in the local hub cache "
            f"(revision {hub.revision}); give files, or stream it with --allow-network"
        ) from None
