"""Export formats: what is refused, what is written, what is read back."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from dms_train.hf.directory import read_architecture
from dms_train.hf.errors import HFError
from dms_train.hf.formats import (
    FORMATS,
    ExportedModel,
    ExportRefused,
    check_export,
    default_format,
    read_format,
    read_spec,
    read_target_cr,
)
from dms_train.hf.formats.fastdms import LOG_FILE
from dms_train.hf.formats.flat import METADATA_FILE
from dms_train.hf.formats.registry import MARKER_FILE
from dms_train.hf.json_files import read_config, read_json
from dms_train.method.spec import PRESETS
from dms_train.version import __version__

BF16 = torch.bfloat16


def exported(spec, architecture, *, dtype="bfloat16", target_cr=8.0, block_size=256, **more):
    return ExportedModel(
        spec=spec,
        architecture=architecture,
        dtype=dtype,
        target_cr=target_cr,
        block_size=block_size,
        **more,
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("dms", "dms"), ("dms_nvidia", "nvidia"), ("dms_fastdms", "fastdms")],
)
def test_default_format(preset, expected):
    assert default_format(PRESETS[preset]) == expected


@pytest.mark.parametrize(
    ("target", "family", "change", "named"),
    [
        ("nvidia", "qwen3", {"channel": 0}, "channel"),
        ("nvidia", "qwen3", {"decision_shift": 0}, "decision_shift"),
        ("nvidia", "qwen3", {"eviction": "immediate"}, "eviction"),
        ("nvidia", "qwen3", {"clear_after_rope": False}, "clear_after_rope"),
        ("nvidia", "qwen3", {"window": 256}, "window"),
        ("nvidia", "llama", {}, "family"),
        ("nvidia", "qwen2", {}, "family"),
        ("nvidia", "qwen2", {"channel": 3}, "family"),  # another channel would not help
        ("fastdms", "qwen3", {"channel": 0}, "channel"),
        ("fastdms", "qwen3", {"decision_shift": 1}, "decision_shift"),
        ("fastdms", "llama", {"eviction": "immediate"}, "eviction"),
        ("fastdms", "llama", {"clear_after_rope": True}, "clear_after_rope"),
        ("fastdms", "qwen2", {}, "family"),
        ("other", "llama", {}, "choose one of"),
    ],
)
def test_refusals(architecture, target, family, change, named):
    base = PRESETS["dms_fastdms" if target == "fastdms" else "dms_nvidia"]
    with pytest.raises(ExportRefused, match=named) as error:
        check_export(target, exported(base.override(**change), architecture(family)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", ["nvidia", "fastdms"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_interop_is_bfloat16(architecture, target, dtype):
    spec = PRESETS[f"dms_{target}"]
    with pytest.raises(ExportRefused, match="bfloat16"):
        check_export(target, exported(spec, architecture("qwen3"), dtype=dtype))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 18}, "9 query heads"),
        ({"kv_channels": 256}, "head size 256"),
    ],
)
def test_kernel_limits(architecture, change, named):
    a = dataclasses.replace(architecture("qwen3"), **change)
    with pytest.raises(ExportRefused, match=named):
        check_export("fastdms", exported(PRESETS["dms_fastdms"], a))


def test_scaled_rope_on_qwen3(architecture):
    scaling = architecture("llama").rope_scaling
    a = dataclasses.replace(architecture("qwen3"), rope_scaling=scaling)
    with pytest.raises(ExportRefused, match="rope_scaling"):
        check_export("fastdms", exported(PRESETS["dms_fastdms"], a))


@pytest.mark.parametrize("cr", [0.5, float("nan")])
def test_impossible_compression(architecture, cr):
    with pytest.raises(ExportRefused, match="at least 1"):
        check_export("dms", exported(PRESETS["dms"], architecture("llama"), target_cr=cr))


def test_own_format_supports_every_spec(architecture):
    spec = PRESETS["dms"].override(eviction="immediate", window=7)
    model = exported(spec, architecture("qwen2"), dtype="float32", target_cr=2.5)
    assert check_export("dms", model) == []


def test_advice(architecture):
    spec = PRESETS["dms_nvidia"]
    model = exported(spec, architecture("qwen3"), target_cr=3.5, block_size=100)
    advice = check_export("nvidia", model)
    assert any("3.5 is written as 3" in line for line in advice)
    assert any("multiple of 256" in line for line in advice)
    assert check_export("nvidia", exported(spec, architecture("qwen3"))) == []
    advice = check_export("fastdms", exported(PRESETS["dms_fastdms"], architecture("llama")))
    assert any("densely" in line for line in advice)
    assert any("below 32" in line for line in advice)


def test_nvidia_keys(architecture):
    model = exported(PRESETS["dms_nvidia"], architecture("qwen3"), cr_factor=7.6)
    keys = FORMATS["nvidia"].config_keys(model)
    assert keys == {
        "model_type": "qwen3",
        "dms_alpha_scale": 100.0,
        "dms_initial_alpha_offset": 5.0,
        "dms_window_size": 512,
        "dms_paged_attention_block_size": 256,
        "dms_cr": 8,
        "dms_tau": 0.1,
        "dms_separate_alpha": False,
        "dms_alpha_per": "head",
        "dms_disable_eviction": False,
        "dms_decision_shift": 1,
    }


def test_own_keys_are_nested(architecture):
    model = exported(PRESETS["dms"], architecture("llama"), cr_factor=3.4, target_cr=4.0)
    keys = FORMATS["dms"].config_keys(model)
    assert keys["model_type"] == "dms_llama"
    assert keys["dms"] == {"spec": PRESETS["dms"].to_dict(), "cr_factor": 3.4, "target_cr": 4.0}
    assert not [key for key in keys if key.startswith("dms_")]


CHANGES = {
    "dms": {"eviction": "immediate", "decision_shift": 0, "tau": 0.3},
    "dms_nvidia": {"tau": 0.2, "alpha_scale": 50.0},
    "dms_fastdms": {"window": 9, "alpha_offset": 4.0},
}


@pytest.mark.parametrize("preset", CHANGES)
def test_read_back(export, spec, preset):
    s = spec(preset).override(**CHANGES[preset])
    directory = export("qwen3", s, dtype=BF16)
    assert read_spec(directory) == s
    assert read_format(directory) == default_format(s)


@pytest.mark.parametrize("preset", CHANGES)
def test_a_spec_of_version_1_is_read_in_every_format(export, spec, preset):
    s = spec(preset).override(**CHANGES[preset])
    directory = export("qwen3", s, dtype=BF16)
    training = {"alpha_in_loss": "soft", "aux_form": "sum", "kl_direction": "student_teacher"}
    former = {k: v for k, v in s.to_dict().items() if k != "version"} | training
    file = directory / ("config.json" if preset == "dms" else METADATA_FILE)
    stored = read_json(file)
    block = stored["dms"] if preset == "dms" else stored["provenance"]
    block["spec"] = former | {"kl_temperature": 2.0}
    file.write_text(json.dumps(stored))
    assert read_spec(directory) == s


def test_dense_model(export, stories):
    assert read_spec(stories) is None
    assert read_format(export("llama", None)) is None


def edit(path, **values):
    path.write_text(json.dumps({**read_json(path), **values}))


def test_without_provenance(export, spec):
    """An export written by others: flat keys alone give the consumer's conventions."""
    directory = export("qwen3", spec("dms_nvidia"), dtype=BF16)
    (directory / METADATA_FILE).unlink()
    config = read_config(directory)
    for key in ("dms_decision_shift", "dms_tau", "dms_alpha_scale", "dms_initial_alpha_offset"):
        del config[key]
    (directory / "config.json").write_text(json.dumps(config))
    assert read_spec(directory) == spec("dms_nvidia")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dms_separate_alpha": True}, "dms_separate_alpha"),
        ({"dms_alpha_per": "layer"}, "dms_alpha_per"),
        ({"dms_disable_eviction": True}, "dms_disable_eviction"),
        ({"dms_window_size": 5}, "window_size"),
        ({"dms_decision_shift": 0}, "dms_decision_shift"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dms": {}}, "without a spec"),
        ({"dms": {"spec": {"preset": "dms"}}}, "missing keys"),
    ],
)
def test_contradictions(export, spec, change, named):
    directory = export("qwen3", spec("dms_nvidia"), dtype=BF16)
    edit(directory / "config.json", **change)
    with pytest.raises(ValueError, match=named):
        read_spec(directory)


def test_missing_window(export, spec):
    directory = export("qwen3", spec("dms_nvidia"), dtype=BF16)
    config = read_config(directory)
    del config["dms_window_size"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no dms_window_size"):
        read_spec(directory)


def write(path, **values):
    path.write_text(json.dumps(values))


def fastdms_file(directory, name):
    """Return the path at which FastDMS looks for this file: the log lies one folder up."""
    return (directory.parent if name == LOG_FILE else directory) / name


@pytest.mark.parametrize("name", [LOG_FILE, METADATA_FILE])
def test_fastdms_states_it_outside_the_config(export, spec, name):
    directory = export("llama", None, dtype=BF16)
    stated = {"window_size": 4, "alpha_scale": 100.0, "alpha_offset": 5.0, "target_cr": 3}
    write(fastdms_file(directory, name), config=stated, log=[])
    assert read_spec(directory) == spec("dms_fastdms")
    assert (read_format(directory), read_target_cr(directory)) == ("fastdms", 3.0)


@pytest.mark.parametrize("stated", [{}, {"window_size": 4}, None])
def test_a_log_of_something_else(export, stated):
    directory = export("llama", None, dtype=BF16)
    write(directory.parent / LOG_FILE, config=stated)
    assert read_spec(directory) is None
    assert read_target_cr(directory) == 1.0


def test_the_config_wins_over_a_log(export, spec):
    directory = export("qwen3", spec("dms_nvidia"), dtype=BF16)
    stated = {"window_size": 9, "alpha_scale": 100.0, "alpha_offset": 5.0, "target_cr": 3}
    write(directory.parent / LOG_FILE, config=stated)
    assert read_spec(directory) == spec("dms_nvidia")


def test_a_broken_log(export):
    directory = export("llama", None, dtype=BF16)
    stated = {"window_size": 0, "alpha_scale": 100.0, "alpha_offset": 5.0}
    write(directory.parent / LOG_FILE, config=stated)
    with pytest.raises(ValueError, match=r"training_log\.json: .*window"):
        read_spec(directory)


@pytest.mark.parametrize("read", [read_spec, read_architecture])
@pytest.mark.parametrize(
    ("versions", "needed"),
    [
        ({"dms-train": "0.9.0"}, "dms-train 0.9.0 or newer"),
        ({"dms-train": "not installed"}, "a newer dms-train"),
        ({}, "a newer dms-train"),
    ],
)
def test_a_format_of_a_newer_version_is_refused(export, read, versions, needed):
    directory = export("llama", None, dtype=BF16)
    assert read_spec(directory) is None
    marker = {"export_format": "keyed", "provenance": {"versions": versions}}
    (directory / MARKER_FILE).write_text(json.dumps(marker))
    expected = f"export format 'keyed' is unknown to dms-train {__version__}; install {needed}"
    with pytest.raises(HFError, match=f"^{re.escape(f'{directory}: {expected}')}$"):
        read(directory)
