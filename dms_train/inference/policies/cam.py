"""CaM: H2O in which evicted values are added to the tokens after them (Zhang et al., 2024).

"CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024. The mean of equation 14 is
taken, as in kvpress 0.5.5; KVCache-Factory takes the maximum (A-CAM1). Keys do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import Merge, PolicyKind, Slots
from dms_train.inference.policies.h2o import H2OOptions, H2OPolicy
from dms_train.limits import AtLeast
from dms_train.method.splitmix import GOLDEN, mix, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class CaMOptions(H2OOptions):
    """Options of `cam`.

    Attributes:
        targets: Number of kept tokens after an evicted one among which its value is divided; fewer
            if fewer follow.
        expected: Multiply by the probability of a merge instead of drawing it.
    """

    targets: Annotated[int, AtLeast(1)] = 32
    expected: bool = False


class CaMPolicy(H2OPolicy):
    """H2O with merges; their probability is the token's score over its targets' mean score."""

    needs_content = True

    def __init__(self, options: CaMOptions) -> None:
        super().__init__(options)
        self._targets, self._expected = options.targets, options.expected
        # random numbers depend on the request
        self.shareable = self.shareable and options.expected

    def merge(self, slots: Slots, evicted: Tensor) -> Merge | None:
        """Add each evicted value to its targets, in equal parts."""
        source = evicted.nonzero()
        if not len(source):
            return None
        b, h, slot = source.unbind(1)
        kept = (slots.position >= 0) & ~evicted
        far = torch.iinfo(torch.int64).max
        order = slots.position.masked_fill(~kept, far).argsort(-1)
        before = kept[b, h] & (slots.position[b, h] < slots.position[b, h, slot][:, None])
        following = before.sum(-1)[:, None] + torch.arange(self._targets, device=slot.device)
        real = following < kept[b, h].sum(-1)[:, None]  # [evicted, targets]
        target = order[b, h].gather(1, following.clamp(max=order.shape[-1] - 1))
        score = slots.state[..., 0]
        count = real.sum(1)
        mean = (score[b, h].gather(1, target) * real).sum(1) / count.clamp(min=1)
        share = (score[b, h, slot] / mean.clamp(min=torch.finfo(mean.dtype).tiny)).clamp(0, 1)
        if not self._expected:
            share = (self._draws(slots, b, h, slot) < share).to(share)
        share = (share / count.clamp(min=1))[:, None].expand_as(real)[real]
        lists, slot_count = (b * slots.position.shape[1] + h)[:, None], slots.position.shape[2]
        unchanged = torch.ones_like(score)
        return Merge(
            source=(lists * slot_count + slot[:, None]).expand_as(real)[real],
            target=(lists * slot_count + target)[real],
            key_weight=torch.zeros_like(share),
            value_weight=share,
            key_scale=unchanged,
            value_scale=unchanged,
        )

    def _draws(self, slots: Slots, b: Tensor, h: Tensor, slot: Tensor) -> Tensor:
        """Draw a number for each evicted token from its request, layer, KV head and position."""
        assert slots.sequences is not None
        key = mix(slots.sequences.seed[b] * GOLDEN + slots.layer + 1)
        key = mix(mix(key + h * GOLDEN) + slots.position[b, h, slot] * GOLDEN)
        return uniform(key, 1)[:, 0]


POLICY = PolicyKind(CaMOptions, lambda options, spec: CaMPolicy(options))
