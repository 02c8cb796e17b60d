"""Attention of vLLM's layers through the paged cache.

A layer hands over queries and keys without RoPE. Their eviction channels carry the decisions.

Shape letters: h query heads, g KV heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)

from dms_train.vllm_plugin.batch import BatchAttention
from dms_train.vllm_plugin.credit import DMSCacheSpec
from dms_train.vllm_plugin.settings import FP8_CACHES

# Everything that a decode step reads has a fixed address. `mixed_steps` captures others itself.
CUDAGRAPH_SUPPORT = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class DMSAttentionImpl(AttentionImpl):
    """Implementation of vLLM's attention operator."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, "auto"

    def forward(  # noqa: PLR0913 - vLLM's signature
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: BatchAttention | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Write the attention of a batch; without metadata, in a dummy batch, write 0.

        Args:
            layer: The `DMSAttention`.
            query: [any, h, d] without RoPE.
            key: [any, g, d] without RoPE.
            value: [any, g, d].
            kv_cache: Not used; the cache has its own view of the memory.
            attn_metadata: The batch.
            output: [any, h, d]; written.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            `output`.
        """
        if attn_metadata is None:
            return output.zero_()
        attn_metadata.attend(layer.layer_number, query, key, value, output)
        return output


class DMSMetadataBuilder(AttentionMetadataBuilder):
    """Builder that vLLM requires; `DMSModelState` describes batches itself."""

    _cudagraph_support = CUDAGRAPH_SUPPORT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Fail: vLLM does not call it for a model with its own model state."""
        raise NotImplementedError("DMSModelState.prepare_attn describes batches")


class DMSBackend(AttentionBackend):
    """Attention backend of the layers of a retrofitted model."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012 - vLLM's
    supported_kv_cache_dtypes = ["auto", *FP8_CACHES]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration for backends of plugins."""
        return "CUSTOM"

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True; newer versions of vLLM ask before they build a layer with a window."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True, for layers with sinks."""
        return True

    @staticmethod
    def get_impl_cls() -> type[DMSAttentionImpl]:
        """Return the implementation."""
        return DMSAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DMSMetadataBuilder]:
        """Return the builder."""
        return DMSMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of the memory: a page of each KV list in every block."""
        return num_blocks, num_kv_heads, 2, block_size, head_size


class DMSAttention(Attention):
    """Attention layer of a retrofitted model; the first one states the cache of all layers.

    Args:
        replaced: Layer of the same name that vLLM built.
        layer_number: Number of the layer.
        layers: Number of layers.
        vllm_config: vLLM's configuration.
    """

    def __init__(
        self, replaced: Attention, layer_number: int, layers: int, vllm_config: VllmConfig
    ) -> None:
        # vLLM refuses two layers of one name
        del vllm_config.compilation_config.static_forward_context[replaced.layer_name]
        super().__init__(
            replaced.num_heads,
            replaced.head_size,
            replaced.head_size**-0.5,
            num_kv_heads=replaced.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=replaced.layer_name,
        )
        self.layer_number = layer_number
        self._kv_lists = 0 if layer_number else layers * replaced.num_kv_heads

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> DMSCacheSpec | None:
        """Return the cache of all layers for the first layer, None for any other."""
        if not self._kv_lists:
            return None
        return DMSCacheSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self._kv_lists,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
        )


class NoRotation(nn.Module):
    """Stands in for RoPE, which the kernels apply.

    Args:
        key_scale: Factor on keys. The kernels divide scores by the root of the head size; the
            factor makes up for another softmax scale.
        order: Channel in the weight files for every channel of a head in the kernels, int64 [d].
    """

    order: Tensor | None

    def __init__(self, key_scale: float, order: Tensor) -> None:
        super().__init__()
        self.key_scale = 1.0 if math.isclose(key_scale, 1) else key_scale
        as_stored = order.tolist() == [*range(len(order))]
        self.register_buffer("order", None if as_stored else order, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query, and the key times the factor, with the channels of the kernels."""
        if self.order is not None:
            query, key = (
                x.unflatten(-1, (-1, len(self.order)))[..., self.order].view_as(x)
                for x in (query, key)
            )
        return query, key if self.key_scale == 1 else key * self.key_scale
