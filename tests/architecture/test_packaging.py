"""Everything that pyproject.toml declares exists."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from dms_train.app import failures

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

EXTRAS = PROJECT["optional-dependencies"]
APART = ("vllm",)  # needs a torch of its own, and is neither pinned here nor part of `all`


def name_of(requirement):
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-")


TARGETS = {**PROJECT["scripts"], **PROJECT["entry-points"]["vllm.general_plugins"]}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_commands_and_plugins_exist(target):
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_every_dependency_has_an_exact_version():
    def names(lines):
        return {name_of(line) for line in lines}

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names(line for line in lines if not line.startswith("#"))
    extras = [item for name, extra in EXTRAS.items() if name not in APART for item in extra]
    assert names([*PROJECT["dependencies"], *extras]) <= {*pinned, "dms-train"}
    assert "torch==2.13.0" in lines


def test_a_missing_package_is_attributed_to_every_extra_that_installs_it():
    packages = {package: set(extras) for package, *extras in failures._OPTIONAL.values()}
    for package, extras in packages.items():
        installing = {
            extra
            for extra, items in EXTRAS.items()
            if name_of(package) in map(name_of, items) and extra not in ("all", "dev", "docs")
        }
        assert extras == installing, package
    assert not set(map(name_of, PROJECT["dependencies"])) & set(map(name_of, packages))


def test_all_has_every_extra_of_users():
    (item,) = EXTRAS["all"]
    left_out = (*APART, "all", "dev", "docs")
    assert item == f"dms-train[{','.join(e for e in EXTRAS if e not in left_out)}]"


def test_presets_ship_with_the_package():
    assert list((ROOT / "dms_train" / "conf").glob("*/*.yaml"))
    assert not list((ROOT / "dms_train" / "conf").rglob("__init__.py"))


def test_the_version_is_read_without_importing_the_package():
    from setuptools.config.pyprojecttoml import read_configuration

    version = importlib.import_module("dms_train.version").__version__
    assert PROJECT["dynamic"] == ["version"]
    assert read_configuration(ROOT / "pyproject.toml")["project"]["version"] == version
