"""R-KV: attended tokens that repeat no other one (Cai et al., 2025, arXiv:2505.24133).

At the end of a prompt and after every `interval` generated tokens, the budget goes to the newest
tokens and to the highest scores before them: importance, which is the attention of the newest
queries, minus redundancy, which is the mean cosine of a key to the other keys. The rule is that of
the authors' code at d15c976. Between two of these steps everything is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.attention_scores import MAXIMUM, smoothed, window_logits
from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.eviction import newest
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy
from dms_train.limits import AtLeast, Below, Share

_ROWS = 1024  # cosines of so many keys at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RKVOptions(ScoreOptions):
    """Options of `r_kv`.

    Attributes:
        window: Last queries that score; their tokens stay and count against the budget.
        kernel: Neighbouring tokens of the smoothing by maximum, an odd number.
        importance: Weight of the attention; that of the redundancy is 1 minus it. The paper has
            0.1, the authors' code 0.07 (A-RKV1).
        threshold: Cosine from which two keys repeat each other.
        fix_empty_rows: Leave keys that repeat no other one as they are. The authors' code drops
            their cosine to the first token instead (A-RKV2).
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 8
    kernel: Annotated[int, AtLeast(1)] = 7
    importance: Annotated[float, Share()] = 0.07
    threshold: Annotated[float, Share()] = 0.5
    interval: Annotated[int | None, AtLeast(1), Below(2**31)] = 128
    fix_empty_rows: bool = False

    def check(self, path: str) -> Iterator[str]:
        """Yield a line for an even kernel, besides those of the budget."""
        yield from ScoreOptions.check(self, path)
        if self.kernel % 2 == 0:
            yield f"kernel={self.kernel}: use an odd number"


class RKVPolicy(ScorePolicy):
    """Evict at the end of a prompt, and regularly from then on."""

    options: RKVOptions

    def __init__(self, options: RKVOptions) -> None:
        super().__init__(options)
        self.recent_queries = self.protected = options.window

    def slot_scores(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return importance minus redundancy, [b, h, s]."""
        o = self.options
        inside = newest(slots.position, sequences.end, o.window)
        logits, _, real = window_logits(slots, sequences)
        logits = logits.amax(2).masked_fill(inside[:, :, None], torch.finfo(logits.dtype).min)
        attention = (logits.softmax(-1) * real[:, 0]).sum(2) / real[:, 0].sum(2)
        attention = attention.masked_fill(inside | (slots.position < 0), 0)
        attention = smoothed(attention, slots.position, o.kernel, MAXIMUM)
        repeated = redundancy(slots, threshold=o.threshold, fix_empty_rows=o.fix_empty_rows)
        return combined(attention, repeated, o.importance)


def combined(importance: Tensor, redundancy: Tensor, weight: float) -> Tensor:
    """Combine importance and redundancy into the score of tokens."""
    return weight * importance - (1 - weight) * redundancy


def redundancy(slots: Slots, *, threshold: float, fix_empty_rows: bool) -> Tensor:
    """Return how much each key repeats others, [b, h, s], at least float32.

    The cosine of a key to the newest one that it repeats does not count, so that of a family of
    similar keys the newest one stays. Takes time for s * s cosines of each KV list.
    """
    assert slots.key is not None
    held = slots.position >= 0
    key = slots.key.to(torch.promote_types(slots.key.dtype, torch.float32))
    key = F.normalize(key, dim=-1) * held[..., None]
    position = slots.position[:, :, None]
    first = position.masked_fill(position < 0, torch.iinfo(torch.int64).max).argmin(-1)
    total = torch.zeros_like(key[..., 0])
    for start in range(0, key.shape[2], _ROWS):
        cosine = key[:, :, start : start + _ROWS] @ key.transpose(-1, -2)
        cosine.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        repeated = torch.where((cosine > threshold) & held[:, :, None], position, -1)
        latest, dropped = repeated.max(-1)  # of the columns of each row
        left = cosine.scatter(-1, torch.where(latest < 0, first, dropped)[..., None], 0)
        if fix_empty_rows:
            left = torch.where((latest < 0)[..., None], cosine, left)
        total = total + left.sum(2)
    mean = total / held.sum(-1, keepdim=True)
    weights: Tensor = mean.masked_fill(~held, torch.finfo(mean.dtype).min).softmax(-1)
    return weights


POLICY = PolicyKind(RKVOptions, lambda options, spec: RKVPolicy(options))
