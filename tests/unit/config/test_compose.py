"""The YAML presets and what the command line may do to them."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from pathlib import Path

import pytest
import yaml

from dms_train.cli import config_source
from dms_train.cli.config_source import CONF_DIR, compose
from dms_train.config.build import ConfigError, build, to_mapping, valid_paths
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.method.spec import PRESETS
from dms_train.planning.check import check
from tests.support import configs

GIVEN = ["model.path=x", "data.paths=[y]"]
EXPERIMENTS = sorted(p.stem for p in (CONF_DIR / "experiment").glob("*.yaml"))


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return caught.value.problems


@functools.cache
def scratch_architecture(experiment: str) -> Architecture | None:
    return compose([f"experiment={experiment}"]).model.architecture


def natural_world_size(experiment: str) -> int:
    text = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text()
    if "# layouts: " in text:
        return configs.layouts(experiment)[0][0]
    return int(text.partition("# world_size: ")[2].splitlines()[0])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_passes(experiment):
    # those on generated data name their model and data themselves
    complete = ("tiny", "exam", "demo")
    missing = [] if experiment.startswith(complete) else ["data.paths=[y]", "model.path=x"]
    config = compose([f"experiment={experiment}", *missing])
    scratch = scratch_architecture("tiny_pretrain")
    architecture = config.model.architecture or configs.KNOWN.get(experiment, scratch)
    check(config, world_size=natural_world_size(experiment), architecture=architecture)
    assert build(to_mapping(config)) == config


def test_experiments_have_their_own_run_folders():
    files = (CONF_DIR / "experiment").glob("*.yaml")
    folders = {file.stem: yaml.safe_load(file.read_text())["run"]["dir"] for file in files}
    assert len(set(folders.values())) == len(folders)
    assert all(folder.startswith("outputs/") for folder in folders.values())


def test_defaults_require_only_model_and_data():
    assert [line.partition(":")[0] for line in problems()] == ["model.path", "data.paths"]
    assert compose(GIVEN).stage.run == ("zero_neuron", "retrofit", "export")


def test_every_key_can_be_overridden_without_a_plus():
    plain = to_mapping(compose([*GIVEN, "model=scratch"]))
    for method in ("dmc", "trim_kv"):
        plain["method"] |= to_mapping(compose([*GIVEN, f"method={method}"]))["method"]
    for path in valid_paths():
        # blocks that a model may lack
        if not re.match(r"model\.architecture\.(rope_scaling|experts|linear)\.", path):
            value: typing.Any = plain
            for name in path.split("."):
                value = value[name]


@functools.cache
def defaults() -> RunConfig:
    return compose([*GIVEN, "stage=base", "stage.run=[export]"])


@pytest.mark.parametrize(
    ("block", "cls"),
    [(f.name, typing.get_type_hints(RunConfig)[f.name]) for f in dataclasses.fields(RunConfig)],
)
def test_yaml_repeats_the_defaults_of_the_code(block, cls):
    """Defaults exist twice, for the command line and for Python; they must not drift apart."""
    composed = getattr(defaults(), block)
    if not dataclasses.is_dataclass(cls):
        fields = {f.name: f for f in dataclasses.fields(RunConfig)}
        assert composed == fields[block].default
        return
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING and field.name != "path":
            assert getattr(composed, field.name) == field.default, f"{block}.{field.name}"


@pytest.mark.parametrize("preset", [n for n, spec in PRESETS.items() if spec.kind == "dms"])
def test_one_value_of_a_preset_is_replaced(preset):
    changed = compose([*GIVEN, f"method={preset}", "method.window=16"]).method
    channel = "auto" if preset == "dms" else -1
    assert changed == PRESETS[preset].override(window=16, channel=channel)


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("7", 7), ("-1", -1)])
def test_the_channel_is_a_number_or_auto(word, value):
    assert compose([*GIVEN, f"method.channel={word}"]).method.channel == value


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={option}"
        for group, options in config_source.group_options().items()
        for option in options
        if group != "experiment"
    ],
)
def test_every_group_option_composes(choice):
    extra = {
        "stage=base": ["stage.run=[export]"],
        "model=scratch": [],
        "cluster=gpu_container": ["cluster.container_image=x.sqsh"],
    }
    given = GIVEN if choice != "model=scratch" else GIVEN[1:]
    compose([choice, *given, *extra.get(choice, [])])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("+foo=1", "foo: unknown key; valid here: model, method"),
        ("++model.foo.bar=1", "model.foo: unknown key"),
        ("window=16", "window: unknown key; did you mean method.window?"),
        ("experimen=x", "experimen: unknown key; did you mean experiment?"),
        ("method=dmss", "method=dmss: no such option; did you mean method=dms?"),
        ("experiment=tiny_retrofitt", "did you mean experiment=tiny_retrofit?"),
        ("method.preset=dms_nvidia", "choose one of method=dmc, method=dmc_c, method=dmc_hardc"),
        ("method.window=null", "method.window=None: expected a whole number"),
        ("optim=7", "optim=7: no such option; options: adamw"),
        ("+experiment=tiny_retrofit", "write experiment=... without the +"),
        ("optim.lr=abc", "optim.lr='abc': expected a number"),
        ("optim.lr=1,2", "Ambiguous value for argument 'optim.lr=1,2'"),
        ("run.seed=1.5", "run.seed=1.5: expected a whole number"),
        ("foo", "'foo': not an override; write key=value"),
        ("stage.run=[a", "'stage.run=[a': not an override"),
        ("~optim.lr", "optim.lr: missing"),
        ("model.path=${nope}", "model.path: Interpolation key 'nope' not found"),
        ("model.path=???", "model.path: missing; set model.path=..."),
        ("model.architecture.num_layers=2", "Could not override 'model.architecture.num_layers'"),
        ("hydra.foo=1", "Could not override 'hydra.foo'"),
    ],
)
def test_errors_are_one_line_each(override, expected):
    given = [g for g in GIVEN if g.partition("=")[0] != override.partition("=")[0]]
    (line,) = problems(*given, override)
    assert line.startswith(expected) or expected in line
    assert "\n" not in line


def test_group_files_of_the_user(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nrun:\n  dir: outputs/mine\n"
    )
    config = compose([*GIVEN, "experiment=mine"], config_dir=tmp_path)
    assert config.run.dir == "outputs/mine"
    with pytest.raises(ConfigError, match="did you mean experiment=mine"):
        compose(["experiment=min"], config_dir=tmp_path)


def test_composing_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose(GIVEN)
    assert list(tmp_path.iterdir()) == []
