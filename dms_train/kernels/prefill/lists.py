"""Arguments of the prompt kernels: tokens, kept tokens, lists in pages, and what chunks pass on.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s tokens of a chunk
with those before it that are read densely, p pages of the longest list, d head size. A KV list is
one (sequence, KV head).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Distance of the edges of a chunk. At an edge, the number of kept tokens before it is known.
EDGE = 64


class Pages(NamedTuple):
    """Pages of the KV lists: slot x of a KV list is slot x % s of its page number x // s.

    A page holds the keys, then the values of its s slots. Pages are numbered by their distance
    from the start of `pages`, in pages; they may lie after that tensor, in another slab.

    Attributes:
        pages: [any, 2, s, d]; s is a power of two.
        table: int32 [b, h, p], page numbers from 0 on; any value after the end of a list.
    """

    pages: Tensor
    table: Tensor


class Tokens(NamedTuple):
    """Heads of the tokens of a chunk; the last n of them are queries.

    Attributes:
        query: [b, h * r, n, d].
        key: [b, h, s, d].
        value: [b, h, s, d]; all of one dtype of 16 or 32 bits.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class PrefillChunk(NamedTuple):
    """Kept tokens of a chunk, and their slots in the lists.

    Attributes:
        evicted: bool [b, h, s] by key.
        edges: int32 [b, h, ceil(s / EDGE) + 1], length of a KV list with all kept tokens
            before token EDGE * index in it.
        lengths: int32 [b, h], length of each list with the whole chunk in it.
        start: int32 [b], first token that exists.
        stop: int32 [b], one after the last token that exists.
        kept: Number of tokens before `stop` that are kept regardless of decisions.
    """

    evicted: Tensor
    edges: Tensor
    lengths: Tensor
    start: Tensor
    stop: Tensor
    kept: int


class PrefillState(NamedTuple):
    """State of one layer's prompts between chunks, besides the pages.

    Attributes:
        lengths: int32 [b, h], slots in use. They include the last `window` + 1 tokens, or all
            tokens if there are fewer.
        seen: int32 [b], tokens so far.
        evicted: bool [b, h, recent_tokens(window)] of the last tokens by key, the newest at the
            end; False for undecided tokens. `plan_prompt` adds what the chunk decides about them.
        slots: int32 of the same shape, slots of the last `window` + 1 tokens, -1 for other tokens.
            None if these tokens are the last of their lists, in order, as after a chunk.
    """

    lengths: Tensor
    seen: Tensor
    evicted: Tensor
    slots: Tensor | None = None


def recent_tokens(window: int) -> int:
    """Return the number of tokens before a chunk that are read densely.

    One more than the window would suffice. With this number, blocks of queries minus the window
    start at an edge.
    """
    return window + EDGE
