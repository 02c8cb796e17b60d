"""Writer of one shard of token files; an interrupted write leaves no shard."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError
from dms_train.data.index_file import bin_path, idx_path, token_dtype, write_index
from dms_train.data.manifest import (
    LossMask,
    Manifest,
    Source,
    file_sha256,
    manifest_path,
    mask_prefix,
    write_manifest,
)
from dms_train.data.origins import UNKNOWN_TERMS, Origin, Terms, counted

_PACKAGES = ("megatron-core", "numpy", "tokenizers", "transformers")


def refuse_existing(prefix: Path, overwrite: bool) -> None:
    """Refuse a prefix that has a complete shard, unless `overwrite` is set.

    Raises:
        DataError: The shard exists and `overwrite` is not set.
    """
    if manifest_path(prefix).exists() and not overwrite:
        raise DataError(f"{prefix}: exists already; pass --overwrite to replace it")


class _DocumentFile:
    """Writer of one pair of files: values in `PREFIX.bin`, document lengths in `PREFIX.idx`."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix, self._dtype = prefix, dtype
        self._lengths: list[int] = []
        self._values = bin_path(prefix).open("wb")

    def add(self, document: npt.NDArray[Any]) -> None:
        self._values.write(document.astype(self._dtype).tobytes())
        self._lengths.append(len(document))

    def finish(self) -> None:
        self.close()
        write_index(idx_path(self._prefix), self._dtype, self._lengths)

    def close(self) -> None:
        self._values.close()


class ShardWriter:
    """Writer of documents under temporary names; `finish` renames them, the manifest last.

    Use it as a context manager: leaving it without `finish` removes the temporary files.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        vocab_size: int,
        eod_id: int | None,
        tokenizer_sha256: str,
        loss_mask: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Open the temporary files.

        Args:
            prefix: Prefix of the shard's files.
            vocab_size: Token ids must be below this number.
            eod_id: Token that ends every document; None when there is none.
            tokenizer_sha256: Hash of `tokenizer.json`.
            loss_mask: Write mask files too; `add` then needs a mask.
            overwrite: Replace an existing shard.

        Raises:
            DataError: The shard exists and `overwrite` is not set, or a file cannot be written.
        """
        refuse_existing(prefix, overwrite)
        self._prefix = prefix
        self._partial = prefix.with_name(prefix.name + ".partial")
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._tokenizer_sha256 = tokenizer_sha256
        self._dtype = token_dtype(vocab_size)
        self._documents = self._tokens = 0
        self._loss_tokens = 0
        self._max_token_id = -1
        self._mask_file: _DocumentFile | None = None
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._token_file = _DocumentFile(self._partial, self._dtype)
            if loss_mask:
                self._mask_file = _DocumentFile(mask_prefix(self._partial), np.dtype(np.uint8))
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
        """Remove the temporary files that `finish` has not renamed."""
        # Closing flushes, which fails again on a full disk.
        for file in self._files():
            with suppress(OSError):
                file.close()
        for partial, _ in self._pairs():
            partial.unlink(missing_ok=True)

    def add(
        self, document: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Append one document.

        Args:
            document: int [tokens].
            mask: uint8 [tokens], 1 where the token counts in the loss; needs `loss_mask`.

        Raises:
            DataError: The arrays do not form a document, a token id lies outside the vocabulary, or
                the disk is full.
        """
        for array in (document, mask):
            if not (array is None or (isinstance(array, np.ndarray) and array.dtype.kind in "iu")):
                raise DataError(f"{self._prefix}: a document is an array of whole numbers")
        if not len(document) or (mask is not None and len(mask) != len(document)):
            raise DataError(f"{self._prefix}: a document has a token, and a mask as many values")
        largest = int(document.max())
        if document.min() < 0 or largest >= self._vocab_size:
            raise DataError(f"{self._prefix}: token id {largest} is outside the vocabulary")
        try:
            self._token_file.add(document)
            if self._mask_file is not None:
                assert mask is not None
                self._mask_file.add(mask)
                self._loss_tokens += int(mask.sum(dtype=np.int64))
        except OSError as error:
            raise self._failed(error) from None
        self._documents += 1
        self._tokens += len(document)
        self._max_token_id = max(self._max_token_id, largest)

    def finish(
        self,
        sources: tuple[Source, ...],
        preparation: dict[str, Any] | None = None,
        origins: Terms | tuple[Origin, ...] = UNKNOWN_TERMS,
    ) -> Manifest:
        """Rename the files to their final names.

        Args:
            sources: Input files in order.
            preparation: Settings to store in the manifest as `preparation`.
            origins: Terms of the whole shard, or the origins of a blend.

        Raises:
            DataError: There are no documents, or a file cannot be written.
        """
        if not self._documents:
            names = ", ".join(source.name for source in sources)
            raise DataError(f"{names}: no documents; nothing was written")
        try:
            for file in self._files():
                file.finish()
            for partial, _ in self._pairs():
                _flush(partial)
            manifest = self._manifest(sources, preparation)
            if isinstance(origins, Terms):
                origins = (counted(origins, manifest.bin_sha256, manifest.tokens),)
            manifest = replace(manifest, origins=origins)
            manifest_path(self._prefix).unlink(missing_ok=True)
            for path in (bin_path, idx_path):  # left by an earlier shard that had a mask
                path(mask_prefix(self._prefix)).unlink(missing_ok=True)
            for partial, final in self._pairs():
                partial.replace(final)
            write_manifest(self._prefix, manifest)
        except OSError as error:
            raise self._failed(error) from None
        return manifest

    def _files(self) -> list[_DocumentFile]:
        return [file for file in (self._token_file, self._mask_file) if file is not None]

    def _pairs(self) -> list[tuple[Path, Path]]:
        """Return temporary and final path of every file except the manifest."""
        prefixes = [(self._partial, self._prefix)]
        if self._mask_file is not None:
            prefixes.append((mask_prefix(self._partial), mask_prefix(self._prefix)))
        return [
            (path(partial), path(final))
            for partial, final in prefixes
            for path in (bin_path, idx_path)
        ]

    def _mask(self) -> LossMask | None:
        if self._mask_file is None:
            return None
        partial = mask_prefix(self._partial)
        return LossMask(
            loss_tokens=self._loss_tokens,
            bin_sha256=file_sha256(bin_path(partial)),
            idx_sha256=file_sha256(idx_path(partial)),
        )

    def _manifest(
        self, sources: tuple[Source, ...], preparation: dict[str, Any] | None
    ) -> Manifest:
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
            dtype=self._dtype.name,
            sources=sources,
            created_with=package_versions(_PACKAGES),
            loss_mask=self._mask(),
            preparation=preparation,
        )

    def _failed(self, error: OSError) -> DataError:
        reason = error.strerror or str(error)
        return DataError(f"{self._prefix}: cannot be written ({reason}); choose another place")


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages of these names that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
