"""Tokens of a forward pass: flat for the layers, by sequence for the cache.

Shape letters: t tokens of a pass, b sequences of a micro-batch, n most tokens of one of them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dms_train.inference.devices import sent

Integers: TypeAlias = NDArray[np.int64]


class MicroBatch(NamedTuple):
    """Sequences whose tokens enter the cache together; contiguous in the flat order.

    Attributes:
        rows: Cache rows, int64 [b], all different.
        position: int64 [b, n]; -1 for padding after a sequence.
        tokens: Range of their tokens in the flat order.
        source: int64 [b, n], index among the tokens of the micro-batch; None if there is no
            padding.
        target: int64 [tokens], index in b * n of each token; None if there is no padding.
        lengths: Tokens of each sequence; None if there is no padding.
        begins: Whether the cache is known to be empty for these sequences.
    """

    rows: Tensor
    position: Tensor
    tokens: slice
    source: Tensor | None = None
    target: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    begins: bool = False

    def take(self, flat: Tensor) -> Tensor:
        """Convert [t, ...] to [b, n, ...]; padding repeats a token."""
        own = flat[self.tokens]
        if self.source is None:
            return own.view(*self.position.shape, *own.shape[1:])
        return own[self.source]

    def flatten(self, x: Tensor) -> Tensor:
        """Convert [b, n, ...] to [tokens of the micro-batch, ...], without padding."""
        whole = x.flatten(0, 1)
        return whole if self.target is None else whole[self.target]


class TokenBatch(NamedTuple):
    """Tokens of a pass; they follow the tokens in the cache.

    Attributes:
        tokens: int64 [t].
        position: int64 [t].
        micro_batches: Their sequences, in the order of the tokens.
    """

    tokens: Tensor
    position: Tensor
    micro_batches: list[MicroBatch]

    @classmethod
    def rectangular(cls, tokens: Tensor, position: Tensor, rows: Tensor) -> TokenBatch:
        """Batch sequences of equal length; tokens and position int64 [b, n], rows int64 [b]."""
        micro_batch = MicroBatch(rows, position, slice(0, tokens.numel()))
        return cls(tokens.flatten(), position.flatten(), [micro_batch])

    @classmethod
    def ragged(cls, parts: list[tuple[int, int, list[int]]], device: torch.device) -> TokenBatch:
        """Batch sequences of any length; padding at most doubles the number of tokens.

        Args:
            parts: Row, position of the first token, and tokens of each sequence; shorter sequences
                come first.
            device: Device of the tensors.
        """
        lengths = np.array([len(tokens) for _, _, tokens in parts])
        flat = np.array([token for _, _, tokens in parts for token in tokens])
        first = np.array([first for _, first, _ in parts])
        begins = lengths.cumsum() - lengths
        position = np.arange(len(flat)) + np.repeat(first - begins, lengths)
        rows = np.array([row for row, _, _ in parts])
        micro_batches = []
        for part in _micro_batch_slices(lengths):
            batch = _micro_batch(rows[part], first[part], lengths[part], device)
            start = int(begins[part.start])
            micro_batches.append(batch._replace(tokens=slice(start, start + batch.tokens.stop)))
        return cls(sent(flat, device), sent(position, device), micro_batches)


def _micro_batch_slices(lengths: Integers) -> list[slice]:
    """Divide sequences into micro-batches.

    Single-token sequences form one micro-batch. Longer ones are batched while padding at most
    doubles the number of tokens.

    Args:
        lengths: Tokens of each sequence, ascending, [b].
    """
    single, end = int((lengths == 1).sum()), len(lengths)
    slices = []
    while end > single:
        tokens = lengths[single:end][::-1].cumsum()  # sums over the last one, the last two, ...
        fits = lengths[end - 1] * np.arange(1, len(tokens) + 1) <= 2 * tokens
        begin = end - int(fits.sum())
        slices.append(slice(begin, end))
        end = begin
    return [*([slice(0, single)] if single else []), *slices[::-1]]


def _micro_batch(
    rows: Integers, first: Integers, lengths: Integers, device: torch.device
) -> MicroBatch:
    """Return sequences as the first micro-batch of a pass.

    Args:
        rows: Cache rows, [b].
        first: Positions of the first tokens, [b].
        lengths: Tokens of each sequence, [b].
        device: Device of the tensors.
    """
    n, total = int(lengths.max()), int(lengths.sum())
    index = np.arange(n)
    there = index < lengths[:, None]
    position = np.where(there, first[:, None] + index, -1)
    micro_batch = MicroBatch(
        sent(rows, device), sent(position, device), slice(0, total), begins=not first.any()
    )
    if there.all():
        return micro_batch
    begins = (lengths.cumsum() - lengths)[:, None]
    source = begins + np.minimum(index, lengths[:, None] - 1)
    (target,) = there.ravel().nonzero()
    return micro_batch._replace(
        source=sent(source, device), target=sent(target, device), lengths=tuple(lengths.tolist())
    )
