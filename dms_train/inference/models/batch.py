"""The tokens of a forward pass: flat for the layers, by sequence for the cache.

Shape letters: t tokens of a pass, b sequences of a group, n their most tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dms_train.inference.devices import sent

Integers: TypeAlias = NDArray[np.int64]


class Group(NamedTuple):
    """Sequences whose tokens enter the cache together; neighbours in the flat order.

    Attributes:
        rows: Their cache rows, int64 [b], all different.
        position: int64 [b, n]; -1 for padding behind a sequence.
        tokens: Where their tokens lie in the flat order.
        source: int64 [b, n], which of these tokens goes where; None if there is no padding.
        target: int64 [tokens], place in b * n of each of them; None likewise.
        lengths: Tokens of each sequence; None if there is no padding.
        begins: Whether the cache is known to hold nothing of these sequences yet.
    """

    rows: Tensor
    position: Tensor
    tokens: slice
    source: Tensor | None = None
    target: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    begins: bool = False

    def take(self, flat: Tensor) -> Tensor:
        """[t, ...] to [b, n, ...]; padding repeats a token."""
        own = flat[self.tokens]
        if self.source is None:
            return own.view(*self.position.shape, *own.shape[1:])
        return own[self.source]

    def flatten(self, x: Tensor) -> Tensor:
        """[b, n, ...] to [tokens of the group, ...], without padding."""
        whole = x.flatten(0, 1)
        return whole if self.target is None else whole[self.target]


class TokenBatch(NamedTuple):
    """The tokens of a pass, which follow what the cache holds.

    Attributes:
        tokens: int64 [t].
        position: int64 [t].
        groups: Their sequences, in the order of the tokens.
    """

    tokens: Tensor
    position: Tensor
    groups: list[Group]

    @classmethod
    def rectangular(cls, tokens: Tensor, position: Tensor, rows: Tensor) -> TokenBatch:
        """Sequences of the same number of tokens. Both int64 [b, n]; rows int64 [b]."""
        group = Group(rows, position, slice(0, tokens.numel()))
        return cls(tokens.flatten(), position.flatten(), [group])

    @classmethod
    def ragged(cls, parts: list[tuple[int, int, list[int]]], device: torch.device) -> TokenBatch:
        """Sequences of any number of tokens, in groups that padding does not more than double.

        Args:
            parts: Of each sequence, its row, the position of its first token, and its tokens; those
                of fewer tokens come first.
            device: Where the tensors go.
        """
        lengths = np.array([len(tokens) for _, _, tokens in parts])
        flat = np.array([token for _, _, tokens in parts for token in tokens])
        first = np.array([first for _, first, _ in parts])
        begins = lengths.cumsum() - lengths
        position = np.arange(len(flat)) + np.repeat(first - begins, lengths)
        rows = np.array([row for row, _, _ in parts])
        groups = []
        for part in _parts(lengths):
            group = _group(rows[part], first[part], lengths[part], device)
            start = int(begins[part.start])
            groups.append(group._replace(tokens=slice(start, start + group.tokens.stop)))
        return cls(sent(flat, device), sent(position, device), groups)


def _parts(lengths: Integers) -> list[slice]:
    """Sequences of one token, then others together while their padding is at most as much as they.

    Args:
        lengths: Tokens of the sequences, ascending, [b].
    """
    single, end = int((lengths == 1).sum()), len(lengths)
    parts = []
    while end > single:
        tokens = lengths[single:end][::-1].cumsum()  # of the last one, the last two, ...
        fits = lengths[end - 1] * np.arange(1, len(tokens) + 1) <= 2 * tokens
        begin = end - int(fits.sum())
        parts.append(slice(begin, end))
        end = begin
    return [*([slice(0, single)] if single else []), *parts[::-1]]


def _group(rows: Integers, first: Integers, lengths: Integers, device: torch.device) -> Group:
    """Sequences as the first group of a pass.

    Args:
        rows: Their cache rows, [b].
        first: Positions of their first tokens, [b].
        lengths: How many tokens they have, [b].
        device: Where the tensors go.
    """
    n, total = int(lengths.max()), int(lengths.sum())
    place = np.arange(n)
    there = place < lengths[:, None]
    position = np.where(there, first[:, None] + place, -1)
    group = Group(
        sent(rows, device), sent(position, device), slice(0, total), begins=not first.any()
    )
    if there.all():
        return group
    begins = (lengths.cumsum() - lengths)[:, None]
    source = begins + np.minimum(place, lengths[:, None] - 1)
    (target,) = there.ravel().nonzero()
    return group._replace(
        source=sent(source, device), target=sent(target, device), lengths=tuple(lengths.tolist())
    )
