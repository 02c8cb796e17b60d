"""Export formats: what each consumer reads, what it would misread, and reading it back.

`dms` is this project's own format. `nvidia` and `fastdms` are laid out for NVIDIA's public DMS
code and for the FastDMS engine; both know only some specifications, and neither format can say
which shift or channel a checkpoint was trained with, so everything else is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dms_train.hf.architecture import Architecture, from_hf_config
from dms_train.hf.directory import dtype_name, read_config, read_json
from dms_train.hf.errors import HFError
from dms_train.hf.fastdms import METADATA_FILE, stated_cr, stated_spec
from dms_train.method.spec import PRESETS, DMSSpec

FORMATS = ("dms", "nvidia", "fastdms")
DECISION_SOURCE = "borrowed_query_last_channel"
# FlashAttention-2's paged kernel takes page sizes that are multiples of this many tokens.
_PAGE_MULTIPLE = 256
_FLAT_KEYS = ("dms_window_size", "dms_alpha_scale", "dms_initial_alpha_offset", "dms_cr")
_SWITCHES = {"dms_separate_alpha": False, "dms_alpha_per": "head", "dms_disable_eviction": False}


class ExportRefused(ValueError):
    """The consumer of a format would silently compute something else with these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Consumer:
    """What the code behind an interop format computes.

    Attributes:
        title: Its name in messages.
        families: Model families it has DMS code for.
        decision_shift: The only shift it knows.
        clear_after_rope: Whether it clears the lane again after RoPE.
        max_group: Most query heads per KV head its kernels take.
        max_head_size: Largest head size its kernels take.
    """

    title: str
    families: tuple[str, ...]
    decision_shift: int
    clear_after_rope: bool
    max_group: int | None = None
    max_head_size: int | None = None


_CONSUMERS = {
    "nvidia": _Consumer(
        title="NVIDIA's DMS code",
        families=("qwen3",),
        decision_shift=1,
        clear_after_rope=True,
    ),
    "fastdms": _Consumer(
        title="FastDMS",
        families=("qwen3", "llama"),
        decision_shift=0,
        clear_after_rope=False,
        max_group=8,
        max_head_size=128,
    ),
}


def default_format(spec: DMSSpec) -> str:
    """The format that goes with the spec's preset."""
    return {"dms_nvidia": "nvidia", "dms_fastdms": "fastdms"}.get(spec.preset, "dms")


def _require_format(export_format: str) -> None:
    if export_format not in FORMATS:
        raise ExportRefused(f"export format {export_format!r}: choose one of {', '.join(FORMATS)}")


def _method_problem(consumer: _Consumer, spec: DMSSpec) -> str | None:
    if spec.channel != -1:
        return f"method.channel={spec.channel}: it reads the last channel (-1)"
    if spec.decision_shift != consumer.decision_shift:
        return (
            f"method.decision_shift={spec.decision_shift}: it evicts with shift "
            f"{consumer.decision_shift}, and weights cannot be converted"
        )
    if spec.eviction != "delayed":
        return f"method.eviction={spec.eviction}: it knows only delayed eviction"
    if spec.clear_after_rope != consumer.clear_after_rope:
        does = "clears" if consumer.clear_after_rope else "does not clear"
        return f"method.clear_after_rope={spec.clear_after_rope}: it {does} the lane after RoPE"
    return None


def _model_problem(consumer: _Consumer, a: Architecture, dtype: torch.dtype) -> str | None:
    if a.family not in consumer.families:
        return f"family {a.family}: it has DMS code for {', '.join(consumer.families)} only"
    if a.family == "qwen3" and a.rope_scaling is not None:
        return "rope_scaling on qwen3: it is ignored"
    group = a.num_attention_heads // a.num_query_groups
    if consumer.max_group is not None and group > consumer.max_group:
        return f"{group} query heads per KV head: its kernels take up to {consumer.max_group}"
    if consumer.max_head_size is not None and a.kv_channels > consumer.max_head_size:
        return f"head size {a.kv_channels}: its kernels take up to {consumer.max_head_size}"
    if dtype != torch.bfloat16:
        return f"dtype {dtype_name(dtype)}: export bfloat16"
    return None


def _window_problem(export_format: str, spec: DMSSpec, block_size: int) -> str | None:
    if export_format == "nvidia" and spec.window <= block_size:
        return (
            f"method.window={spec.window}: it needs a window larger than the cache page of "
            f"{block_size} tokens; train with a larger window or export a smaller block_size"
        )
    return None


def check_export(
    export_format: str,
    spec: DMSSpec,
    architecture: Architecture,
    dtype: torch.dtype,
    cr: float,
    block_size: int,
) -> list[str]:
    """Check that the consumer of a format computes what was trained.

    Args:
        export_format: `dms`, `nvidia` or `fastdms`.
        spec: What was trained.
        architecture: The model.
        dtype: Dtype of the exported weights.
        cr: Compression ratio asked for in training, at least 1.
        block_size: Tokens per page of NVIDIA's paged cache.

    Returns:
        Advice, one line each: correct to load, but worth knowing.

    Raises:
        ExportRefused: The first reason why the weights would be misread.
    """
    _require_format(export_format)
    if not cr >= 1:
        raise ExportRefused(f"compression ratio {cr}: a factor of at least 1")
    if export_format == "dms":
        return []
    consumer = _CONSUMERS[export_format]
    problem = (
        _method_problem(consumer, spec)
        or _model_problem(consumer, architecture, dtype)
        or _window_problem(export_format, spec, block_size)
    )
    if problem:
        raise ExportRefused(
            f"export format {export_format} ({consumer.title}): {problem}; "
            "or export in format dms, which every spec fits"
        )
    return _advice(export_format, architecture, cr, block_size)


def _advice(export_format: str, architecture: Architecture, cr: float, block: int) -> list[str]:
    advice = []
    if cr != int(cr):
        advice.append(f"dms_cr is an integer: {cr} is written as {int(cr)}")
    if export_format == "nvidia" and block % _PAGE_MULTIPLE:
        advice.append(f"block_size {block}: FlashAttention-2 needs a multiple of {_PAGE_MULTIPLE}")
    if export_format == "fastdms":
        advice.append("FastDMS attends densely inside the prompt; training masked it")
        if architecture.kv_channels < 32:
            advice.append("head size below 32: FastDMS' inline RoPE kernel does not take it")
    return advice


def code_files(family: str) -> dict[str, str]:
    """Files of `hf/code` by the name they get in an export."""
    return {f"{stem}_{family}_dms.py": f"{stem}_dms.py" for stem in ("configuration", "modeling")}


def config_keys(
    export_format: str,
    spec: DMSSpec,
    family: str,
    *,
    cr_factor: float | None,
    target_cr: float,
    block_size: int,
) -> dict[str, Any]:
    """What an export adds to (or replaces in) config.json.

    Args:
        export_format: `dms`, `nvidia` or `fastdms`.
        spec: What was trained.
        family: Model family.
        cr_factor: Measured tokens seen per slot held, or None.
        target_cr: Compression ratio asked for in training.
        block_size: Tokens per page of NVIDIA's paged cache.

    Returns:
        A mapping to merge into config.json. Own format: one nested key `dms` and a model_type
        that plain transformers does not know. Interop formats: flat keys, native model_type.
    """
    title = family.capitalize()
    keys: dict[str, Any] = {
        "architectures": [f"{title}ForCausalLMDMS"],
        "use_cache": True,
        "auto_map": {
            "AutoConfig": f"configuration_{family}_dms.{title}ConfigDMS",
            "AutoModelForCausalLM": f"modeling_{family}_dms.{title}ForCausalLMDMS",
        },
    }
    if export_format == "dms":
        dms = {"spec": spec.to_dict(), "cr_factor": cr_factor, "target_cr": target_cr}
        return {**keys, "model_type": f"dms_{family}", "dms": dms}
    return {
        **keys,
        "model_type": family,
        "dms_alpha_scale": spec.alpha_scale,
        "dms_initial_alpha_offset": spec.alpha_offset,
        "dms_window_size": spec.window,
        "dms_paged_attention_block_size": block_size,
        "dms_cr": int(target_cr),  # rounded down: never claims more than was asked for
        "dms_tau": spec.tau,
        **_SWITCHES,
        "dms_decision_shift": spec.decision_shift,
    }


def metadata(
    spec: DMSSpec, architecture: Architecture, *, target_cr: float, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Content of dms_metadata.json, which interop exports carry beside config.json."""
    return {
        "format_version": 1,
        "config": {
            "window_size": spec.window,
            "alpha_scale": spec.alpha_scale,
            "alpha_offset": spec.alpha_offset,
            "target_cr": int(target_cr),
            "context_len": architecture.max_position_embeddings,
            "compression_mode": "relu",
            "dms_decision_shift": spec.decision_shift,
            "decision_source": DECISION_SOURCE,
        },
        "provenance": {**provenance, "spec": spec.to_dict()},
    }


def read_spec(directory: str | Path, *, adapter: bool = False) -> DMSSpec | None:
    """The specification of a DMS model in any of the formats, or None for a dense model.

    Interop formats do not state everything: shift 1 (or none) means NVIDIA's conventions, shift 0
    those of FastDMS. Values that matter only in training come from our provenance if present.

    Args:
        directory: The export.
        adapter: Whether the caller knows the adapter variant; its spec has no meaningful channel.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If the keys are incomplete, contradictory or of a variant not supported.
    """
    directory = Path(directory)
    config = read_config(directory)
    if "dms" in config:
        return _own_spec(directory, config["dms"])
    present = [key for key in _FLAT_KEYS if key in config]
    if not present:
        return stated_spec(directory)
    from_hf_config(config)
    for key, only in _SWITCHES.items():
        if adapter and key == "dms_separate_alpha":
            continue
        if config.get(key, only) != only:
            raise HFError(f"{directory}: {key}={config[key]!r} is not supported, only {only!r}")
    if "dms_window_size" not in config:
        raise HFError(f"{directory}: config.json has {present[0]} but no dms_window_size")
    return _flat_spec(directory, config)


def _own_spec(directory: Path, dms: Any) -> DMSSpec:
    if not isinstance(dms, dict) or not isinstance(dms.get("spec"), dict):
        raise HFError(f"{directory}: config.json has a `dms` key without a spec")
    return _spec(directory, dms["spec"])


def _spec(directory: Path, values: dict[str, Any]) -> DMSSpec:
    try:
        return DMSSpec.from_dict(values)
    except (TypeError, ValueError) as error:
        raise HFError(f"{directory}: {error}; export it again") from None


def _flat_spec(directory: Path, config: dict[str, Any]) -> DMSSpec:
    path = directory / METADATA_FILE
    stored = read_json(path) if path.is_file() else {}
    shift = config.get("dms_decision_shift", 1)
    base = PRESETS["dms_fastdms" if shift == 0 else "dms_nvidia"]
    recorded = (stored.get("provenance") or {}).get("spec")
    stated = {
        "channel": base.channel,
        "eviction": base.eviction,
        "clear_after_rope": base.clear_after_rope,
        "decision_shift": shift,
        "window": config["dms_window_size"],
        "alpha_scale": config.get("dms_alpha_scale", base.alpha_scale),
        "alpha_offset": config.get("dms_initial_alpha_offset", base.alpha_offset),
        "tau": config.get("dms_tau"),
    }
    known = {key: value for key, value in stated.items() if value is not None}
    spec = _spec(directory, {**(recorded or base.to_dict()), **known})
    _check_agreement(path, stored.get("config") or {}, spec)
    return spec


def _check_agreement(path: Path, stored: dict[str, Any], spec: DMSSpec) -> None:
    ours = {
        "window_size": spec.window,
        "alpha_scale": spec.alpha_scale,
        "alpha_offset": spec.alpha_offset,
        "dms_decision_shift": spec.decision_shift,
        "decision_source": DECISION_SOURCE,
    }
    for key, value in ours.items():
        if stored.get(key, value) != value:
            raise HFError(f"{path}: {key}={stored[key]!r} but config.json says {value!r}")


def read_format(directory: str | Path) -> str | None:
    """`dms`, `nvidia`, `fastdms`, or None for a dense model; errors as `read_spec`."""
    spec = read_spec(directory)
    if spec is None:
        return None
    if "dms" in read_config(directory):
        return "dms"
    return "fastdms" if spec.decision_shift == 0 else "nvidia"


def read_target_cr(directory: str | Path) -> float:
    """The compression ratio an export was trained for; 1 for a dense model."""
    config = read_config(directory)
    if "dms" in config:
        return float(config["dms"].get("target_cr", 1.0))
    return float(config.get("dms_cr") or stated_cr(Path(directory)))
