"""Configuration of vLLM for retrofitted models: what is set, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm.config import CompilationMode, ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.formats import read_spec
from dms_train.hf.side_files import is_adapter
from dms_train.method.dms.spec import DMSSpec
from dms_train.vllm_plugin.errors import PluginError

SCHEDULER = "dms_train.vllm_plugin.scheduler.build_scheduler"
FP8_CACHES = ("fp8", "fp8_e4m3")  # two names of one dtype
_HEAD_SIZE_FROM_HIDDEN = ("qwen2",)  # vLLM's classes that do not read `head_dim`
_GPT_OSS_EPSILON = 1e-5  # vLLM's class does not read `rms_norm_eps`
_NAN_CHECKS = ("VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS")


def read_dms_spec(model: str | Path) -> DMSSpec:
    """Read the specification of a model directory or of a downloaded hub model.

    Raises:
        PluginError: The model was not retrofitted with DMS, or it is an adapter.
        HFError: The directory is damaged.
        FileNotFoundError: There is no such directory.
    """
    directory = resolve(model)
    if is_adapter(directory):
        raise PluginError(f"{model}: an adapter; merge it with dms-import and dms-export")
    spec = read_spec(directory)
    if isinstance(spec, DMSSpec):
        return spec
    found = "it is a dense model" if spec is None else f"it was trained for {spec.kind}"
    raise PluginError(f"{model}: {found}; give an export that was retrofitted with dms")


def layer_windows(model: str | Path) -> list[int | None]:
    """Return the tokens that a query reads in each layer of a model directory; None for all."""
    return [layer.window for layer in read_architecture(resolve(model)).attention_layers]


def _require_read_values(model: str | Path) -> None:
    """Refuse values that vLLM does not read from config.json, if it would take others.

    Raises:
        PluginError: The model is of such a family and has such a value.
    """
    a = read_architecture(resolve(model))
    for problem in _values_not_read(a):
        raise PluginError(f"{model}: {problem} in a {a.family} model; serve it with dms-serve")


def _values_not_read(a: Architecture) -> Iterator[str]:
    """Yield each value of an architecture that vLLM takes for another one."""
    taken = a.hidden_size // a.num_attention_heads
    if a.family in _HEAD_SIZE_FROM_HIDDEN and a.kv_channels != taken:
        yield (
            f"heads of {a.kv_channels} channels, for which vLLM takes {taken}, its hidden size by "
            "heads,"
        )
    if a.family != "gpt_oss":
        return
    if a.layernorm_epsilon != _GPT_OSS_EPSILON:
        yield f"rms_norm_eps={a.layernorm_epsilon}, for which vLLM takes {_GPT_OSS_EPSILON}"
    if a.tie_word_embeddings:
        yield "tie_word_embeddings=true, which vLLM does not read"
    if a.rope_scaling is None or a.rope_scaling.rope_type != "yarn":
        yield "RoPE without YaRN, which vLLM cannot compute"


class RetrofittedConfig(VerifyAndUpdateConfig):
    """Hook of vLLM for the architectures `<Family>ForCausalLMDMS`."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse options that DMS does not support; choose scheduler and attention backend.

        Raises:
            PluginError: One line that names the option.
        """
        model = vllm_config.model_config.model
        read_dms_spec(model)
        _require_read_values(model)
        for refused, message in _refusals(vllm_config):
            if refused:
                raise PluginError(f"a DMS model in vLLM: {message}")
        config = vllm_config.model_config.hf_text_config
        if hasattr(config, "max_window_layers"):
            # vLLM refuses Qwen with windows in some layers, whose attention the plugin replaces
            config.max_window_layers = config.num_hidden_layers
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM


class PlainConfig(VerifyAndUpdateConfig):
    """Hook of vLLM for the architectures of dense models."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse a retrofitted model, which vLLM would run without eviction.

        Raises:
            PluginError: One line that names the architecture to set.
        """
        model = vllm_config.model_config
        if _is_retrofitted(model):
            raise PluginError(
                f"{model.model}: a DMS model listed as {model.architecture}; "
                f'pass --hf-overrides \'{{"architectures": ["{model.architecture}DMS"]}}\''
            )


def _is_retrofitted(model: ModelConfig) -> bool:
    """Return whether a model directory, or else the configuration that vLLM read, names DMS."""
    if Path(model.model).is_dir():
        return read_spec(model.model) is not None
    values = model.hf_config.to_dict()
    return "dms" in values or "dms_window_size" in values


def _refusals(config: VllmConfig) -> list[tuple[Any, str]]:
    """Return conditions under which an option is refused, each with what is wrong and the fix."""
    return [*_cache_refusals(config), *_parallel_refusals(config), *_other_refusals(config)]


def _cache_refusals(config: VllmConfig) -> list[tuple[Any, str]]:
    cache, size = config.cache_config, config.cache_config.block_size
    return [
        (
            cache.enable_prefix_caching,
            "there is no prefix cache; remove --enable-prefix-caching",
        ),
        (
            config.speculative_config,
            "speculative decoding cannot undo an eviction; remove --speculative-config",
        ),
        (
            config.kv_transfer_config,
            "KV connectors find no data in blocks; remove --kv-transfer-config",
        ),
        (
            cache.kv_offloading_size,
            "offloading finds no data in blocks; remove --kv-offloading-size",
        ),
        (
            cache.cache_dtype not in ("auto", *FP8_CACHES),
            f"kv_cache_dtype={cache.cache_dtype} is not supported; use auto or fp8",
        ),
        (
            cache.cache_dtype in FP8_CACHES and any(layer_windows(config.model_config.model)),
            f"layers with a sliding window store no fp8; remove kv_cache_dtype={cache.cache_dtype}",
        ),
        (
            config.model_config.enable_sleep_mode,
            "sleep mode drops the cache; remove --enable-sleep-mode",
        ),
        (size & (size - 1), f"block_size={size} is not a power of two; use 16"),
    ]


def _parallel_refusals(config: VllmConfig) -> list[tuple[Any, str]]:
    parallel = config.parallel_config
    heads, ranks = config.model_config.get_total_num_kv_heads(), parallel.tensor_parallel_size
    return [
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is not supported; remove --pipeline-parallel-size",
        ),
        (
            heads % ranks,
            f"tensor_parallel_size={ranks} does not divide its {heads} KV heads; lower it",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is not supported; use a size of 1",
        ),
        (parallel.enable_dbo, "dual batch overlap is not supported; remove --enable-dbo"),
        (
            getattr(parallel, "enable_batch_sharded_sampling", False),  # since 0.33
            "each rank reports all requests; remove --enable-batch-sharded-sampling",
        ),
    ]


def _changes_rope(overrides: Any) -> bool:
    """Return whether --hf-overrides may change RoPE; a function may change anything."""
    if not isinstance(overrides, dict):
        return callable(overrides)
    named = any(key.startswith("rope") or key == "partial_rotary_factor" for key in overrides)
    return named or any(_changes_rope(each) for each in overrides.values())


def _other_refusals(config: VllmConfig) -> list[tuple[Any, str]]:
    runner = config.model_config.runner_type
    nan_checks = [name for name in _NAN_CHECKS if getattr(envs, name, False)]
    return [
        (config.lora_config, "LoRA changes the eviction channel; remove --enable-lora"),
        (
            config.scheduler_config.scheduler_cls not in (None, SCHEDULER),
            "it has a scheduler of its own; remove --scheduler-cls",
        ),
        (
            config.attention_config.backend not in (None, AttentionBackendEnum.CUSTOM),
            "it has an attention backend of its own; remove --attention-backend",
        ),
        (
            _changes_rope(config.model_config.hf_overrides),
            "RoPE comes from the export; remove functions, rope_parameters and "
            "partial_rotary_factor from --hf-overrides",
        ),
        (
            config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE,
            "torch.compile cannot trace the cache; remove mode from --compilation-config",
        ),
        (runner != "generate", f"runner={runner} is not supported; use generate"),
        (
            nan_checks,
            f"{' and '.join(nan_checks)} use the channel that reports pages; unset them",
        ),
        (
            not config.use_v2_model_runner,
            "it needs model runner V2; unset VLLM_USE_V2_MODEL_RUNNER, and remove the options that "
            "vLLM's warning names, if there is one",
        ),
    ]
