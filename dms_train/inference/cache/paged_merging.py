"""Paged cache for policies that merge tokens: a merged state overwrites its slot.

The kernels of `PagedKVCache` store and attend the states with a window of 0 and a shift of 1. If a
token continues its predecessor, the previous state counts as evicted, and the new state takes its
slot. One more kernel computes the states; in a prompt, torch operations do. Both read the newest
tokens of every KV list, which are kept unmerged, as in the policy.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, m tokens that
a state averages besides the newest, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.base import CachePolicy, NewTokens
from dms_train.inference.policies.kernel_rules import KernelRule, MergeRule
from dms_train.kernels import dispatch
from dms_train.kernels.decode import types
from dms_train.kernels.decode.types import (
    NEVER,
    SIGNAL,
    Decisions,
    HeadNorms,
    NewestTokens,
    Step,
)
from dms_train.method.base import MethodSpec


class MergingPagedCache(PagedKVCache):
    """Paged cache that keeps the newest unmerged tokens of its KV lists in addition to the states.

    Args:
        pool: As for `PagedKVCache`.
        policy: Policy whose kernel rule is a `MergeRule`.
        sizes: Sizes of the cache.
    """

    captures_prompts = False  # their states are torch operations

    def __init__(self, pool: DevicePool, policy: CachePolicy, sizes: CacheSizes) -> None:
        super().__init__(pool, policy, sizes)
        rule, d = policy.kernel_rule(), pool.pages.shape[-1]
        assert isinstance(rule, MergeRule)
        lists = (*sizes[:3], rule.tokens - 1)
        self._newest_keys, self._newest_values = (
            torch.zeros(*lists, d, dtype=pool.dtype, device=pool.device) for _ in range(2)
        )
        self._newest_weights = torch.zeros(*lists, 2, device=pool.device)
        self._merging = types.MergeRule(
            channel=rule.channel % d,
            scale=rule.scale,
            offset=rule.offset,
            importance_offset=rule.importance_offset,
            smallest=rule.smallest,
            uniform=rule.uniform,
        )

    def _decisions_for(self, rule: KernelRule) -> tuple[Decisions, int]:
        """Return the rule that evicts an entry as soon as its successor continues it."""
        assert isinstance(rule, MergeRule)
        return Decisions(SIGNAL, shift=rule.shift), 0

    def _rule_of(self, spec: MethodSpec | None, head_size: int) -> Decisions:
        """Return decisions without a query channel: the merge kernel decides and clears."""
        return Decisions(NEVER)

    def _policy_tensors(self) -> list[Tensor]:
        return self._newest()

    def _newest(self) -> list[Tensor]:
        return [self._newest_keys, self._newest_values, self._newest_weights]

    def _row_tensors(self) -> list[Tensor]:
        return [*super()._row_tensors(), *self._newest()]

    def _append_and_attend(
        self, layer: int, token: Step, rule: Decisions, norms: HeadNorms | None
    ) -> Tensor:
        newest = NewestTokens(*(x[layer] for x in self._newest()))
        merged = dispatch.triton_kernels().accumulate(token, newest, self._merging, norms)
        return super()._append_and_attend(layer, merged, self._rule, None)

    def _rotated(self, layer: int, step: AttentionStep) -> tuple[Tensor, NewTokens]:
        """Merge and rotate a chunk of prompts, and keep its newest tokens."""
        names, stored = ("key", "value", "weights"), self._newest()
        size, rows = stored[0].shape[3], step.rows
        start = torch.where(step.position >= 0, step.position, torch.iinfo(torch.int64).max).amin(1)
        index = torch.arange(size, device=rows.device)
        number = start[:, None] - size + index  # tokens before the chunk
        lists = {
            name: x[layer, rows[:, None], :, number % size].transpose(1, 2)
            for name, x in zip(names, stored, strict=True)
        }
        absent = (number < 0)[:, None, :, None]  # left over from an earlier request
        lists = {name: x.masked_fill(absent, 0.0) for name, x in lists.items()}
        content = self.policy.accumulate(step.projected(), lists)
        assert content is not None
        merged = step.replaced(*content)
        at = (step.position.amax(1, keepdim=True) + 1 + index) % size
        for name, x in zip(names, stored, strict=True):
            x[layer, rows[:, None], :, at] = lists[name].transpose(1, 2).to(x.dtype)
        return merged.rotated()
