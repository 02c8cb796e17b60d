"""Paged cache of models in which some layers have a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.shared_pages import EvictingLayers
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.base import CachePolicy
from dms_train.inference.policies.kernel_rules import KernelRule, LayeredRule
from dms_train.kernels.decode.types import ALWAYS, Decisions
from dms_train.method.base import MethodSpec


class LocalPagedCache(PagedKVCache):
    """Paged cache whose layers with a window evict every token that leaves it.

    Args:
        pool: As in `PagedKVCache`.
        policy: Policy whose kernel rule is a `LayeredRule`.
        sizes: Sizes of the cache.
    """

    def __init__(self, pool: DevicePool, policy: CachePolicy, sizes: CacheSizes) -> None:
        super().__init__(pool, policy, sizes)
        rule = policy.kernel_rule()
        assert isinstance(rule, LayeredRule)
        windows = [window for window in rule.windows if window is not None]
        local = [layer for layer, window in enumerate(rule.windows) if window is not None]
        self._local = {layer: index for index, layer in enumerate(local)}
        shape = (len(local), sizes.rows, sizes.heads, max(windows))
        self._local_rings = torch.zeros(shape, dtype=torch.int32, device=pool.device)
        has_window = torch.tensor([window is not None for window in rule.windows])
        has_window = has_window.to(pool.device)
        self._others, self._with_window = self._layers[~has_window], self._layers[has_window]

    def _decisions_for(self, rule: KernelRule) -> tuple[Decisions, int]:
        assert isinstance(rule, LayeredRule)
        return super()._decisions_for(rule.rule)

    @property
    def table_bytes(self) -> int:
        """Return the bytes of tables, and of the rings of layers with a window."""
        return super().table_bytes + self._local_rings.nbytes

    def _ring(self, layer: int) -> Tensor:
        if layer in self._local:
            return self._local_rings[self._local[layer]]
        return super()._ring(layer)

    def _evicting_layers(self) -> list[EvictingLayers]:
        others = [
            each._replace(layers=self._others, at=self._others)
            for each in super()._evicting_layers()
        ]
        local = EvictingLayers(
            self._with_window, self._local_rings, self._layers[: len(self._with_window)]
        )
        return [*others, local]

    def _layer_rule(self, layer: int) -> Decisions:
        return Decisions(ALWAYS) if layer in self._local else super()._layer_rule(layer)

    def _rule_at(self, layer: int, spec: MethodSpec | None, head_size: int) -> Decisions:
        if layer in self._local:
            return self._layer_rule(layer)
        return super()._rule_at(layer, spec, head_size)

    def _row_tensors(self) -> list[Tensor]:
        return [*super()._row_tensors(), self._local_rings]
