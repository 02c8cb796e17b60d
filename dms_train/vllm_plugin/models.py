"""Models of vLLM whose attention evicts tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.glm4 import Glm4ForCausalLM
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.stored import channel_order
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.models.blocks import rotary_tables
from dms_train.kernels.decode.types import FP8
from dms_train.vllm_plugin.attention import DMSAttention, NoRotation
from dms_train.vllm_plugin.batch import BatchAttention
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool, granted_cache
from dms_train.vllm_plugin.mixed_steps import MixedSteps
from dms_train.vllm_plugin.olmo3 import Olmo3Layer
from dms_train.vllm_plugin.settings import FP8_CACHES, read_dms_spec
from dms_train.vllm_plugin.state import DMSModelState


class Retrofit(NamedTuple):
    """Parts of a retrofitted model that its layers share.

    Attributes:
        attention: Attention layers, in order.
        cache: The cache.
        tables: RoPE of each layer by position, [positions, head size]: cosines, then sines.
    """

    attention: list[DMSAttention]
    cache: GrantedCache
    tables: list[Tensor]


class Retrofitted(nn.Module):
    """Mixin of a model class: attention through the cache, RoPE in the kernels.

    Attributes:
        attention_name: Attribute of a layer that holds its attention.
        retrofit: Parts that the model state needs.
        mixed_steps: Captured steps, which the model state sets.
    """

    attention_name = "self_attn"
    model: Any  # of the other base class
    mixed_steps: MixedSteps

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        a = read_architecture(resolve(vllm_config.model_config.model))
        blocks = [getattr(layer, self.attention_name) for layer in self.model.layers]
        order = torch.tensor(channel_order(a))
        for number, block in enumerate(blocks):
            block.attn = DMSAttention(block.attn, number, len(blocks), vllm_config)
            block.rotary_emb = NoRotation(block.scaling * block.head_dim**0.5, order)
        attention = [block.attn for block in blocks]
        cache = _build_cache(attention, vllm_config, [own.window for own in a.attention_layers])
        cache.sinks = [getattr(block, "sinks", None) for block in blocks]
        tables = _rotary_tables(a, vllm_config.model_config)
        # a tuple, so that torch registers no module twice
        self.retrofit = Retrofit(attention, cache, tables)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Return hidden states [t, hidden size]; replay a captured step if one fits the batch."""
        metadata = get_forward_context().attn_metadata or {}
        batch = metadata.get(self.retrofit.attention[0].layer_name)
        if isinstance(batch, BatchAttention) and inputs_embeds is None:
            kind = self.mixed_steps.kind_of(batch, len(input_ids))
            if kind is not None:
                return self.mixed_steps.run(kind, batch, input_ids, positions)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def hidden_states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute hidden states [t, hidden size] layer by layer."""
        return super().forward(input_ids, positions)

    def get_model_state_cls(self) -> type[DMSModelState]:
        """Return the class of the model's state in model runner V2."""
        return DMSModelState


def _rotary_tables(a: Architecture, config: ModelConfig) -> list[Tensor]:
    """Return RoPE of each layer by position, [positions, d]; layers with the same share one.

    vLLM's own tables leave out channels that RoPE does not rotate, and factors of YaRN.
    """
    position, half = torch.arange(config.max_model_len), a.kv_channels // 2
    tables = {}
    for rope in set(a.ropes):
        cos, sin = (x.flatten(1)[:, :half] for x in rotary_tables(a, position, config.dtype, rope))
        tables[rope] = torch.cat([cos, sin], 1)
    return [tables[rope] for rope in a.ropes]


def _build_cache(
    attention: list[DMSAttention], vllm_config: VllmConfig, windows: list[int | None]
) -> GrantedCache:
    """Allocate the page tables, which vLLM counts as memory of the model."""
    model, options, first = vllm_config.model_config, vllm_config.cache_config, attention[0]
    pool = GrantedPool(
        head_size=first.head_size,
        dtype=model.dtype,
        stored=FP8 if options.cache_dtype in FP8_CACHES else None,
        device=torch.get_default_device(),
        page_slots=options.block_size,
    )
    sizes = CacheSizes(
        layers=len(attention),
        rows=vllm_config.scheduler_config.max_num_seqs,
        heads=first.num_kv_heads,
        group=first.num_heads // first.num_kv_heads,
        longest=model.max_model_len,
    )
    return granted_cache(pool, read_dms_spec(model.model), sizes, windows)


class Gemma3ForCausalLMDMS(Retrofitted, Gemma3ForCausalLM):
    """Gemma 3, the language models."""


class Glm4ForCausalLMDMS(Retrofitted, Glm4ForCausalLM):
    """GLM-4."""


class GptOssForCausalLMDMS(Retrofitted, GptOssForCausalLM):
    """gpt-oss."""

    attention_name = "attn"
    # vLLM 0.24 names the experts so, but looks for them in bf16 under their earlier name
    hf_to_vllm_mapper = GptOssForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_substr={".mlp.experts.": ".mlp.experts.routed_experts."}
    )


class LlamaForCausalLMDMS(Retrofitted, LlamaForCausalLM):
    """Llama 2 and 3."""


class MistralForCausalLMDMS(Retrofitted, MistralForCausalLM):
    """Mistral with full attention."""


class Olmo3ForCausalLMDMS(Retrofitted, LlamaForCausalLM):
    """OLMo 3."""

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **_: Any) -> LlamaModel:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=Olmo3Layer)


class Phi3ForCausalLMDMS(Retrofitted, Phi3ForCausalLM):
    """Phi-4."""


class Qwen2ForCausalLMDMS(Retrofitted, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLMDMS(Retrofitted, Qwen3ForCausalLM):
    """Qwen3, the dense models."""


class Qwen3MoeForCausalLMDMS(Retrofitted, Qwen3MoeForCausalLM):
    """Qwen3, the mixture-of-experts models."""


class SmolLM3ForCausalLMDMS(Retrofitted, LlamaForCausalLM):
    """SmolLM3, which is Llama except for its layers without RoPE."""
