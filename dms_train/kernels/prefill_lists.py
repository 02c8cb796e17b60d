"""What the kernels of long prompts read and write: tokens, who of them stays, lists in pages.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s tokens of a stretch,
p pages of the longest list, d head size. A lane is a (sequence, KV head).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Tokens between two places of a stretch at which the number of survivors before it is known.
EDGE = 64


class Pages(NamedTuple):
    """Where the lists of all lanes lie: slot x of a lane is slot x % s of its page number x // s.

    A page holds the keys, then the values of its s slots. Pages are numbered by their distance
    from the start of `pages`, in pages; they may lie behind that tensor, in another slab.

    Attributes:
        pages: [any, 2, s, d]; s is a power of two.
        table: int32 [b, h, p], page numbers from 0 on; anything behind the end of a list.
    """

    pages: Tensor
    table: Tensor


class Tokens(NamedTuple):
    """Heads of the tokens of a stretch, the last n of which ask.

    Attributes:
        query: [b, h * r, n, d].
        key: [b, h, s, d].
        value: Likewise; all of one dtype of 16 or 32 bits.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class Stretch(NamedTuple):
    """Which tokens of a stretch stay, and where in the lists that puts them.

    Attributes:
        evicted: bool [b, h, s] by key.
        edges: int32 [b, h, ceil(s / EDGE) + 1], length of a lane's list with all survivors before
            token EDGE * index in it.
        start: int32 [b], first token that exists.
        stop: int32 [b], one behind the last token that exists.
        kept: Tokens before `stop` that stay whatever was decided.
    """

    evicted: Tensor
    edges: Tensor
    start: Tensor
    stop: Tensor
    kept: int

    @property
    def lengths(self) -> Tensor:
        """Length of each list with the whole stretch in it, int32 [b, h]."""
        return self.edges[..., -1]
