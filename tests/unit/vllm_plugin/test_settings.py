"""Options of vLLM that a retrofitted model refuses, and what it sets."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.hf.json_files import read_json, write_json
from tests.unit.inference.conftest import small_spec, tiny_architecture, varied_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BASE = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256}
PROCESSES = {"distributed_executor_backend": "mp"}  # without it vLLM counts the GPUs first
FP8 = ("fp8", "fp8_e4m3")
# name: options, environment, beginning of the reason
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "prefix caching": ({"enable_prefix_caching": True}, {}, "there is no prefix cache"),
    "speculation": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {},
        "speculative decoding",
    ),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        {},
        "KV connectors",
    ),
    "offloading": ({"kv_offloading_size": 1.0}, {}, "offloading finds no data in blocks"),
    "pipeline": ({"pipeline_parallel_size": 2, **PROCESSES}, {}, "pipeline parallelism"),
    "tensor parallel": (
        {"tensor_parallel_size": 4, **PROCESSES},
        {},
        "tensor_parallel_size=4 does not divide its 2 KV heads",
    ),
    "old runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "it needs model runner V2"),
    "NaN check": ({}, {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}, "VLLM_COMPUTE_NANS_IN_LOGITS use"),
    "e5m2 cache": ({"kv_cache_dtype": "fp8_e5m2"}, {}, "kv_cache_dtype=fp8_e5m2 is not supported"),
    "odd blocks": ({"block_size": 48}, {}, "block_size=48 is not a power of two"),
    "lora": ({"enable_lora": True}, {}, "LoRA changes the eviction channel"),
    "own RoPE": (
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {},
        "RoPE comes from the export",
    ),
    "own scheduler": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        {},
        "it has a scheduler of its own",
    ),
    "own backend": ({"attention_backend": "FLASH_ATTN"}, {}, "it has an attention backend"),
}
REFUSED["stock torch.compile"] = (
    {"compilation_config": {"mode": 1}},
    {},
    "torch.compile cannot trace the cache",
)
if any(d.version.startswith("0.33.") for d in metadata.distributions(name="vllm")):
    REFUSED["sharded sampling"] = (
        {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True, **PROCESSES},
        {},
        "each rank reports all requests",
    )

_QWEN3 = tiny_architecture("qwen3")
_GLOBAL, _LOCAL = (LayerAttention(rotary_base=_QWEN3.rotary_base, window=w) for w in (None, 8))
WINDOWED = replace(_QWEN3, layers=(_GLOBAL, _LOCAL))


def write(
    path: Path,
    *,
    retrofitted: bool,
    a: Architecture = _QWEN3,
    preset: str = "dms_fastdms",
    export_format: str = "fastdms",
) -> Path:
    write_export(
        path,
        architecture=a,
        spec=small_spec(preset) if retrofitted else None,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.bfloat16,
        export_format=export_format,
        weights=varied_weights(a, 0).items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    return path


def list_as(path: Path, architecture: str) -> None:
    config = read_json(path / "config.json")
    write_json(path / "config.json", {**config, "architectures": [architecture]})


@pytest.fixture(scope="module")
def configured(in_vllm, tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    export = write(folder / "export", retrofitted=True)
    dense = write(folder / "dense", retrofitted=False)
    plain = write(folder / "plain", retrofitted=True)
    list_as(plain, "Qwen3ForCausalLM")
    mislabelled = write(folder / "mislabelled", retrofitted=False)
    list_as(mislabelled, "Qwen3ForCausalLMDMS")
    cases = {
        name: (export, options, environment) for name, (options, environment, _) in REFUSED.items()
    }
    adapter = write(folder / "adapter", retrofitted=True, preset="dms", export_format="dms")
    (adapter / "model.safetensors").unlink()
    (adapter / "adapter").mkdir()
    write_json(adapter / "adapter" / "adapter_config.json", {})
    others = {
        "adapter": adapter,
        "export": export,
        "dense": dense,
        "plain": plain,
        "mislabelled": mislabelled,
    }
    as_dms = {"retrofitted": True, "preset": "dms", "export_format": "dms"}
    windowed = write(folder / "windowed", a=WINDOWED, **as_dms)
    wide = replace(tiny_architecture("qwen2"), kv_channels=64)
    others["wide heads"] = write(folder / "wide", a=wide, **as_dms)
    others["own epsilon"] = write(folder / "epsilon", a=tiny_architecture("gpt_oss"), **as_dms)
    cases["windowed, fp8"] = (windowed, {"kv_cache_dtype": "fp8"}, {})
    others["windowed"] = windowed
    cases |= {name: (path, {}, {}) for name, path in others.items()}
    architecture = {"hf_overrides": {"architectures": ["Qwen3ForCausalLMDMS"]}}
    cases["plain, overridden"] = (plain, architecture, {})
    cases |= {name: (export, {"kv_cache_dtype": name}, {}) for name in FP8}
    jobs = [
        {"model": str(path), "options": {**BASE, **options}, "environment": environment}
        for path, options, environment in cases.values()
    ]
    return dict(zip(cases, in_vllm("configure", jobs), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_in_one_line(configured, name):
    error = configured[name]["error"]
    assert error.startswith(f"PluginError: a DMS model in vLLM: {REFUSED[name][2]}")
    assert "\n" not in error


def test_fp8_is_refused_for_layers_with_a_window_in_one_line(configured):
    reason = "layers with a sliding window store no fp8; remove kv_cache_dtype=fp8"
    assert configured["windowed, fp8"]["error"] == f"PluginError: a DMS model in vLLM: {reason}"


def test_a_head_size_that_vllm_does_not_read_is_refused(configured):
    error = configured["wide heads"]["error"]
    assert error.startswith("PluginError")
    assert "heads of 64 channels, for which vLLM takes" in error
    assert error.endswith("in a qwen2 model; serve it with dms-serve")


def test_a_norm_epsilon_that_vllm_does_not_read_is_refused(configured):
    error = configured["own epsilon"]["error"]
    assert error.startswith("PluginError")
    reason = "rms_norm_eps=1e-06, for which vLLM takes 1e-05 in a gpt_oss model; serve it with "
    assert error.endswith(reason + "dms-serve")


def test_values_of_gpt_oss_that_vllm_ignores_are_refused():
    settings = pytest.importorskip("dms_train.vllm_plugin.settings", exc_type=ImportError)
    a = replace(tiny_architecture("gpt_oss"), layernorm_epsilon=1e-5)
    assert list(settings._values_not_read(a)) == []
    (tied,) = settings._values_not_read(replace(a, tie_word_embeddings=True))
    assert tied.startswith("tie_word_embeddings=true")
    (rope,) = settings._values_not_read(replace(a, rope_scaling=None))
    assert rope.startswith("RoPE without YaRN")


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ({}, False),
        ({"architectures": ["EuropeForCausalLMDMS"]}, False),
        ({"text_config": {"rope_theta": 1e4}}, True),
        ({"partial_rotary_factor": 0.5}, True),
        (len, True),
    ],
    ids=["none", "architecture", "nested", "partial", "function"],
)
def test_overrides_that_may_change_rope_are_refused(overrides, refused):
    settings = pytest.importorskip("dms_train.vllm_plugin.settings", exc_type=ImportError)
    assert settings._changes_rope(overrides) == refused


def test_an_adapter_is_refused(configured):
    error = configured["adapter"]["error"]
    assert error.startswith("PluginError")
    assert error.endswith("an adapter; merge it with dms-import and dms-export")


def test_a_dms_model_under_a_plain_architecture_is_refused(configured):
    error = configured["plain"]["error"]
    assert "a DMS model listed as Qwen3ForCausalLM" in error
    assert '--hf-overrides \'{"architectures": ["Qwen3ForCausalLMDMS"]}\'' in error
    assert error.startswith("PluginError")


def test_a_dense_model_under_the_architecture_of_dms_is_refused(configured):
    assert "it is a dense model" in configured["mislabelled"]["error"]


@pytest.mark.parametrize("name", ["export", "windowed", "plain, overridden", *FP8])
def test_an_export_gets_its_scheduler_and_no_prefix_cache(configured, name):
    assert configured[name] == {
        "scheduler": "dms_train.vllm_plugin.scheduler.build_scheduler",
        "prefix_caching": False,
    }


def test_a_dense_model_is_left_alone(configured):
    assert configured["dense"] == {"scheduler": None, "prefix_caching": True}
