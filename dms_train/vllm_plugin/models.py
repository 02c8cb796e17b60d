"""Models of vLLM whose attention evicts tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dms_train.inference.cache.paged import CacheSizes
from dms_train.kernels.decode.types import FP8
from dms_train.vllm_plugin.attention import DMSAttention, NoRotation
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool
from dms_train.vllm_plugin.settings import FP8_CACHES, read_dms_spec
from dms_train.vllm_plugin.state import DMSModelState


class Retrofit(NamedTuple):
    """Parts of a retrofitted model that its layers share.

    Attributes:
        attention: Attention layers, in order.
        cache: The cache.
        table: RoPE by position, [positions, head size]: cosines, then sines.
    """

    attention: list[DMSAttention]
    cache: GrantedCache
    table: Tensor


class Retrofitted(nn.Module):
    """Mixin of a model class: attention through the cache, RoPE in the kernels.

    Attributes:
        retrofit: Parts that the model state needs.
    """

    model: Any  # of the other base class

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        blocks = [layer.self_attn for layer in self.model.layers]
        table = blocks[0].rotary_emb.cos_sin_cache
        for number, block in enumerate(blocks):
            block.attn = DMSAttention(block.attn, number, len(blocks), vllm_config)
            block.rotary_emb = NoRotation()
        attention = [block.attn for block in blocks]
        # a tuple, so that torch registers no module twice
        self.retrofit = Retrofit(attention, _build_cache(attention, vllm_config, table), table)

    def get_model_state_cls(self) -> type[DMSModelState]:
        """Return the class of the model's state in model runner V2."""
        return DMSModelState


def _build_cache(
    attention: list[DMSAttention], vllm_config: VllmConfig, table: Tensor
) -> GrantedCache:
    """Allocate the page tables, which vLLM counts as memory of the model."""
    model, options, first = vllm_config.model_config, vllm_config.cache_config, attention[0]
    pool = GrantedPool(
        head_size=first.head_size,
        dtype=model.dtype,
        stored=FP8 if options.cache_dtype in FP8_CACHES else None,
        device=table.device,
        page_slots=options.block_size,
    )
    sizes = CacheSizes(
        layers=len(attention),
        rows=vllm_config.scheduler_config.max_num_seqs,
        heads=first.num_kv_heads,
        group=first.num_heads // first.num_kv_heads,
        longest=model.max_model_len,
    )
    return GrantedCache(pool, read_dms_spec(model.model), sizes)


class LlamaForCausalLMDMS(Retrofitted, LlamaForCausalLM):
    """Llama 2 and 3."""


class MistralForCausalLMDMS(Retrofitted, MistralForCausalLM):
    """Mistral with full attention."""


class Qwen2ForCausalLMDMS(Retrofitted, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLMDMS(Retrofitted, Qwen3ForCausalLM):
    """Qwen3, the dense models."""


class Qwen3MoeForCausalLMDMS(Retrofitted, Qwen3MoeForCausalLM):
    """Qwen3, the mixture-of-experts models; `settings` refuses them."""
