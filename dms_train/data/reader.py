"""Documents of a shard one by one, with their loss masks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dms_train.data.index_file import bin_path, read_index
from dms_train.data.manifest import check_shard, mask_prefix, read_manifest


class MaskedDocument(NamedTuple):
    """One document.

    Attributes:
        tokens: int32 [tokens].
        mask: uint8 [tokens], 1 where the token counts in the loss.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]


class ShardReader:
    """Numbered documents of one shard, read from the mapped files."""

    def __init__(self, prefix: str | Path) -> None:
        """Check the shard against its manifest and map it.

        Raises:
            DataError: A file is missing, damaged or not what the manifest describes.
        """
        self.manifest = read_manifest(prefix)
        check_shard(prefix, self.manifest)
        index = read_index(prefix)
        self.lengths: npt.NDArray[np.int64] = index.lengths.astype(np.int64)
        self._ends = np.cumsum(self.lengths)
        self._tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
        self._mask = None
        if self.manifest.loss_mask is not None:
            self._mask = np.memmap(bin_path(mask_prefix(prefix)), dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def __getitem__(self, number: int) -> MaskedDocument:
        """Return a copy of one document; without mask files every token counts."""
        end = int(self._ends[number])
        part = slice(end - int(self.lengths[number]), end)
        tokens = np.array(self._tokens[part], dtype=np.int32)
        if self._mask is None:
            return MaskedDocument(tokens, np.ones(len(tokens), dtype=np.uint8))
        return MaskedDocument(tokens, np.array(self._mask[part]))
