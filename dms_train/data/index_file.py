"""Reads and checks Megatron's `PREFIX.idx` before Megatron maps it.

Megatron's own reader asserts on a bad header and maps whatever lengths the header claims. The file
is a 34-byte header (magic, version, dtype code, counts), then int32 lengths and int64 byte offsets
per sequence, then int64 document boundaries.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_BYTES_PER_SEQUENCE = 4 + 8
_BYTES_PER_BOUNDARY = 8
_DTYPES = {4: "int32", 8: "uint16"}  # megatron-core's codes of those that are written here


class ShardIndex(NamedTuple):
    """What the index states about the tokens.

    Attributes:
        dtype: Name of the numpy type of a token, `uint16` or `int32`.
        lengths: int32 [documents], tokens of each document, mapped from the file.
    """

    dtype: str
    lengths: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def bin_bytes(self) -> int:
        """Size in bytes that the `.bin` file must have."""
        return self.tokens * np.dtype(self.dtype).itemsize


def bin_path(prefix: str | Path) -> Path:
    """The file with the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file with the document lengths."""
    return Path(f"{prefix}.idx")


def read_index(prefix: str | Path) -> ShardIndex:
    """Read and check the index of one shard.

    Raises:
        DataError: The header is not Megatron's, or the file is shorter or longer than the header
            says, or a document consists of several sequences.
    """
    path = idx_path(prefix)
    dtype, sequences, boundaries = _read_header(path)
    want = _HEADER.size + sequences * _BYTES_PER_SEQUENCE + boundaries * _BYTES_PER_BOUNDARY
    if path.stat().st_size != want:
        raise DataError(
            f"{path}: {path.stat().st_size} bytes, its header says {want}; tokenise the data again"
        )
    if boundaries != sequences + 1:
        raise DataError(
            f"{path}: {sequences} sequences in {boundaries - 1} documents; "
            "store every document as one sequence (dms-data tokenize does)"
        )
    shape = (sequences,)
    lengths: Any = np.zeros(shape, np.int32)
    if sequences:
        lengths = np.memmap(path, dtype=np.int32, mode="r", offset=_HEADER.size, shape=shape)
    return ShardIndex(dtype, lengths)


def _read_header(path: Path) -> tuple[str, int, int]:
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size or head[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path}: not a Megatron index file; tokenise the data again")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{path}: index version {version}, token type code {code}; "
            "only version 1 with uint16 or int32 tokens is supported; tokenise the data again"
        )
    return _DTYPES[code], sequences, boundaries
