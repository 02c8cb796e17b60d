"""Presets, and the specifications that checkpoints and exports store."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dms_train import limits
from dms_train.method.dms.spec import DMSOptions, DMSSpec
from dms_train.method.spec import PRESETS, NewerSpecError, options_from, spec_from_dict

COMMON = {
    "kind": "dms",
    "train": "all",
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "tau": 0.1,
    "aux_form": "mean",
    "eviction": "delayed",
}
DMC = {
    "kind": "dmc",
    "train": "all",
    "channel": -1,
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "window": 0,
    "clear_after_rope": False,
    "alpha_in_loss": "hard_st",
    "tau": 0.1,
    "aux_form": "mean",
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
TRIM_KV = {
    "kind": "trim_kv",
    "train": "channel",
    "channel": 0,
    "alpha_scale": 100.0,
    "alpha_offset": 8.0,
    "window": 0,
    "clear_after_rope": False,
    "alpha_in_loss": "soft",
    "tau": 1.0,
    "aux_form": "mean",
    "budget": 512,
    "capacity_weight": 1.0,
}
KVZAP = {
    "kind": "kvzap",
    "train": "channel",
    "channel": 0,
    "alpha_scale": 10.0,
    "alpha_offset": 5.0,
    "window": 128,
    "clear_after_rope": False,
    "alpha_in_loss": "soft",
    "tau": 1.0,
    "aux_form": "mean",
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
    expected["kvzap"] = {"preset": "kvzap", **KVZAP}
    expected["trim_kv"] = {"preset": "trim_kv", **TRIM_KV}
    assert {name: dataclasses.asdict(options) for name, options in PRESETS.items()} == expected


def test_what_is_stored_is_the_version_and_what_no_training_decides() -> None:
    training = {"train", "alpha_in_loss", "aux_form", "consistency", "prior", "capacity_weight"}
    for name, preset in PRESETS.items():
        values = dataclasses.asdict(preset)
        kept = {key: value for key, value in values.items() if key not in training}
        assert preset.to_dict() == {"version": 2, **kept}, name


@pytest.mark.parametrize("name", DMC_TABLE)
def test_a_stored_spec_names_its_method(name: str) -> None:
    spec = PRESETS[name].override(tau=0.25, merge_window=5).spec
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.kind == "dmc"


def test_a_spec_without_a_method_is_of_dms_and_an_unknown_method_is_refused() -> None:
    values = PRESETS["dms"].to_dict()
    del values["kind"]
    assert spec_from_dict(values) == PRESETS["dms"].spec
    with pytest.raises(
        ValueError, match=r"method\.kind=dma: choose one of dmc, dms, kvzap, trim_kv"
    ):
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
    spec = PRESETS[name].override(window=7, tau=0.25, eviction="immediate").spec
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


# As version 1 stored it; `tests/fixtures/format_1` has whole artefacts.
VERSION_1 = {
    "kind": "dms",
    "preset": "dms",
    "channel": 0,
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "window": 8,
    "clear_after_rope": False,
    "alpha_in_loss": "soft",
    "tau": 0.1,
    "aux_form": "sum",
    "kl_direction": "student_teacher",
    "kl_temperature": 2.0,
    "decision_shift": 1,
    "eviction": "delayed",
}


@pytest.mark.parametrize("left_out", [(), ("kl_temperature",), ("kind", "aux_form")])
def test_the_training_constants_of_version_1_are_ignored(left_out: tuple[str, ...]) -> None:
    values = {key: value for key, value in VERSION_1.items() if key not in left_out}
    assert spec_from_dict(values) == PRESETS["dms"].override(window=8).spec
    assert spec_from_dict({**values, "version": 1}) == PRESETS["dms"].override(window=8).spec


@pytest.mark.parametrize("kind", ["dms", "method_of_the_future"])
def test_a_newer_version_is_refused_with_both_versions_and_the_fix(kind: str) -> None:
    values = {**PRESETS["dms"].to_dict(), "version": 3, "unheard_of": 1, "kind": kind}
    with pytest.raises(NewerSpecError) as refused:
        spec_from_dict(values)
    (line,) = str(refused.value).splitlines()
    assert "version 3" in line
    assert "reads up to 2" in line
    assert "install a newer dms-train" in line


@pytest.mark.parametrize("version", [0, -1, "2", 2.0, True, None])
def test_a_version_that_is_no_positive_whole_number_is_refused(version: Any) -> None:
    with pytest.raises(ValueError, match=r"version .*: expected a whole number from 1"):
        spec_from_dict({**PRESETS["dms"].to_dict(), "version": version})


@pytest.mark.parametrize("key", ["windw", "aux_form", "kl_temperature"])
def test_a_key_that_the_current_version_does_not_have_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown keys \\['{key}'\\]"):
        spec_from_dict({**PRESETS["dms"].to_dict(), key: 1})


def test_a_misspelled_key_of_version_1_is_refused() -> None:
    values = {key: value for key, value in VERSION_1.items() if key != "window"}
    with pytest.raises(ValueError, match=r"missing keys \['window'\], unknown keys \['windw'\]"):
        spec_from_dict({**values, "windw": 8})


@pytest.mark.parametrize("name", PRESETS)
def test_a_stored_spec_is_completed_with_the_training_of_its_method(name: str) -> None:
    spec = PRESETS[name].override(tau=0.25).spec
    options = options_from(spec)
    assert options.spec == spec
    assert options.aux_form == "mean"


def test_a_spec_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["dms"].window = 3  # type: ignore[misc]


REFUSED = [
    ("alpha_in_loss", "other"),
    ("aux_form", "other"),
    ("eviction", "other"),
    ("channel", -2),
    ("channel", "first"),
    ("decision_shift", 2),
    ("decision_shift", -1),
    ("window", 0),
    ("tau", 0.0),
    ("tau", float("nan")),
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
        spec_from_dict(values)


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
    values = {**dataclasses.asdict(PRESETS["dms"].spec), "window": 0, "channel": -2, "tau": 0.0}
    training = {"train": "all", "alpha_in_loss": "soft", "aux_form": "mean"}
    lines = list(limits.problems(DMSOptions(**values, **training), "method"))
    keys = {line.partition("=")[0] for line in lines}
    assert keys == {"method.window", "method.channel", "method.tau"}
    with pytest.raises(ValueError, match="window") as caught:
        DMSSpec(**values)
    own = [line.removesuffix(", or auto") for line in lines]  # no model is stored with auto
    assert str(caught.value).splitlines() == own


def test_a_specification_has_a_number_where_the_options_have_auto() -> None:
    options = PRESETS["dms"].override(channel="auto")
    assert (options.channel, options.spec.channel, options.to_dict()["channel"]) == ("auto", 0, 0)
    with pytest.raises(ValueError, match=r"method\.channel='auto': expected a whole number"):
        spec_from_dict({**options.to_dict(), "channel": "auto"})


def test_auto_is_refused_where_the_ranking_measures_another_model() -> None:
    with pytest.raises(ValueError, match=r"method.channel=auto: .*RoPE; set method.channel=-1"):
        PRESETS["dms_nvidia"].override(channel="auto")


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(DMSSpec)])
@pytest.mark.parametrize("value", [None, [1], {}, b"x", float("nan"), "x"])
def test_a_value_of_another_type_is_refused_in_one_line(name, value):
    if (name, value) == ("preset", "x"):
        return  # any text
    with pytest.raises(ValueError, match=f"^method.{name}=[^\n]*: (use|choose|expected) [^\n]*$"):
        dataclasses.replace(PRESETS["dms"].spec, **{name: value})


@pytest.mark.parametrize("name", ["channel", "window", "decision_shift"])
@pytest.mark.parametrize("value", [True, 1.5])
def test_whole_numbers_are_neither_truth_values_nor_fractions(name, value):
    with pytest.raises(ValueError, match=f"method.{name}={value}: expected a whole number"):
        dataclasses.replace(PRESETS["dms"].spec, **{name: value})
