"""A composed configuration holds the values that are used, not what they are derived from."""

from __future__ import annotations

import pytest

from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.resolve import resolved
from dms_train.planning.check import check
from tests.support import configs

RATES = ("pretrain", "zero_neuron", "retrofit", "hold")


def test_every_stage_has_the_common_learning_rate():
    stage = configs.config(optim__lr=3e-4).stage
    assert {getattr(stage, name).lr for name in RATES} == {3e-4}


@pytest.mark.parametrize("name", RATES)
def test_a_stage_keeps_a_learning_rate_of_its_own(name):
    stage = configs.config(optim__lr=3e-4, **{f"stage__{name}__lr": 7e-5}).stage
    found = {other: getattr(stage, other).lr for other in RATES}
    assert found == {other: 7e-5 if other == name else 3e-4 for other in RATES}


@pytest.mark.parametrize(
    ("preset", "expected"), [("dms", "dms"), ("dms_nvidia", "nvidia"), ("dms_fastdms", "fastdms")]
)
def test_the_format_of_the_export_goes_with_the_preset(preset, expected):
    assert configs.config(method__preset=preset).stage.export.format == expected
    chosen = configs.config(method__preset=preset, stage__export__format="dms")
    assert chosen.stage.export.format == "dms"


def test_resolving_again_changes_nothing():
    config = configs.config(method__preset="dms_nvidia")
    assert resolved(config) == config
    assert None not in to_mapping(config)["method"].values()


def test_an_impossible_learning_rate_is_refused_under_its_own_key_alone():
    with pytest.raises(ConfigError) as caught:
        check(configs.config(optim__lr=0.0), world_size=1, architecture=configs.architecture())
    assert [line.partition("=")[0] for line in caught.value.problems] == ["optim.lr"]
