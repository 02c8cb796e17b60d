"""The command line of `dms-train` around the run itself, which is replaced here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dms_train.cli import train

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def runs(monkeypatch) -> list:
    seen: list = []
    monkeypatch.setattr(train, "_run", lambda config, until=None: seen.append(config))
    return seen


def call(monkeypatch, *arguments: str) -> int | None:
    monkeypatch.setattr("sys.argv", ["dms-train", *arguments])
    with pytest.raises(SystemExit) as exit_:
        train.main()
    return exit_.value.code


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dms_train", *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_run(monkeypatch, runs):
    assert call(monkeypatch, "experiment=tiny_retrofit", "optim.lr=1e-4") == 0
    assert [config.optim.lr for config in runs] == [1e-4]


def test_refusals_are_code_2_before_anything_runs(monkeypatch, runs, capsys):
    assert call(monkeypatch, "experiment=tiny_retrofit", "optim.lrr=1") == 2
    assert capsys.readouterr().err == (
        "config error: optim.lrr: unknown key; did you mean optim.lr?\n"
    )
    assert runs == []


def test_config_dir(monkeypatch, runs, tmp_path, capsys):
    assert call(monkeypatch, "--config-dir", str(tmp_path), "experiment=tiny_retrofit") == 0
    assert len(runs) == 1
    assert call(monkeypatch, "--config-dir=/nowhere", "experiment=tiny_retrofit") == 2
    assert "no such folder" in capsys.readouterr().err


def test_multirun_is_one_run_after_the_other(monkeypatch, runs, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ("-m", "experiment=tiny_retrofit", "optim.lr=1e-4,3e-4")
    assert call(monkeypatch, *arguments, "run.dir=outputs/lr-${optim.lr}") == 0
    assert [(config.optim.lr, config.run.dir) for config in runs] == [
        (1e-4, "outputs/lr-0.0001"),
        (3e-4, "outputs/lr-0.0003"),
    ]


def test_multirun_refuses_what_a_run_would(monkeypatch, runs, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "-m", "experiment=tiny_retrofit", "optim.lrr=1,2") == 2
    assert "did you mean optim.lr?" in capsys.readouterr().err
    assert call(monkeypatch, "-m", "experiment=tiny_retrofit", "run.seed=x") == 2
    assert "expected a whole number" in capsys.readouterr().err
    assert runs == []


def test_help_and_config_are_shown_without_a_run(tmp_path):
    shown = command(tmp_path, "--help")
    assert shown.returncode == 0
    assert "torchrun --nproc-per-node 2 -m dms_train" in shown.stdout
    assert "llama2_7b, llama31_8b" in shown.stdout
    shown = command(tmp_path, "--cfg", "job", "experiment=tiny_retrofit", "optim.lr=7")
    assert shown.returncode == 0
    assert "  lr: 7\n" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_unknown_keys_are_refused_with_flags_too(tmp_path):
    shown = command(tmp_path, "--cfg", "job", "experimen=tiny")
    assert shown.returncode == 2
    assert shown.stderr == "config error: experimen: unknown key; did you mean experiment?\n"
