"""Configurations of exports in the dms format, whose model type transformers does not know.

They are classes of a module, because vLLM pickles a configuration for its processes.
"""

from __future__ import annotations

from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)


class Gemma3TextConfigDMS(Gemma3TextConfig):
    """Gemma 3, the language models."""

    model_type = "dms_gemma3_text"


class Glm4ConfigDMS(Glm4Config):
    """GLM-4."""

    model_type = "dms_glm4"


class GptOssConfigDMS(GptOssConfig):
    """gpt-oss."""

    model_type = "dms_gpt_oss"


class LlamaConfigDMS(LlamaConfig):
    """Llama 2 and 3."""

    model_type = "dms_llama"


class MistralConfigDMS(MistralConfig):
    """Mistral with full attention."""

    model_type = "dms_mistral"


class Olmo3ConfigDMS(Olmo3Config):
    """OLMo 3."""

    model_type = "dms_olmo3"


class Phi3ConfigDMS(Phi3Config):
    """Phi-4."""

    model_type = "dms_phi3"


class Qwen2ConfigDMS(Qwen2Config):
    """Qwen2 and Qwen2.5."""

    model_type = "dms_qwen2"


class Qwen3ConfigDMS(Qwen3Config):
    """Qwen3, the dense models."""

    model_type = "dms_qwen3"


class Qwen3MoeConfigDMS(Qwen3MoeConfig):
    """Qwen3, the mixture-of-experts models."""

    model_type = "dms_qwen3_moe"


class SmolLM3ConfigDMS(SmolLM3Config):
    """SmolLM3."""

    model_type = "dms_smollm3"


CONFIGURATIONS: tuple[type[PretrainedConfig], ...] = (
    Gemma3TextConfigDMS,
    Glm4ConfigDMS,
    GptOssConfigDMS,
    LlamaConfigDMS,
    MistralConfigDMS,
    Olmo3ConfigDMS,
    Phi3ConfigDMS,
    Qwen2ConfigDMS,
    Qwen3ConfigDMS,
    Qwen3MoeConfigDMS,
    SmolLM3ConfigDMS,
)


def register_configurations() -> None:
    """Let transformers load exports in the dms format without their own code."""
    for configuration in CONFIGURATIONS:
        AutoConfig.register(configuration.model_type, configuration, exist_ok=True)
