"""Every key of a model's JSON files with values of every type: read as transformers, or refused."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.app.failures import is_refusal
from dms_train.app.inspection import describe
from dms_train.families import FAMILIES
from dms_train.hf.directory import read_architecture
from dms_train.hf.formats import read_stated
from dms_train.hf.formats.fastdms import LOG_FILE
from dms_train.hf.formats.flat import METADATA_FILE
from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.safetensors_files import INDEX_FILE, SINGLE_FILE
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.llm import LLM
from dms_train.inference.models.loader import _dtype
from dms_train.inference.tokenizer import read_stop_ids
from dms_train.method.spec import PRESETS
from tests.unit.hf.conftest import in_memory

VALUES = (None, "text", "", [1], [], {"a": 1}, {}, -1, 0, 1.5, True, False, math.nan, math.inf)
HUGE = 10**400
LENGTH = 40
COMPUTES = ("rope", "rms", "tie", "num", "head", "hidden", "sliding", "use_sliding", "mlp")
# keys that a config.json may have and that to_hf_config leaves out
MORE_KEYS = (
    "head_dim",
    "layer_types",
    "rope_parameters.rope_type",
    "rope_parameters.type",
    "rope_parameters.partial_rotary_factor",
    "rope_scaling.rope_theta",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "quantization_config",
    "compression_config",
    "quantization",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
    "auto_map",
)
NESTED = ("rope_parameters", "rope_scaling")


def keys_of(values: dict[str, Any]) -> list[str]:
    """Every key, and those inside the blocks, dotted."""
    inside = [f"{key}.{k}" for key in NESTED for k in values.get(key) or ()]
    return list(dict.fromkeys((*values, *inside, *MORE_KEYS)))


def changed(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    block, _, key = dotted.rpartition(".")
    if block:
        return {**values, block: {**(values.get(block) or {}), key: value}}
    return {**values, key: value}


def write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def refused(read: Any, *arguments: Any) -> str | None:
    """The line with which `read` refuses, None if it accepts; anything else fails the test."""
    try:
        read(*arguments)
    except (ValueError, OSError) as error:
        if not is_refusal(error) or "\n" in str(error):
            raise
        return str(error)
    return None


def read_all(directory: Path) -> None:
    """Read everything that the commands read of a model before they compute."""
    read_stop_ids(directory)
    describe(directory)
    _dtype(read_config(directory))


def transformers_logits(directory: Path, weights: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """None where transformers refuses the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = in_memory(weights, read_architecture(directory))
        model.load_state_dict(weights, strict=not config.tie_word_embeddings)
        with torch.no_grad():
            return model.eval()(ids[None]).logits[0]
    except Exception:
        return None


def cases(sound: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in keys_of(sound):
        yield from ((key, value) for value in (*VALUES, HUGE))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(3))


def families_with(*slow: str) -> list[Any]:
    """All families; those whose keys other families have too are slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in FAMILIES]


IN_OTHERS = ("mistral", "qwen3", "qwen3_5_text", "qwen3_moe")


@pytest.mark.parametrize("family", families_with(*IN_OTHERS))
def test_config_json_is_read_or_refused_in_one_line_that_names_the_key(export, family):
    directory = export(family, None)
    sound = read_config(directory)
    accepted = []
    for key, value in cases(sound):
        write(directory / "config.json", changed(sound, key, value))
        line = refused(read_all, directory)
        if line is None:
            accepted.append((key, value))
        # a good value that the weights, or the same fact under another key, do not fit
        elif "config.json states" not in line and "make them agree" not in line:
            assert key.rpartition(".")[2].removeprefix("torch_") in line, (key, value)
    assert ("rope_theta", None) in accepted
    assert ("rms_norm_eps", None) not in accepted


@pytest.mark.parametrize("family", families_with(*IN_OTHERS, "smollm3"))
def test_transformers_computes_the_same_of_a_config_that_is_accepted(export, ids, family):
    """Logits are those of transformers for each key that a model is computed from."""
    import transformers

    directory = export(family, None)
    sound = read_config(directory)
    architecture, reader = read_architecture(directory), WeightReader(directory)
    weights = {name: reader.get(name) for name in reader.names()}
    usual = transformers_logits(directory, weights, ids)
    own = LLM(directory, dtype="float32").logits(ids.tolist())
    assert (own - usual).abs().max() < 1e-3
    # transformers 4 reads one of the two spellings of RoPE
    computes = COMPUTES if transformers.__version__ >= "5" else COMPUTES[1:]
    compared = 0
    for key, value in cases(sound):
        write(directory / "config.json", changed(sound, key, value))
        if key.startswith(computes) and refused(read_all, directory) is None:
            found = transformers_logits(directory, weights, ids)
            if found is not None:
                compared += 1
                if read_architecture(directory) != architecture:
                    own = LLM(directory, dtype="float32").logits(ids.tolist())
                    assert (own - found).abs().max() < 1e-3, (key, value)
                else:
                    assert (usual - found).abs().max() < 1e-3, (key, value)
    print(f"{family}: {compared} configs compared")
    assert compared > 10


def blocks(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of a JSON object and of the objects inside it."""
    for key, value in values.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from blocks(value, (*prefix, key))


def replaced(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else replaced(values[path[0]], path[1:], value)
    return {**values, path[0]: inner}


METADATA = [
    ("qwen3", "dms", "config.json"),
    ("llama", "dmc", "config.json"),
    ("qwen3", "dms_nvidia", "config.json"),
    ("qwen3", "dms_nvidia", METADATA_FILE),
    ("qwen3", "dms_fastdms", METADATA_FILE),
    ("llama", "dms_fastdms", "config.json"),
]


@pytest.mark.parametrize(("family", "preset", "file"), METADATA)
def test_what_an_export_states_of_its_method_is_read_or_refused(export, family, preset, file):
    spec = PRESETS[preset]
    dtype = torch.float32 if preset in ("dms", "dmc") else torch.bfloat16
    directory = export(family, spec, dtype=dtype)
    sound, before = read_json(directory / file), read_stated(directory)[1]
    paths = [p for p in blocks(sound) if file != "config.json" or p[0].startswith(("dms", "dmc"))]
    assert len(paths) > 8
    for path in paths:
        for value in (*VALUES, HUGE):
            write(directory / file, replaced(sound, path, value))
            line = refused(read_stated, directory)
            if line is None and path[-1] != "dms_decision_shift":  # 0: the format of FastDMS
                found = read_stated(directory)[1]
                ours, theirs = before.spec.to_dict(), found.spec.to_dict()
                assert all(theirs[key] in (ours[key], value) for key in ours), (path, value)
                assert found.target_cr in (before.target_cr, value, 1.0), (path, value)
                assert found.cr_factor in (before.cr_factor, value), (path, value)


def test_settings_outside_config_json_are_read_or_refused(export):
    """Settings of FastDMS' trainer, whose config.json is that of the dense model."""
    directory = export("llama", None)
    sound = {"window_size": 8, "alpha_scale": 50.0, "alpha_offset": 4.0, "target_cr": 4}
    for key in sound:
        for value in (*VALUES, HUGE):
            write(directory.parent / LOG_FILE, {"config": {**sound, key: value}})
            line = refused(read_stated, directory)
            if line is None:
                spec = read_stated(directory)[1].spec
                found = (spec.window, spec.alpha_scale, spec.alpha_offset)
                assert all(number in (8, 50.0, 4.0, value) for number in found), (key, value)
            else:
                assert key in line


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_are_token_ids(export, file):
    directory = export("llama", None)
    sound = read_json(directory / file) if (directory / file).is_file() else {}
    for value in (*VALUES, HUGE, [None], ["</s>"], [[1]], [True], [1, 2]):
        write(directory / file, {**sound, "eos_token_id": value})
        line = refused(read_stop_ids, directory)
        if line is None:
            ids = {None: set(), "[]": set(), "[1]": {1}, "[1, 2]": {1, 2}}
            known = ids.get(value if value is None else str(value), {value} if value == 0 else None)
            assert read_stop_ids(directory) == known or value == HUGE, value
        else:
            assert "eos_token_id" in line
            assert file in line


@pytest.mark.parametrize("value", [*VALUES, HUGE, {"model.norm.weight": 3}, {"a": None}])
def test_the_index_of_the_shards(tmp_path, value):
    write(tmp_path / INDEX_FILE, {"weight_map": value})
    line = refused(WeightReader, tmp_path)
    assert line is not None
    assert INDEX_FILE in line or "a" in line


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("key", [None, *ENTRY])
def test_the_header_of_a_weight_file(tmp_path, key):
    for value in (*VALUES, HUGE, [0, None], ["a", "b"], [True, 8], [-8, 8], [8, 0]):
        if key == "shape" and value in ([1], []):
            continue  # a header of its own: safetensors compares it with the size
        header = {"x": value if key is None else {**ENTRY, key: value}}
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(8)
        (tmp_path / SINGLE_FILE).write_bytes(content)
        assert refused(lambda: WeightReader(tmp_path).get("x")) is not None, value


def test_a_json_file_that_no_parser_can_hold(tmp_path):
    for text in ("[" * 200_000, '{"a": ' * 200_000, '{"a": ' + "1" * 5000 + "}", '\ufeff{"a": 1}'):
        (tmp_path / "config.json").write_text(text)
        line = refused(read_config, tmp_path)
        assert line is not None
        assert "config.json" in line
