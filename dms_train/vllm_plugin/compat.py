"""All that depends on the version of vLLM: tested versions, required signatures, rebound names.

`REQUIRED` states what the plugin relies on. It holds in every tested version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from dms_train.vllm_plugin.errors import PluginError

TESTED = ("0.24", "0.33")

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_STATES = "vllm.v1.worker.gpu.model_states"
# By name: leading positional parameters, and further parameters or fields.
REQUIRED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm.model_executor.models.config:VerifyAndUpdateConfig.verify_and_update_config": (
        ("vllm_config",),
        (),
    ),
    "vllm.v1.attention.backends.registry:register_backend": (("backend", "class_path"), ()),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        ("kvcache_spec_cls", "manager_class"),
        ("uniform_type_base_spec",),
    ),
    f"{_MANAGER}.get_num_blocks_to_allocate": (
        ("self", "request_id", "num_tokens"),
        ("apply_admission_cap",),
    ),
    f"{_MANAGER}.allocate_new_blocks": (
        ("self", "request_id", "num_tokens"),
        (),
    ),
    f"{_MANAGER}.pop_blocks_for_free": (
        ("self", "request_id"),
        (),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        ("self", "scheduler_output", "model_runner_output"),
        (),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (("self",), ()),
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": (("self",), ()),
    "vllm.v1.metrics.stats:SchedulerStats": ((), ("running_lora_adapters",)),
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase.__init__": (
        ("self", "vllm_config", "engine_indexes"),
        (),
    ),
    "vllm.v1.metrics.loggers:StatLoggerBase.record": (
        ("self", "scheduler_stats", "iteration_stats"),
        ("engine_idx",),
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
        ("self", "scheduler_output"),
        (),
    ),
    f"{_STATES}.default:DefaultModelState.__init__": (
        ("self", "vllm_config", "model"),
        (),
    ),
    f"{_STATES}.default:DefaultModelState.add_request": (
        ("self", "req_index", "new_req_data"),
        (),
    ),
    f"{_STATES}.default:DefaultModelState.prepare_attn": (
        ("self", "input_batch"),
        ("for_capture",),
    ),
    f"{_STATES}.interface:ModelState.remove_request": (
        ("self", "req_id"),
        (),
    ),
    f"{_STATES}.interface:ModelState.custom_sampler": (
        ("self", "sampler"),
        (),
    ),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": ((), ("num_nans",)),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__": (("self", "logits", "input_batch"), ()),
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        (),
        (
            *("req_ids", "idx_mapping", "num_scheduled_tokens", "num_tokens"),
            *("query_start_loc", "query_start_loc_np", "num_computed_tokens_np", "positions"),
        ),
    ),
    "vllm.forward_context:set_forward_context": (
        ("attn_metadata", "vllm_config", "num_tokens"),
        (),
    ),
    "vllm.forward_context:ForwardContext": ((), ("attn_metadata",)),
    "vllm.forward_context:get_forward_context": ((), ()),
    "vllm.model_executor.offloader.base:get_offloader": ((), ()),
    "vllm.v1.outputs:ModelRunnerOutput": ((), ("num_nans_in_logits",)),
    "vllm.model_executor.layers.attention.attention:Attention.__init__": (
        ("self", "num_heads", "head_size", "scale"),
        ("num_kv_heads", "cache_config", "prefix"),
    ),
    "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec": (
        ("self", "vllm_config"),
        (),
    ),
}


def require_supported() -> None:
    """Check the version of vLLM and the signatures that the plugin relies on.

    Raises:
        PluginError: The version is not supported; one line names those that were tested.
    """
    import vllm

    version = vllm.__version__
    problem = None
    if not any(version.startswith(f"{tested}.") for tested in TESTED):
        problem = "the plugin was not tested with this version"
    else:
        problem = next(filter(None, map(_problem, REQUIRED)), None)
    if problem is not None:
        tested = " or ".join(f"{release}.*" for release in TESTED)
        raise PluginError(f"vllm {version}: {problem}; install vllm {tested}")


def difference(found: Iterable[str], first: tuple[str, ...], others: tuple[str, ...]) -> str | None:
    """Return the first required parameter that a signature lacks; None if it has all.

    Args:
        found: Names of parameters or fields, in order.
        first: Required leading parameters.
        others: Further required names.
    """
    names = list(found)
    for place, name in enumerate(first):
        if names[place : place + 1] != [name]:
            return name
    return next((name for name in others if name not in names), None)


def _problem(hook: str) -> str | None:
    """Return what is wrong with a name that the plugin relies on."""
    module, _, path = hook.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{hook} is missing"
    missing = difference(inspect.signature(found).parameters, *REQUIRED[hook])
    return None if missing is None else f"{hook} has no parameter {missing} in its place"


def prefer_model_runner_v2(architectures: frozenset[str]) -> None:
    """Run architectures in model runner V2, which newer versions do for all models."""
    from vllm.config import vllm as configuration

    default = getattr(configuration, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", None)
    if default is not None:
        configuration.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = default | architectures


def disable_prefix_caching(architectures: frozenset[str]) -> None:
    """Let vLLM turn prefix caching off for architectures, unless a user asks for it."""
    from vllm.config import ModelConfig

    supported: Any = ModelConfig.is_prefix_caching_supported
    if getattr(supported.fget, "knows_dms", False):
        return

    def is_supported(self: Any) -> bool:
        return self.architecture not in architectures and supported.fget(self)

    is_supported.knows_dms = True  # type: ignore[attr-defined]
    ModelConfig.is_prefix_caching_supported = property(is_supported)
