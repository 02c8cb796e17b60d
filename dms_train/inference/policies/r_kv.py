"""R-KV: attended tokens that repeat no other token stay (Cai et al., 2025, arXiv:2505.24133).

The policy evicts at the end of a prompt and after every `interval` generated tokens. The newest
tokens stay, and the tokens before them with the highest scores. The score is importance minus
redundancy. Importance is the attention of the newest queries; redundancy is the mean cosine of a
key to the other keys. The rule follows the authors' code at d15c976. Between two evictions every
token is stored.
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

_COSINES = 2**26  # most cosines in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RKVOptions(ScoreOptions):
    """Options of `r_kv`.

    Attributes:
        window: Number of last queries, which score; their tokens stay and count against the budget.
        kernel: Number of neighbouring tokens in the smoothing by maximum, odd.
        importance: Weight of the attention; the redundancy has 1 minus this weight. The paper has
            0.1, the authors' code 0.07 (A-RKV1).
        threshold: Smallest cosine at which two keys repeat each other.
        fix_empty_rows: Leave keys that repeat no other key as they are. The authors' code drops
            their cosine to the first token instead (A-RKV2).
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 8
    kernel: Annotated[int, AtLeast(1)] = 7
    importance: Annotated[float, Share()] = 0.07
    threshold: Annotated[float, Share()] = 0.5
    interval: Annotated[int | None, AtLeast(1), Below(2**31)] = 128
    fix_empty_rows: bool = False

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, and one for an even kernel."""
        yield from ScoreOptions.check(self, path)
        if self.kernel % 2 == 0:
            yield f"kernel={self.kernel}: use an odd number"


class RKVPolicy(ScorePolicy):
    """R-KV: evict at the end of a prompt, and regularly afterwards."""

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

    The cosine to the newest repeated key does not count. Of a family of similar keys, the newest
    one therefore stays. Computes s * s cosines for each KV list.
    """
    assert slots.key is not None
    held = slots.position >= 0
    key = slots.key.to(torch.promote_types(slots.key.dtype, torch.float32))
    key = F.normalize(key, dim=-1) * held[..., None]
    position = slots.position[:, :, None]
    first = position.masked_fill(position < 0, torch.iinfo(torch.int64).max).argmin(-1)
    total = torch.zeros_like(key[..., 0])
    rows = max(1, _COSINES // max(1, held.numel()))
    for start in range(0, key.shape[2], rows):
        cosine = key[:, :, start : start + rows] @ key.transpose(-1, -2)
        cosine.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        repeated = torch.where((cosine > threshold) & held[:, :, None], position, -1)
        latest, dropped = repeated.max(-1)  # newest repeated key of each row
        left = cosine.scatter(-1, torch.where(latest < 0, first, dropped)[..., None], 0)
        if fix_empty_rows:
            left = torch.where((latest < 0)[..., None], cosine, left)
        total = total + left.sum(2)
    mean = total / held.sum(-1, keepdim=True)
    weights: Tensor = mean.masked_fill(~held, torch.finfo(mean.dtype).min).softmax(-1)
    return weights


POLICY = PolicyKind(RKVOptions, lambda options, spec: RKVPolicy(options))
