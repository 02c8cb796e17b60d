"""Writes one shard of token files; an interrupted write leaves no shard."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError
from dms_train.data.index_file import bin_path, idx_path
from dms_train.data.manifest import (
    Manifest,
    Source,
    file_sha256,
    manifest_path,
    write_manifest,
)


class ShardWriter:
    """Collects documents under temporary names; `finish` renames them, the manifest last.

    Use it as a context manager: leaving it without `finish` removes the temporary files.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        vocab_size: int,
        eod_id: int | None,
        tokenizer_sha256: str,
        overwrite: bool = False,
    ) -> None:
        """Open the temporary files.

        Raises:
            DataError: The shard exists and `overwrite` is not set, or a file cannot be written.
        """
        # not at the top of the file: it imports torch, which `dms-data --help` does not need
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        if manifest_path(prefix).exists() and not overwrite:
            raise DataError(f"{prefix}: exists already; pass --overwrite to replace it")
        self._prefix = prefix
        self._partial = prefix.with_name(prefix.name + ".partial")
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._tokenizer_sha256 = tokenizer_sha256
        self._dtype = DType.optimal_dtype(vocab_size)
        self._documents = self._tokens = 0
        self._max_token_id = -1
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(str(bin_path(self._partial)), self._dtype)
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> ShardWriter:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what `finish` has not renamed."""
        # Closing flushes, which fails again on a full disk.
        with suppress(OSError):
            self._builder.data_file.close()
        for path in (bin_path(self._partial), idx_path(self._partial)):
            path.unlink(missing_ok=True)

    def add(self, document: npt.NDArray[np.int32]) -> None:
        """Append one document, int [tokens].

        Raises:
            DataError: A token id lies outside the vocabulary or the disk is full.
        """
        largest = int(document.max())
        if document.min() < 0 or largest >= self._vocab_size:
            raise DataError(f"{self._prefix}: token id {largest} is outside the vocabulary")
        try:
            self._builder.add_document(document, [len(document)])
        except OSError as error:
            raise self._failed(error) from None
        self._documents += 1
        self._tokens += len(document)
        self._max_token_id = max(self._max_token_id, largest)

    def finish(self, sources: tuple[Source, ...]) -> Manifest:
        """Put the files in place.

        Raises:
            DataError: There are no documents, or a file cannot be written.
        """
        if not self._documents:
            names = ", ".join(source.name for source in sources)
            raise DataError(f"{names}: no documents; nothing was written")
        try:
            self._builder.finalize(str(idx_path(self._partial)))
            for path in (bin_path(self._partial), idx_path(self._partial)):
                _flush(path)
            manifest = self._manifest(sources)
            manifest_path(self._prefix).unlink(missing_ok=True)
            bin_path(self._partial).replace(bin_path(self._prefix))
            idx_path(self._partial).replace(idx_path(self._prefix))
            write_manifest(self._prefix, manifest)
        except OSError as error:
            raise self._failed(error) from None
        return manifest

    def _manifest(self, sources: tuple[Source, ...]) -> Manifest:
        bin_file, idx_file = bin_path(self._partial), idx_path(self._partial)
        return Manifest(
            tokenizer_sha256=self._tokenizer_sha256,
            vocab_size=self._vocab_size,
            eod_id=self._eod_id,
            max_token_id=self._max_token_id,
            documents=self._documents,
            tokens=self._tokens,
            bin_bytes=bin_file.stat().st_size,
            idx_bytes=idx_file.stat().st_size,
            idx_sha256=file_sha256(idx_file),
            bin_sha256=file_sha256(bin_file),
            dtype=self._dtype.__name__,
            sources=sources,
            created_with=_versions(),
        )

    def _failed(self, error: OSError) -> DataError:
        reason = error.strerror or str(error)
        return DataError(f"{self._prefix}: cannot be written ({reason}); choose another place")


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _versions() -> dict[str, str]:
    found = {}
    for name in ("megatron-core", "numpy", "tokenizers", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
