"""Best-fit packing of documents into sequences (Ding et al., arXiv:2404.10830, section 3).

A document of n tokens takes n - 1 positions, the inputs of its n - 1 next tokens. A document longer
than a sequence is cut into pieces, each a document of its own. A document of one token has nothing
to predict and is left out. The longest pieces are placed first, each into the fullest sequence with
enough room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Documents, long ones cut into pieces; every array is int64 [pieces].

    Attributes:
        document: Number of the document.
        offset: Index of the piece's first token in the document.
        positions: Number of inputs of the piece; it reads one more token, the last label.
    """

    document: Numbers
    offset: Numbers
    positions: Numbers


class Sequences(NamedTuple):
    """Sequences of packed pieces.

    Attributes:
        pieces: Numbers of pieces, one sequence after the other, int64 [total].
        bounds: Start of each sequence in `pieces`, and the end, int64 [sequences + 1].
    """

    pieces: Numbers
    bounds: Numbers

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.bounds) - 1

    def of(self, number: int) -> Numbers:
        """Return the pieces of one sequence, in order."""
        return self.pieces[self.bounds[number] : self.bounds[number + 1]]


def cut(tokens: npt.NDArray[np.integer], seq_length: int) -> Pieces:
    """Split documents into pieces.

    Args:
        tokens: Tokens of each document, int [documents].
        seq_length: Positions of a sequence.
    """
    positions = np.maximum(tokens.astype(np.int64) - 1, 0)
    count = -(-positions // seq_length)
    document = np.repeat(np.arange(len(positions)), count)
    part = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    offset = part * seq_length
    return Pieces(document, offset, np.minimum(positions[document] - offset, seq_length))


def pack(positions: Numbers, seq_length: int, *, seed: int, count: int) -> Sequences:
    """Pack at least `count` sequences, epoch after epoch.

    Every epoch takes each piece once and ends with its sequences shuffled. Its emptiest sequence
    stays open and is filled in the next epoch. Sequence i is the same for every `count` above i.

    Args:
        positions: Length of each piece, 1 to `seq_length`; at least one piece.
        seq_length: Positions of a sequence.
        seed: Seed of the order of pieces of one length, and of sequences.
        count: Sequences that are needed.
    """
    random = np.random.RandomState(seed)  # its numbers are the same in every version of numpy
    sizes: list[Numbers] = [np.zeros(1, dtype=np.int64)]
    flat: list[Numbers] = []
    made, left = 0, list[int]()
    while made < count:
        order = random.permutation(len(positions))
        order = order[np.argsort(-positions[order], kind="stable")]
        packed, left = _fill(order.tolist(), positions.tolist(), seq_length, left)
        packed = [packed[number] for number in random.permutation(len(packed))]
        # arrays take a tenth of the memory of lists
        sizes.append(np.array([len(sequence) for sequence in packed], dtype=np.int64))
        flat.append(np.array([piece for sequence in packed for piece in sequence], dtype=np.int64))
        made += len(packed)
    return Sequences(np.concatenate(flat), np.concatenate(sizes).cumsum())


def _fill(
    order: list[int], positions: list[int], seq_length: int, left: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Place the pieces in the given order, each by best fit, starting with one open sequence."""
    by_free: dict[int, list[list[int]]] = {}  # sequences by their free positions
    ascending: list[int] = []  # the keys of `by_free`

    def add(sequence: list[int], free: int) -> None:
        if free not in by_free:
            insort(ascending, free)
        by_free.setdefault(free, []).append(sequence)

    if left:
        add(left, seq_length - sum(positions[piece] for piece in left))
    for piece in order:
        index = bisect_left(ascending, positions[piece])
        free, sequence = seq_length, []
        if index < len(ascending):
            free = ascending[index]
            sequence = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], ascending[index]
        sequence.append(piece)
        add(sequence, free - positions[piece])
    emptiest = by_free[ascending[-1]].pop()
    return [sequence for free in ascending for sequence in by_free[free]], emptiest
