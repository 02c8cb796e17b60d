"""Mappings become frozen dataclasses, or are refused in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dms_train.config.build import ConfigError, build, build_dataclass, to_mapping, valid_paths
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.method.spec import PRESETS
from tests.support import configs
from tests.support.experts import experts_of
from tests.support.plain_delta import sizes_of
from tests.support.wiring import leaves

ARCHITECTURE = dataclasses.asdict(configs.architecture())


def problems(values: dict) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build(values)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_values_defaults_and_conversions():
    config = configs.config(data__weights=[1, 2], optim__lr=1)
    assert config.data.paths == ("some/data",)
    assert config.data.weights == (1.0, 2.0)
    assert isinstance(config.optim.lr, float)
    assert config.stage.retrofit.target_cr == 4.0
    assert config.run.seed == 1234
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 1


def test_nested_optional_block():
    config = configs.config(model__path=None, model__architecture=ARCHITECTURE)
    assert config.model.architecture == configs.architecture()
    scaled = {**ARCHITECTURE, "rope_scaling": {"factor": 8}}
    config = configs.config(model__path=None, model__architecture=scaled)
    assert config.model.architecture.rope_scaling.factor == 8.0
    assert configs.config(model__architecture=None).model.architecture is None


def test_round_trip_through_json():
    config = configs.config(model__path=None, model__architecture=ARCHITECTURE)
    assert build(json.loads(json.dumps(to_mapping(config)))) == config


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("optm", "did you mean optim?"),
        ("optim__lrr", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("optim__window", "did you mean method.window?"),
        ("stage__retrofit__target", "did you mean stage.retrofit.target_cr?"),
        ("stage__hold__seq_length", "did you mean data.seq_length?"),
        ("parallel__tensor_parallel_size", "parallel.tensor_model_parallel_size?"),
        ("data__xyz", "valid here: paths, weights"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(path, suggestion):
    (line,) = problems(configs.mapping(**{path: 1}))
    assert path.replace("__", ".") in line
    assert suggestion in line


@pytest.mark.parametrize("block", [p for p in valid_paths() if p.count(".") <= 1])
def test_every_block_refuses_an_unknown_key(block):
    values = configs.mapping(model__path=None, model__architecture=dict(ARCHITECTURE))
    target = values
    for name in block.split("."):
        target = target.get(name) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target["zzz"] = 1
        assert problems(values)[0].startswith(f"{block}.zzz: unknown key")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optim__lr", "abc", "optim.lr='abc': expected a number"),
        ("optim__lr", True, "optim.lr=True: expected a number"),
        ("optim__lr", None, "optim.lr=None: expected a number"),
        ("run__seed", 1.5, "run.seed=1.5: expected a whole number"),
        ("run__seed", False, "run.seed=False: expected a whole number"),
        ("run__dir", 7, "run.dir=7: expected text"),
        ("run__dry_run", "yes", "run.dry_run='yes': expected true or false"),
        ("data__paths", "a", "data.paths='a': expected a list"),
        ("data__paths", ["a", 1], "data.paths[1]=1: expected text"),
        ("data__weights", 1.0, "data.weights=1.0: expected a list"),
        ("stage__retrofit__layer_ratios", [1], "stage.retrofit.layer_ratios=[1]: expected {0:"),
        ("stage__retrofit__layer_ratios", {0: "a"}, "stage.retrofit.layer_ratios.0='a': expected"),
        ("optim", 3, "optim=3: expected a block with keys lr,"),
        ("model__architecture", "llama", "model.architecture='llama': expected a block"),
    ],
)
def test_wrong_types_are_refused(path, value, expected):
    (line,) = problems(configs.mapping(**{path: value}))
    assert line.startswith(expected)


WRONG = ({"a": 1}, [[1]], object())
OTHER_METHODS = {  # a preset that has the key, for keys that DMS lacks
    f"method.{name}": preset
    for preset in ("dmc", "trim_kv")
    for name in dataclasses.asdict(PRESETS[preset])
    if name not in dataclasses.asdict(PRESETS["dms"])
}


@pytest.mark.parametrize("value", WRONG, ids=["mapping", "nested list", "object"])
@pytest.mark.parametrize("key", leaves(RunConfig))
def test_a_value_of_a_wrong_type_is_one_line_for_every_key(key: str, value: object) -> None:
    architecture = dataclasses.asdict(configs.architecture())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    architecture["rope_scaling"] = {**scaling, "original_max_position_embeddings": 8192}
    architecture["experts"] = dataclasses.asdict(experts_of("qwen3_moe"))
    architecture["linear"] = dataclasses.asdict(sizes_of("qwen3_5_text"))
    given = configs.mapping(model__architecture=architecture)
    if key in OTHER_METHODS:
        given["method"] = dataclasses.asdict(PRESETS[OTHER_METHODS[key]])
    target = given
    *blocks, name = key.split(".")
    for block in blocks:
        target = target.setdefault(block, {})
    target[name] = value
    with pytest.raises(ConfigError) as refused:
        build(given)
    (line,) = refused.value.problems
    assert line.startswith((f"{key}=", f"{key}["))
    assert "\n" not in line


def test_missing_values_are_named_together():
    values = configs.mapping(data__paths="???")
    del values["optim"]["lr"], values["run"]
    assert problems(values) == (
        "data.paths: missing; set data.paths=...",
        "optim.lr: missing; set optim.lr=...",
        "run: missing; set run=...",
    )


def test_other_dataclasses_with_their_path():
    assert build_dataclass(Architecture, ARCHITECTURE) == configs.architecture()
    with pytest.raises(ConfigError, match=r"stored\.num_layers='x'"):
        build_dataclass(Architecture, {**ARCHITECTURE, "num_layers": "x"}, "stored")
    with pytest.raises(ConfigError, match=r"stored\.num_layer: .*stored\.num_layers\?"):
        build_dataclass(Architecture, {**ARCHITECTURE, "num_layer": 1}, "stored")
