"""Configurations of exports in the dms format, whose model type transformers does not know.

They are classes of a module, because vLLM pickles a configuration for its processes.
"""

from __future__ import annotations

from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)


class LlamaConfigDMS(LlamaConfig):
    """Llama 2 and 3."""

    model_type = "dms_llama"


class MistralConfigDMS(MistralConfig):
    """Mistral with full attention."""

    model_type = "dms_mistral"


class Qwen2ConfigDMS(Qwen2Config):
    """Qwen2 and Qwen2.5."""

    model_type = "dms_qwen2"


class Qwen3ConfigDMS(Qwen3Config):
    """Qwen3, the dense models."""

    model_type = "dms_qwen3"


class Qwen3MoeConfigDMS(Qwen3MoeConfig):
    """Qwen3, the mixture-of-experts models."""

    model_type = "dms_qwen3_moe"


CONFIGURATIONS: tuple[type[PretrainedConfig], ...] = (
    LlamaConfigDMS,
    MistralConfigDMS,
    Qwen2ConfigDMS,
    Qwen3ConfigDMS,
    Qwen3MoeConfigDMS,
)


def register_configurations() -> None:
    """Let transformers load exports in the dms format without their own code."""
    for configuration in CONFIGURATIONS:
        AutoConfig.register(configuration.model_type, configuration, exist_ok=True)
