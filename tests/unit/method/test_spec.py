"""The values of the presets, which checkpoints and readers of exports depend on."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dms_train import limits
from dms_train.method.dms.spec import DMSOptions, DMSSpec
from dms_train.method.spec import PRESETS, spec_from_dict

COMMON = {
    "kind": "dms",
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "tau": 0.1,
    "aux_form": "mean",
    "eviction": "delayed",
    "kl_direction": "teacher_student",
    "kl_temperature": 1.0,
}
DMC = {
    "kind": "dmc",
    "channel": -1,
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "window": 0,
    "clear_after_rope": False,
    "alpha_in_loss": "hard_st",
    "tau": 0.1,
    "aux_form": "mean",
    "kl_direction": "teacher_student",
    "kl_temperature": 1.0,
    "merge_window": 12,
    "importance": "query",
    "importance_offset": 5.0,
    "heads": "separate",
    "consistency": 0.0,
    "prior": "global",
}
DMC_TABLE: dict[str, dict[str, Any]] = {
    "dmc": {},
    "dmc_c": {"consistency": 1.0},
    "dmc_hardc": {"heads": "shared"},
}
TABLE: dict[str, dict[str, Any]] = {
    "dms": {
        "channel": 0,
        "decision_shift": 1,
        "window": 256,
        "clear_after_rope": False,
        "alpha_in_loss": "soft",
    },
    "dms_nvidia": {
        "channel": -1,
        "decision_shift": 1,
        "window": 512,
        "clear_after_rope": True,
        "alpha_in_loss": "hard_st",
    },
    "dms_fastdms": {
        "channel": -1,
        "decision_shift": 0,
        "window": 256,
        "clear_after_rope": False,
        "alpha_in_loss": "hard_st",
    },
}


def test_presets_are_exactly_the_table() -> None:
    expected = {name: {"preset": name, **COMMON, **values} for name, values in TABLE.items()}
    expected |= {name: {"preset": name, **DMC, **values} for name, values in DMC_TABLE.items()}
    assert {name: spec.to_dict() for name, spec in PRESETS.items()} == expected


@pytest.mark.parametrize("name", DMC_TABLE)
def test_a_stored_spec_names_its_method(name: str) -> None:
    spec = PRESETS[name].override(tau=0.25, merge_window=5)
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.kind == "dmc"


def test_a_spec_without_a_method_is_of_dms_and_an_unknown_method_is_refused() -> None:
    values = PRESETS["dms"].to_dict()
    del values["kind"]
    assert spec_from_dict(values) == PRESETS["dms"]
    with pytest.raises(ValueError, match=r"method\.kind=dma: choose one of dmc, dms"):
        spec_from_dict({**values, "kind": "dma"})


DMC_REFUSED = [
    ({"window": 3}, "method.window=3"),
    ({"merge_window": 0}, "method.merge_window=0"),
    ({"importance": "other"}, "method.importance=other"),
    ({"consistency": -1.0}, "method.consistency=-1.0"),
    ({"consistency": 1.0, "heads": "shared"}, "method.consistency=1.0"),
    ({"consistency": 1.0, "prior": "layer"}, "method.consistency=1.0"),
]


@pytest.mark.parametrize(("changes", "line"), DMC_REFUSED)
def test_impossible_values_of_dmc_are_refused_by_name(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"{line}: (use|choose|expected)"):
        PRESETS["dmc"].override(**changes)


@pytest.mark.parametrize("name", TABLE)
def test_a_spec_is_unchanged_by_json(name: str) -> None:
    spec = PRESETS[name].override(window=7, tau=0.25, eviction="immediate")
    assert DMSSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["dms"].window = 3  # type: ignore[misc]


REFUSED = [
    ("alpha_in_loss", "other"),
    ("aux_form", "other"),
    ("eviction", "other"),
    ("kl_direction", "other"),
    ("channel", 1),
    ("channel", -2),
    ("decision_shift", 2),
    ("decision_shift", -1),
    ("window", 0),
    ("tau", 0.0),
    ("tau", float("nan")),
    ("kl_temperature", 0.0),
    ("kl_temperature", float("inf")),
    ("alpha_scale", 0.0),
    ("alpha_scale", -100.0),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_impossible_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"method.{name}=.*(use|choose|expected)"):
        PRESETS["dms"].override(**{name: value})


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(DMSSpec) if f.name != "kind"])
def test_a_missing_key_is_named(name: str) -> None:
    values = PRESETS["dms"].to_dict()
    del values[name]
    with pytest.raises(ValueError, match=f"missing keys \\['{name}'\\]"):
        DMSSpec.from_dict(values)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match="unknown keys \\['windw'\\]"):
        DMSSpec.from_dict({**PRESETS["dms"].to_dict(), "windw": 3})


def test_override_ignores_none_but_not_false_or_zero() -> None:
    spec = PRESETS["dms_nvidia"]
    assert spec.override(window=None, tau=None) == spec
    changed = spec.override(clear_after_rope=False, alpha_offset=0.0, decision_shift=0, channel=0)
    assert (changed.clear_after_rope, changed.alpha_offset) == (False, 0.0)
    assert (changed.decision_shift, changed.channel) == (0, 0)


@pytest.mark.parametrize(("eviction", "extra"), [("delayed", 0), ("immediate", 9)])
@pytest.mark.parametrize("shift", [0, 1])
def test_governing_shift_adds_the_window_only_when_immediate(
    eviction: str, extra: int, shift: int
) -> None:
    spec = PRESETS["dms"].override(window=9, eviction=eviction, decision_shift=shift)
    assert spec.governing_shift == shift + extra


def test_every_problem_of_a_method_is_named_at_once() -> None:
    values = {**PRESETS["dms"].to_dict(), "window": 0, "channel": 3, "tau": 0.0}
    lines = list(limits.problems(DMSOptions(**values), "method"))
    keys = {line.partition("=")[0] for line in lines}
    assert keys == {"method.window", "method.channel", "method.tau"}
    with pytest.raises(ValueError, match="window") as caught:
        DMSSpec(**values)
    assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(DMSSpec)])
@pytest.mark.parametrize("value", [None, [1], {}, b"x", float("nan"), "x"])
def test_a_value_of_another_type_is_refused_in_one_line(name, value):
    if (name, value) == ("preset", "x"):
        return  # any text
    with pytest.raises(ValueError, match=f"^method.{name}=[^\n]*: (use|choose|expected) [^\n]*$"):
        dataclasses.replace(PRESETS["dms"], **{name: value})


@pytest.mark.parametrize("name", ["channel", "window", "decision_shift"])
@pytest.mark.parametrize("value", [True, 1.5])
def test_whole_numbers_are_neither_truth_values_nor_fractions(name, value):
    with pytest.raises(ValueError, match=f"method.{name}={value}: expected a whole number"):
        dataclasses.replace(PRESETS["dms"], **{name: value})
