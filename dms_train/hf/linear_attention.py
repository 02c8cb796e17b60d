"""Sizes of linear attention, and their keys in config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from dms_train.families import ModelFamily
from dms_train.hf.values import Values

_KEYS = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_channels": ("linear_key_head_dim", 128),
    "value_channels": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Sizes of the layers with linear attention (gated delta net, arXiv:2412.06464).

    Every key head serves the same number of value heads. A value head has a state of
    `key_channels` x `value_channels` numbers.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values.
        key_channels: Channels of a head of queries and keys.
        value_channels: Channels of a value head.
        taps: Tokens that the short convolution before the state reads.
    """

    key_heads: int
    value_heads: int
    key_channels: int
    value_channels: int
    taps: int

    @property
    def keys(self) -> int:
        """Number of channels of all heads of keys."""
        return self.key_heads * self.key_channels

    @property
    def values(self) -> int:
        """Number of channels of all value heads."""
        return self.value_heads * self.value_channels

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of queries, keys, values, output gate, rate and decay of one key head."""
        values = self.value_heads // self.key_heads
        wide = values * self.value_channels
        return (self.key_channels, self.key_channels, wide, wide, values, values)

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every size that no model can have."""
        for item in fields(self):
            if getattr(self, item.name) < 1:
                yield f"{path}.{item.name}={getattr(self, item.name)}: use a number above 0"
        if self.key_heads > 0 and self.value_heads % self.key_heads:
            yield (
                f"{path}.key_heads={self.key_heads}: does not divide value_heads="
                f"{self.value_heads}; use a divisor of it"
            )


def read_linear(config: Values, family: ModelFamily) -> LinearAttention | None:
    """Read the sizes of linear attention with the defaults of transformers."""
    if family.layers is None or not family.layers.has_linear:
        return None
    sizes = {name: config.whole(key, default) for name, (key, default) in _KEYS.items()}
    linear = LinearAttention(**sizes)
    if linear.value_heads % linear.key_heads:
        fix = f"state a divisor of linear_num_value_heads={linear.value_heads}"
        raise config.refusal("linear_num_key_heads", linear.key_heads, fix)
    return linear


def linear_keys(linear: LinearAttention) -> dict[str, Any]:
    """Return the keys of linear attention in config.json."""
    return {key: getattr(linear, name) for name, (key, _) in _KEYS.items()}
