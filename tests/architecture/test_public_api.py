"""The names that `dms_train` offers to Python, and what importing it costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import dms_train

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"LLM", "AsyncLLM", "SamplingParams", "DMSSpec", "load_export", "__version__"}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these():
    assert set(dms_train.__all__) == NAMES
    assert set(dir(dms_train)) >= NAMES


def test_every_public_name_is_imported_on_its_own():
    """Each in a fork of a process that has imported torch and nothing of ours."""
    python(
        "import os, torch\n"
        f"for name in {sorted(NAMES)}:\n"
        "    process = os.fork()\n"
        "    if process == 0:\n"
        "        exec(f'from dms_train import {name}; assert {name} is not None')\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(process, 0)[1] == 0, name\n"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="retrofit_everything"):
        dms_train.retrofit_everything  # noqa: B018


def test_importing_the_package_loads_nothing_heavy_and_changes_no_warning_filter():
    heavy = {"torch", "megatron", "numpy", "hydra", "yaml", "transformers"}
    loaded = python(
        "import sys, warnings\n"
        "before = list(warnings.filters)\n"
        "import dms_train\n"
        "assert warnings.filters == before\n"
        f"print(*sorted({heavy!r} & set(sys.modules)))"
    )
    assert loaded == ""


def test_the_spec_and_sampling_parameters_need_no_torch():
    loaded = python(
        "import sys\nfrom dms_train import DMSSpec, SamplingParams\nprint('torch' in sys.modules)"
    )
    assert loaded == "False"


def test_the_version_is_the_one_of_the_installed_distribution():
    try:
        installed = importlib.metadata.version("dms-train")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dms-train runs from its source tree")
    assert dms_train.__version__ == installed
