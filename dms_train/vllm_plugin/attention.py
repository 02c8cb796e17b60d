"""Attention of vLLM's layers through the paged cache.

A layer hands over queries and keys without RoPE. Their eviction channels carry the decisions.

Shape letters: t tokens of a batch, b its requests, h query heads, g KV heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from dms_train.inference.cache.interface import AttentionStep, rotation_table
from dms_train.kernels.decode.types import Step
from dms_train.vllm_plugin.cache import GrantedCache
from dms_train.vllm_plugin.credit import DMSCacheSpec


class PromptPart(NamedTuple):
    """Several tokens of one request.

    Attributes:
        start: First token in the batch.
        stop: One after the last token.
        request: Index of the request in the batch.
        begins: Whether the cache holds nothing of the request.
        table: `rotation_table` of the tokens.
    """

    start: int
    stop: int
    request: int
    begins: bool
    table: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttention:
    """Attention of the tokens of a batch; vLLM passes it to every layer as metadata.

    Attributes:
        cache: The cache.
        position: int64 [t].
        cos: [t, d], both halves alike.
        sin: [t, d], both halves alike.
        rows: Cache rows of the requests, int64 [b].
        singles: Number of requests with one token; they come first.
        parts: All other requests.
    """

    cache: GrantedCache
    position: Tensor
    cos: Tensor
    sin: Tensor
    rows: Tensor
    singles: int
    parts: list[PromptPart]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the tokens of a layer and write their attention.

        Args:
            layer: Layer number.
            query: [any, h, d]; entries after the tokens of the batch are padding.
            key: [any, g, d].
            value: [any, g, d].
            output: [any, h, d]; written, and 0 for padding.
        """
        output[len(self.position) :] = 0
        if self.singles:
            self._decode(layer, query, key, value, output)
        for part in self.parts:
            self._prefill(layer, part, query, key, value, output)

    def _decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        first = slice(self.singles)
        step = Step(
            query=query[first],
            key=key[first],
            value=value[first],
            cos=self.cos[first],
            sin=self.sin[first],
            position=self.position[first],
            rows=self.rows[first],
        )
        output[first] = self.cache.decode(layer, step, self.cache.spec, None)

    def _prefill(
        self,
        layer: int,
        part: PromptPart,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
    ) -> None:
        tokens = slice(part.start, part.stop)
        groups = key.shape[1]
        step = AttentionStep(
            query=query[tokens].unflatten(1, (groups, -1))[None],
            key=key[tokens].unsqueeze(2)[None],
            value=value[tokens].unsqueeze(2)[None],
            cos=self.cos[None, tokens, None, None],
            sin=self.sin[None, tokens, None, None],
            position=self.position[None, tokens],
            rows=self.rows[part.request, None],
            spec=self.cache.spec,
            begins=part.begins,
            table=part.table,
        )
        output[tokens] = self.cache.step(layer, step).output[0].transpose(0, 1)


def batch_attention(
    cache: GrantedCache, input_batch: Any, position: Tensor, table: Tensor
) -> BatchAttention:
    """Describe a batch of vLLM for all layers.

    Args:
        cache: The cache.
        input_batch: vLLM's batch; requests with one token come first.
        position: int64 [t].
        table: RoPE by position, [positions, d]: cosines, then sines.
    """
    cos, sin = (torch.cat([x, x], 1) for x in table[position].chunk(2, 1))
    counts = input_batch.num_scheduled_tokens.tolist()
    starts = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    singles = counts.count(1)
    assert all(n == 1 for n in counts[:singles]), "vLLM no longer sorts single tokens first"
    parts = []
    for index in range(singles, len(counts)):
        tokens = slice(starts[index], starts[index + 1])
        angles = (x[None, tokens, None, None] for x in (cos, sin))
        begins = computed[index] == 0
        part = PromptPart(tokens.start, tokens.stop, index, begins, rotation_table(*angles))
        parts.append(part)
    rows = input_batch.idx_mapping.long()
    return BatchAttention(cache, position, cos, sin, rows, singles, parts)


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Fail: vLLM does not call it for a model with its own model state."""
        raise NotImplementedError("DMSModelState.prepare_attn describes batches")


class DMSBackend(AttentionBackend):
    """Attention backend of the layers of a retrofitted model."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012 - vLLM's

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration for backends of plugins."""
        return "CUSTOM"

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
    """Stands in for RoPE, which the kernels apply."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key unchanged."""
        return query, key
