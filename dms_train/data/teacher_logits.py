"""Files with the stored distributions of a teacher, one for each part of a global batch.

    FOLDER/teacher.json                      what the samples depend on
    FOLDER/train/000000064-1of8.safetensors  samples of data-parallel rank 1 from sample 64 on
    FOLDER/valid/...                         those of the evaluations

A file names its samples, so that runs of any layout can write and read them. It appears under its
name when it is complete.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.data.errors import DataError
from dms_train.method.top_logits import TopLogits

_SUFFIX = ".safetensors"
_UNREADABLE = (OSError, SafetensorError)


def write_part(folder: Path, name: str, batches: Sequence[Batch], stored: list[TopLogits]) -> None:
    """Write the distributions of micro-batches as one file.

    Args:
        folder: Folder of the split.
        name: Name of the file without its ending.
        batches: The micro-batches.
        stored: Their distributions, [b, s, k] and [b, s], on the CPU.

    Raises:
        DataError: The file cannot be written.
    """
    log_probs, ids, log_tails = map(torch.cat, zip(*stored, strict=True))
    tensors = {
        "samples": torch.cat([batch.samples for batch in batches]),
        "checksums": _checksums(torch.cat([batch.tokens for batch in batches])),
        "log_probs": log_probs.half().contiguous(),
        "ids": ids.contiguous(),
        "log_tails": log_tails.contiguous(),
    }
    path = folder / f"{name}{_SUFFIX}"
    partial = path.with_name(f"{path.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(save(tensors))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be written ({reason}); choose another run.dir") from None


def stored_samples(folder: Path) -> dict[int, tuple[Path, int]]:
    """Return the file and the row of every sample of a split.

    Raises:
        DataError: A file is damaged.
    """
    rows: dict[int, tuple[Path, int]] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with safe_open(path, "pt") as file:
                numbers = file.get_tensor("samples").tolist()
        except _UNREADABLE as error:
            raise _damaged(path, error) from None
        rows |= {number: (path, row) for row, number in enumerate(numbers)}
    return rows


class StoredTeacher:
    """Reader of the distributions of one split.

    Args:
        folder: Folder of the split.
        samples: Number of samples that must be there.

    Raises:
        DataError: A sample is missing, or a file is damaged.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self._folder, self._rows = folder, stored_samples(folder)
        missing = [number for number in range(samples) if number not in self._rows]
        if missing:
            raise DataError(
                f"{folder}: {len(missing)} of {samples} samples are missing, the first is "
                f"{missing[0]}; run the stage teacher_logits to its end"
            )

    def read(self, numbers: Sequence[int], tokens: Tensor) -> TopLogits:
        """Return the distributions of samples; see `batches.Teacher`."""
        checksums = _checksums(tokens).tolist()
        rows = [self._row(*each) for each in zip(numbers, checksums, strict=True)]
        return TopLogits(*map(torch.cat, zip(*rows, strict=True)))

    def _row(self, number: int, checksum: int) -> TopLogits:
        path, row = self._rows[number]
        try:
            with safe_open(path, "pt") as file:
                found = int(file.get_slice("checksums")[row : row + 1])
                names = ("log_probs", "ids", "log_tails")
                top = TopLogits(*(file.get_slice(name)[row : row + 1] for name in names))
        except _UNREADABLE as error:
            raise _damaged(path, error) from None
        if found != checksum:
            raise DataError(
                f"{self._folder}: sample {number} has other tokens in this run; store the "
                "distributions of this data with the stage teacher_logits"
            )
        return top


def _checksums(tokens: Tensor) -> Tensor:
    """Return a checksum of each row of tokens [b, s]: int64 [b]."""
    return torch.tensor([zlib.crc32(row.int().numpy().tobytes()) for row in tokens])


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read ({error}); delete it and run teacher_logits again")
