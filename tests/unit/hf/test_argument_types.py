"""Public functions refuse arguments of another type in one line that names the argument."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.export.kv_pooling import mean_of_groups, with_kv_heads
from dms_train.export.writer import write_export
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.directory import resolve
from dms_train.hf.errors import HFError
from dms_train.hf.formats import find_format
from dms_train.hf.safetensors_files import read_header
from dms_train.hf.selftest import SelfTest
from dms_train.hf.typed import typed
from dms_train.hf.weight_reader import WeightReader
from dms_train.hf.weight_writer import WeightWriter

MODULES = (
    "dms_train.hf.config_json",
    "dms_train.hf.directory",
    "dms_train.hf.json_files",
    "dms_train.hf.model_type",
    "dms_train.hf.safetensors_files",
    "dms_train.hf.tensor_values",
    "dms_train.hf.tensors",
    "dms_train.hf.weight_writer",
    "dms_train.hf.formats.registry",
    "dms_train.export.writer",
    "dms_train.export.kv_pooling",
    "dms_train.export.card",
    "dms_train.export.hub",
    "dms_train.app.conversion.import_model",
    "dms_train.app.conversion.export_checkpoint",
    "dms_train.app.inspection.describe",
    "dms_train.app.verification.verify",
)


def functions() -> dict[str, Any]:
    """The public functions that the modules define."""
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            owner, _, single = name.rpartition(".")
            found[name] = getattr(importlib.import_module(owner), single)
            continue
        for key, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == name and key[0] != "_":
                found[f"{name}.{key}"] = value
    return found


@pytest.mark.parametrize("name", functions())
def test_every_public_function_names_its_first_argument(name):
    function = functions()[name]
    wrong = {key: object() for key in inspect.signature(function).parameters}
    first = next(iter(wrong))
    with pytest.raises(HFError, match=rf"^{function.__name__}: {first} is of type object; give "):
        function(**wrong)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: resolve(5), "path_or_id=5 is of type int; give str or Path"),
        (lambda: resolve(None), "path_or_id=None"),
        (lambda: resolve("x", revision=3), "revision=3 .* give str or NoneType"),
        (lambda: from_hf_config([("model_type", "llama")]), "config is of type list; give Mapping"),
        (lambda: from_hf_config("llama"), "config='llama'"),
        (lambda: read_header("model.safetensors"), "path='model.safetensors' .* give Path"),
        (lambda: WeightReader(None), "directory=None"),
        (lambda: WeightWriter(7), "directory=7"),
        (lambda: WeightWriter(Path(), max_shard_bytes="5GB"), "max_shard_bytes='5GB' .* give int"),
        (lambda: WeightWriter(Path(), max_shard_bytes=True), "max_shard_bytes=True"),
        (lambda: WeightWriter(Path()).add("x", [1.0]), "tensor is of type list; give Tensor"),
        (lambda: with_kv_heads({}, 2), "architecture is of type dict; give Architecture"),
        (lambda: mean_of_groups(torch.ones(8, 2), 4, 2.0), r"kv_heads=2\.0 .* give int"),
        (lambda: find_format(["dms"]), "name is of type list; give str"),
        (lambda: SelfTest.load(b"x"), "directory is of type bytes"),
    ],
)
def test_the_line_names_argument_value_and_type(call, named):
    with pytest.raises(HFError, match=named) as error:
        call()
    assert "\n" not in str(error.value)


def test_write_export_names_a_dtype_that_is_text(architecture, tmp_path):
    arguments = {"spec": None, "cr_factor": None, "target_cr": 1, "export_format": "dms"}
    more = {"weights": [], "source_dir": None, "selftest": None, "provenance": {}}
    a = architecture("llama")
    with pytest.raises(HFError, match=r"dtype='bfloat16' is of type str; give dtype"):
        write_export(tmp_path / "x", architecture=a, dtype="bfloat16", **arguments, **more)
    assert not (tmp_path / "x").exists()


def test_annotations_that_allow_a_value_pass_it():
    @typed
    def kept(
        number: float, whole: int | None, table: Mapping[str, int], *, anything: Any = 0
    ) -> tuple[Any, ...]:
        return number, whole, table, anything

    assert kept(3, None, {}, anything="x") == (3, None, {}, "x")
    with pytest.raises(HFError, match="number=True"):
        kept(True, None, {})
    with pytest.raises(HFError, match="whole=True"):
        kept(1.0, True, {})
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        kept(1.0)
