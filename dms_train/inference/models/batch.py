"""The tokens of a forward pass: flat for the layers, by sequence for the cache.

Shape letters: t tokens of a pass, b sequences of a group, n their most tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.devices import sent


class Group(NamedTuple):
    """Sequences whose tokens enter the cache together; neighbours in the flat order.

    Attributes:
        rows: Their cache rows, int64 [b], all different.
        position: int64 [b, n]; -1 for padding behind a sequence.
        tokens: Where their tokens lie in the flat order.
        source: int64 [b, n], which of these tokens goes where; None if there is no padding.
        target: int64 [tokens], place in b * n of each of them; None likewise.
        begins: Whether the cache is known to hold nothing of these sequences yet.
    """

    rows: Tensor
    position: Tensor
    tokens: slice
    source: Tensor | None = None
    target: Tensor | None = None
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
        """Sequences of any number of tokens; those of one token come first.

        Args:
            parts: Of each sequence, its row, the position of its first token, and its tokens.
            device: Where the tensors go.
        """
        single = sum(len(tokens) == 1 for _, _, tokens in parts)
        flat = [token for _, _, tokens in parts for token in tokens]
        position = [first + i for _, first, tokens in parts for i in range(len(tokens))]
        groups = []
        if single:
            groups.append(_group(parts[:single], 0, device))
        if single < len(parts):
            groups.append(_group(parts[single:], single, device))
        return cls(sent(flat, device), sent(position, device), groups)


def _group(parts: list[tuple[int, int, list[int]]], start: int, device: torch.device) -> Group:
    """Sequences as one group whose first token is number `start`."""
    lengths = [len(tokens) for _, _, tokens in parts]
    n, total = max(lengths), sum(lengths)
    position = [
        [*range(first, first + length), *[-1] * (n - length)]
        for (_, first, _), length in zip(parts, lengths, strict=True)
    ]
    rows = sent([row for row, _, _ in parts], device)
    at = sent(position, device)
    empty = all(first == 0 for _, first, _ in parts)
    group = Group(rows, at, slice(start, start + total), begins=empty)
    if min(lengths) == n:
        return group
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    source = [
        [begin + min(i, length - 1) for i in range(n)]
        for begin, length in zip(begins, lengths, strict=True)
    ]
    target = [i * n + j for i, length in enumerate(lengths) for j in range(length)]
    return group._replace(source=sent(source, device), target=sent(target, device))
