"""The configuration a run folder keeps: read back, and refused in one line where it cannot be."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import yaml

from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.frozen import CONFIG_FILE, read_frozen, require_same
from dms_train.method.spec import PRESETS
from tests.support import configs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory.*give the folder of a run"),
        ("a: [1\nb: 2\n", "cannot be read.*restore it"),
        ("- 1\n- 2\n", "holds no configuration"),
    ],
)
def test_a_folder_without_a_readable_configuration_is_one_line(tmp_path, text, words) -> None:
    file = tmp_path / CONFIG_FILE
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_frozen(file)
    assert len(str(refused.value).splitlines()) == 1
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim__lr": 1e-3}, "(optim.lr: 0.0001 -> 0.001)"),
        ({"stage__hold__lr": 1e-3}, "(stage.hold.lr: 0.0001 -> 0.001)"),
        ({"method__window": 8}, "(method.window: 16 -> 8)"),
    ],
)
def test_a_changed_value_is_named_with_what_the_run_was_started_with(
    tmp_path, changes, named
) -> None:
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(to_mapping(configs.config())))
    require_same(configs.config(), file)
    with pytest.raises(ConfigError) as refused:
        require_same(configs.config(**changes), file)
    assert named in str(refused.value)


@pytest.mark.parametrize("option", ["teacher__offload", "optim__offload"])
def test_a_resumed_run_may_move_teacher_and_optimizer_to_host_memory(tmp_path, option) -> None:
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(to_mapping(configs.config())))
    require_same(configs.config(**{option: True}), file)


@pytest.mark.parametrize("preset", ["dms", "kvzap"])
def test_a_folder_without_a_choice_of_trained_weights_is_read_and_resumed(tmp_path, preset) -> None:
    config = configs.config(method=asdict(PRESETS[preset]))
    values = to_mapping(config)
    del values["method"]["train"], values["lora"]
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(values))
    assert read_frozen(file) == config
    require_same(config, file)


def test_a_folder_of_a_pretraining_run_of_an_earlier_version_is_read_and_resumed(tmp_path) -> None:
    config = configs.config(model={"architecture": to_mapping(configs.architecture())})
    values = to_mapping(config)
    for key in ("layers", "experts"):
        del values["model"]["architecture"][key]
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(values))
    assert read_frozen(file) == config
    require_same(config, file)


def test_a_folder_without_the_newest_options_is_read_and_resumed(tmp_path) -> None:
    """Absent keys count as their defaults."""
    config = configs.config(model={"architecture": to_mapping(configs.architecture())})
    values = to_mapping(config)
    del values["teacher"], values["stage"]["teacher_logits"], values["loss"]["kl_temperature"]
    del values["parallel"]["tp_comm_overlap"], values["parallel"]["fp8"], values["data"]["packing"]
    del values["optim"]["offload"], values["optim"]["state_dtype"]
    del values["model"]["architecture"]["partial_rotary_factor"]
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(values))
    assert read_frozen(file) == config
    require_same(config, file)
    with pytest.raises(ConfigError, match=r"kl_temperature: 1.0 -> 2.0"):
        require_same(replace(config, loss=replace(config.loss, kl_temperature=2.0)), file)


def test_a_folder_with_former_stage_names_is_read_and_resumed(tmp_path) -> None:
    run = ["zero_neuron", "export", "validate_export", "run_tasks"]
    changes = {"stage__run": run, "stage__run_tasks": {"tasks": ["gsm8k"]}}
    config = configs.config(**changes, stage__validate_export={"samples": 3})
    values = to_mapping(config)
    stage = values["stage"]
    stage["validate"], stage["evaluate"] = stage.pop("validate_export"), stage.pop("run_tasks")
    stage["run"] = ["zero_neuron", "export", "validate", "evaluate"]
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(values))
    assert read_frozen(file) == config
    require_same(config, file)


@pytest.mark.parametrize(("stored", "mode"), [(False, None), (True, "sandbox")])
def test_the_permission_to_run_code_of_an_earlier_version_is_read(tmp_path, stored, mode) -> None:
    values = to_mapping(configs.config())
    values["stage"]["run_tasks"]["allow_code"] = stored
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(values))
    assert read_frozen(tmp_path / CONFIG_FILE).stage.run_tasks.allow_code == mode


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("method", None),
        ("stage", [1]),
        ("loss", None),
        ("stage", {"run": [["export"]]}),
        ("stage", {"run": ["export"], "evaluate": None}),
    ],
)
def test_a_damaged_block_is_named(tmp_path, block, value) -> None:
    file = tmp_path / CONFIG_FILE
    values = to_mapping(configs.config())
    values["method"]["kl_temperature"] = 2.0
    file.write_text(yaml.safe_dump(values | {block: value}))
    with pytest.raises(ConfigError) as refused:
        read_frozen(file)
    assert any(line.startswith(block) for line in refused.value.problems)


def test_a_value_under_its_former_and_its_present_key_is_refused(tmp_path) -> None:
    values = to_mapping(configs.config())
    values["method"]["kl_temperature"] = 2.0
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"method\.kl_temperature: .* mean loss\.kl_temp"):
        read_frozen(tmp_path / CONFIG_FILE)
