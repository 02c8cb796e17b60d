"""Documents that are packed one after another into the sequences of a micro-batch.

Attention, the window, the decision shift and positions start again at every document. Shape
letters: b sequences, s positions of each, g KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDocuments:
    """Bounds of the documents of a micro-batch.

    The padding after the last document of a sequence is a document of its own. It counts in no
    loss and in no statistics.

    Attributes:
        cu_seqlens: Bounds of the documents in the b * s positions of the concatenated sequences,
            int32 [documents + 1]; Megatron's name for it.
        first: First position of the document that a position belongs to, int64 [b, s].
        end: First position after that document, int64 [b, s].
        tokens: Number of positions of each sequence that are not padding, int64 [b].
        dense_reads: Slots that one KV head reads when nothing is evicted, summed over the queries
            of a sequence, over s; float32 [b].
    """

    cu_seqlens: Tensor
    first: Tensor
    end: Tensor
    tokens: Tensor
    dense_reads: Tensor

    @classmethod
    def of(cls, lengths: Sequence[Tensor], seq_length: int) -> PackedDocuments:
        """Build it from the lengths of the documents.

        Args:
            lengths: For each sequence, the number of positions of its documents in order, int64
                [documents]; together at most `seq_length`.
            seq_length: Positions of each sequence.
        """
        tokens = torch.stack([own.sum() for own in lengths])
        filled = [
            torch.cat([own, rest[None]]) if (rest := seq_length - count) else own
            for own, count in zip(lengths, tokens, strict=True)
        ]
        ends = [own.cumsum(0) for own in filled]
        joined = [end + number * seq_length for number, end in enumerate(ends)]
        pairs = list(zip(filled, ends, strict=True))
        return cls(
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), *joined]).int(),
            first=torch.stack([torch.repeat_interleave(end - own, own) for own, end in pairs]),
            end=torch.stack([torch.repeat_interleave(end, own) for own, end in pairs]),
            tokens=tokens,
            dense_reads=torch.stack([(own * (own + 1) // 2).sum() for own in lengths]).float()
            / seq_length,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedDocuments:
        """Return a copy with a function applied to every tensor."""
        return PackedDocuments(**{f.name: function(getattr(self, f.name)) for f in fields(self)})

    @property
    def positions(self) -> Tensor:
        """Position of each token within its document (Megatron's position ids), int64 [b, s]."""
        return self._numbers - self.first

    @property
    def is_token(self) -> Tensor:
        """Mask of the positions that are not padding, bool [b, s]."""
        return self._numbers < self.tokens[:, None]

    @property
    def is_last(self) -> Tensor:
        """Mask of the last position of each document except padding, bool [b, s]."""
        return (self._numbers + 1 == self.end) & self.is_token

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(self.first.shape[1], device=self.first.device)

    def dense_eviction_stats(self, heads: int) -> Tensor:
        """Return the first columns of `EvictionStats` of KV heads that evict nothing, [b, 3]."""
        live = self.tokens.float()
        return heads * torch.stack([torch.zeros_like(live), live, self.dense_reads], dim=1)
