"""Token ids in NumPy files: `.npy` with one document a row, `.npz` with any lengths."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError
from dms_train.data.manifest import Manifest, Source, file_sha256
from dms_train.data.origins import UNKNOWN_TERMS, Terms
from dms_train.data.writer import ShardWriter
from dms_train.data_prep.encode import load_tokenizer

Ids = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayJob:
    """One shard to make.

    Attributes:
        inputs: `.npy` files, int [documents, tokens] or int [tokens] for one document, and `.npz`
            files with `ids`, int [tokens], and `lengths`, int [documents], or `offsets`, int
            [documents + 1].
        output: Prefix of the files to write.
        tokenizer: Directory of the tokenizer that the ids belong to.
        eod_id: Token that ends every document; None if there is none.
        terms: Source and licence of the text.
        overwrite: Replace an existing shard.
    """

    inputs: tuple[Path, ...]
    output: Path
    tokenizer: Path
    eod_id: int | None = None
    terms: Terms = UNKNOWN_TERMS
    overwrite: bool = False


def write_arrays(job: ArrayJob) -> Manifest:
    """Make one shard.

    Raises:
        DataError: A file is unfit, an id is outside the vocabulary, a document does not end in
            `eod_id`, or the output cannot be written.
    """
    writer = ShardWriter(
        job.output,
        vocab_size=len(load_tokenizer(str(job.tokenizer))),
        eod_id=job.eod_id,
        tokenizer_sha256=file_sha256(job.tokenizer / "tokenizer.json"),
        overwrite=job.overwrite,
    )
    sources = []
    with writer:
        for path in job.inputs:
            count = 0
            for count, document in enumerate(_documents(path), 1):
                if job.eod_id is not None and document[-1] != job.eod_id:
                    raise DataError(
                        f"{path}: document {count} ends in token {document[-1]}, not {job.eod_id}; "
                        "correct --eod-id or leave it out"
                    )
                writer.add(document)
            sources.append(Source(name=path.name, sha256=file_sha256(path), rows=count))
        return writer.finish(tuple(sources), origins=job.terms)


def _documents(path: Path) -> Iterator[npt.NDArray[np.int32]]:
    ids, bounds = _read(path)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield ids[start:end].astype(np.int32)


def _read(path: Path) -> tuple[Ids, Ids]:
    """Return the ids of all documents, and the start of each with the total as last entry."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = None if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a NumPy file of numbers ({error})") from None
    if arrays is None:
        rows = loaded[None] if loaded.ndim == 1 else loaded
        if rows.ndim != 2:
            raise DataError(f"{path}: {loaded.ndim} dimensions; give [documents, tokens]")
        ids, bounds = rows.reshape(-1), np.arange(len(rows) + 1) * rows.shape[1]
    else:
        ids, bounds = _parts(path, arrays)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise DataError(f"{path}: ids are {ids.dtype} of {ids.ndim} dimensions; give whole numbers")
    if len(ids) and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise DataError(f"{path}: ids from {ids.min()} to {ids.max()}; give ids of a vocabulary")
    if not (np.diff(bounds) > 0).all() or bounds[0] != 0 or bounds[-1] != len(ids):
        raise DataError(
            f"{path}: documents must have at least one token and cover all {len(ids)} ids; "
            "correct lengths or offsets"
        )
    return ids, bounds


def _parts(path: Path, arrays: dict[str, Ids]) -> tuple[Ids, Ids]:
    names = set(arrays)
    if names not in ({"ids", "lengths"}, {"ids", "offsets"}):
        present = ", ".join(sorted(names)) or "nothing"
        raise DataError(f"{path}: holds {present}; give ids with lengths or offsets")
    bounds = arrays["lengths" if "lengths" in arrays else "offsets"]
    if bounds.dtype.kind not in "iu" or bounds.ndim != 1 or not len(bounds):
        raise DataError(f"{path}: lengths or offsets must be a list of whole numbers")
    bounds = bounds.astype(np.int64)
    if "lengths" in arrays:
        bounds = np.concatenate([[0], bounds.cumsum()])
    return arrays["ids"], bounds
