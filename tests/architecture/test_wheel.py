"""The built wheel in its own environment: its contents and its commands.

Dependencies come from the environment of the tests. The checkout is not importable: a folder on
PYTHONPATH is not searched for .pth files, which is where an editable installation is named.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def call(*command: str | Path, cwd: Path, **extra: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **extra},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a checkout holds, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dms_train", copy / "dms_train", symlinks=True, ignore=ignored)
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    call(sys.executable, "-m", "pip", "wheel", *flags, "-w", folder, copy, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The environment's folder."""
    environment = wheel.parent / "environment"
    venv.create(environment, symlinks=True)
    flags = ("--no-deps", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python")
    call(*pip, "install", *flags, wheel, cwd=wheel.parent)
    return environment


def packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def command(environment: Path, name: str, *words: str, cwd: Path) -> str:
    return call(
        environment / "bin" / name, *words, cwd=cwd, PYTHONPATH=sysconfig.get_path("purelib")
    )


def files(package: Path) -> set[str]:
    return {
        str((Path(folder) / name).relative_to(package))
        for folder, _, names in os.walk(package)
        for name in names
        if not folder.endswith("__pycache__")
    }


def test_one_name_is_installed_with_every_file_of_the_package(installed):
    site = packages(installed)
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"dms_train"}
    assert files(site / "dms_train") == files(ROOT / "dms_train")
    assert not any(path.is_symlink() for path in (ROOT / "dms_train").rglob("*"))


def test_the_checkout_is_not_importable_there(installed, tmp_path):
    code = "import dms_train; print(dms_train.__file__)"
    found = command(installed, "python", "-c", code, cwd=tmp_path).strip()
    assert Path(found) == packages(installed) / "dms_train" / "__init__.py"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_answers_help(installed, tmp_path, name):
    output = command(installed, name, "--help", cwd=tmp_path)
    assert name in output
    assert len(output.splitlines()) > 5


def test_configurations_are_composed(installed, tmp_path):
    output = command(
        installed, "dms-train", "experiment=demo", "--cfg", "job", "--resolve", cwd=tmp_path
    )
    assert "target_cr: 4" in output
    assert str(packages(installed) / "dms_train" / "assets") in output
    plan = command(installed, "dms-plan", "experiment=tiny_pretrain", cwd=tmp_path)
    assert "stage pretrain" in plan


def test_a_model_is_trained_exported_verified_and_loaded(installed, tmp_path):
    command(installed, "dms-data", "exam-sheets", "--out", "data", "--sheets", "60", cwd=tmp_path)
    model = packages(installed) / "dms_train" / "assets" / "exam_teacher"
    words = (
        f"model.path={model}",
        "data.paths=[data/train]",
        "data.seq_length=64",
        "data.micro_batch_size=2",
        "data.global_batch_size=2",
        "stage.run=[zero_neuron,retrofit,export]",
        "stage.zero_neuron.steps=1",
        "stage.retrofit.target_cr=2",
        "stage.retrofit.steps_per_cr=1",
        "method.window=8",
        "run.eval_samples=0",
        "run.dir=run",
        "observe=quiet",
    )
    command(installed, "dms-train", *words, cwd=tmp_path)
    assert "PASS" in command(installed, "dms-verify", "run/exports/final/hf", cwd=tmp_path)
    code = (
        "from dms_train import SamplingParams, load_export\n"
        "llm = load_export('run/exports/final/hf', max_num_seqs=1)\n"
        "print(llm.spec.window, len(llm.generate('1', SamplingParams(max_tokens=3))))\n"
    )
    assert command(installed, "python", "-c", code, cwd=tmp_path).split() == ["8", "1"]
