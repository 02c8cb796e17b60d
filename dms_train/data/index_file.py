"""Megatron's `PREFIX.idx`: writing it, and checking it before Megatron maps it.

Megatron's own reader asserts on a bad header and maps any lengths that the header claims, and its
writer imports torch. The file is a 34-byte header (magic, version, dtype code, counts), then int32
lengths and int64 byte offsets per sequence, then int64 document boundaries.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError, refuse_pointer

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_BYTES_PER_SEQUENCE = 4 + 8
_BYTES_PER_BOUNDARY = 8
_DTYPES = {4: "int32", 8: "uint16"}  # megatron-core's codes of token dtypes
_CODES = {"uint8": 1} | {name: code for code, name in _DTYPES.items()}  # a mask is uint8
_UINT16_VOCABULARY = 65500  # megatron-core stores smaller vocabularies as uint16


class ShardIndex(NamedTuple):
    """Contents of an index file.

    Attributes:
        dtype: Name of the numpy type of a token, `uint16` or `int32`.
        lengths: int32 [documents], tokens of each document, mapped from the file.
    """

    dtype: str
    lengths: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def bin_bytes(self) -> int:
        """Size in bytes that the `.bin` file must have."""
        return self.tokens * np.dtype(self.dtype).itemsize


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the file with the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the file with the document lengths."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which megatron-core stores the tokens of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)


def write_index(path: Path, dtype: np.dtype[Any], lengths: Sequence[int]) -> None:
    """Write the index of documents that are one sequence each.

    Args:
        path: The file.
        dtype: Dtype of a token, from `token_dtype`, or uint8 for a mask.
        lengths: Tokens of each document.
    """
    count = len(lengths)
    ends = np.cumsum(np.array(lengths, np.int64)) * dtype.itemsize
    with path.open("wb") as stream:
        stream.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype.name], count, count + 1))
        stream.write(np.array(lengths, np.int32).tobytes())
        stream.write((ends - np.array(lengths, np.int64) * dtype.itemsize).tobytes())
        stream.write(np.arange(count + 1, dtype=np.int64).tobytes())


def read_index(prefix: str | Path) -> ShardIndex:
    """Read and check the index of one shard.

    Raises:
        DataError: The header is not Megatron's, the file size contradicts the header, or a document
            consists of several sequences.
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
        refuse_pointer(path)
        raise DataError(f"{path}: not a Megatron index file; tokenise the data again")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{path}: index version {version}, token type code {code}; "
            "only version 1 with uint16 or int32 tokens is supported; tokenise the data again"
        )
    return _DTYPES[code], sequences, boundaries
