"""Sizes of the requests in the rows of a paged cache, on the device.

Shape letters: b sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.devices import sent
from dms_train.inference.policies.base import RequestSizes, Sequences


class RowRequests:
    """Request sizes of every row.

    Args:
        layers: Attention layers.
        rows: Sequences held at the same time.
        device: Device of the cache.
    """

    def __init__(self, layers: int, rows: int, device: torch.device) -> None:
        self._layers = layers
        # row -1 is for unused batch slots of a step
        self._sizes = torch.zeros(rows + 1, len(RequestSizes._fields), dtype=torch.int64)
        self._sizes = self._sizes.to(device)

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row."""
        self._sizes[row] = sent(list(sizes), self._sizes.device)

    def sequences(
        self, rows: Tensor, start: Tensor, end: Tensor, query: Tensor | None = None
    ) -> Sequences:
        """Return the sequences of a pass over rows [b], -1 for none; the host does not wait.

        Args:
            rows: Integers [b].
            start: int64 [b], tokens before the pass.
            end: int64 [b], tokens after it.
            query: As in `Sequences`.
        """
        prompt, limit, seed = self._sizes[rows.long()].unbind(1)
        return Sequences(self._layers, start, end, prompt, limit, seed, {}, query)
