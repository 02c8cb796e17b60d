"""`make demo MODEL=smollm2` on a tiny model with the files of a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dms_train.hf.formats import read_target_cr
from tests.support import hub_model, launch
from tests.support.commands import write_commands
from tests.support.served_model import TEMPLATE

SCRIPT = launch.ROOT / "scripts" / "demo_smollm2.sh"
METHOD = "method.channel=0 method.window=16 run.check_teacher=false"  # of random weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    hub_model.write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def demo(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    commands = write_commands(folder / "bin", launch.fork_server())
    environment = os.environ | given | {"OUT": str(folder / "out"), "STEPS": "0.1"}
    programs = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(programs)
    words = ["bash", str(SCRIPT)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)


def test_the_demo_retrofits_exports_and_asks(model: Path, tmp_path: Path) -> None:
    done = demo(tmp_path, ORIGINAL=str(model), EXPORT=str(tmp_path / "none"), METHOD=METHOD)
    assert done.returncode == 0, done.stderr
    export = tmp_path / "out" / "exports" / "final" / "hf"
    assert read_target_cr(export) == 2
    assert f"4/4  one question to {export}, through dms-serve" in done.stdout
    assert "says nothing about quality" in done.stdout


def test_a_missing_original_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, ORIGINAL=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path}/nothing: no such folder; correct ORIGINAL\n"
    assert not (tmp_path / "out").exists()


def test_without_a_download_the_option_for_it_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, ORIGINAL=str(tmp_path / "smollm2-135m-instruct"), HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "allow the network with --download" in done.stderr
    assert done.stderr.endswith("DOWNLOAD=1 make demo MODEL=smollm2\n")
    assert not (tmp_path / "out").exists()
