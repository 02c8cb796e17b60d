"""Registration of the plugin, which vLLM calls in each of its processes."""

from __future__ import annotations

from dms_train.families import FAMILIES

SERVED_FAMILIES = (
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "llama",
    "mistral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Families with a class in `models` and one in `configurations`."""


def register() -> None:
    """Register configurations, models, the KV cache and its manager; several calls are allowed.

    Raises:
        PluginError: The version of vLLM is not supported.
    """
    from dms_train.vllm_plugin import compat
    from dms_train.vllm_plugin.configurations import register_configurations

    compat.require_supported()
    register_configurations()
    _register_models()
    compat.prefer_model_runner_v2(retrofitted_architectures())
    compat.disable_prefix_caching(retrofitted_architectures())


def retrofitted_architectures() -> frozenset[str]:
    """Return the names in `architectures` of config.json that the plugin serves."""
    return frozenset(f"{FAMILIES[name].causal_lm}DMS" for name in SERVED_FAMILIES)


def _register_models() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from dms_train.vllm_plugin.credit import CreditManager, DMSCacheSpec
    from dms_train.vllm_plugin.settings import PlainConfig, RetrofittedConfig

    for family in map(FAMILIES.__getitem__, SERVED_FAMILIES):
        name = f"{family.causal_lm}DMS"
        ModelRegistry.register_model(name, f"dms_train.vllm_plugin.models:{name}")
        MODELS_CONFIG_MAP[name] = RetrofittedConfig
        MODELS_CONFIG_MAP.setdefault(family.causal_lm, PlainConfig)
    register_backend(AttentionBackendEnum.CUSTOM, "dms_train.vllm_plugin.attention.DMSBackend")
    KVCacheSpecRegistry.register(DMSCacheSpec, CreditManager, uniform_type_base_spec=DMSCacheSpec)
