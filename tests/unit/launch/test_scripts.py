"""The shell scripts and templates of a job, and the environment that they set."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(
    [
        *(ROOT / "dms_train" / "launch").glob("*.sh"),
        *(ROOT / "dms_train" / "slurm").glob("*.sbatch"),
    ]
)


def test_the_experiments_of_the_examples_exist() -> None:
    guides = (ROOT / "docs" / "guides").glob("*.md")
    files = [*guides, ROOT / "README.md", ROOT / "launch" / "local.sh"]
    named = {name for file in files for name in re.findall(r"experiment=(\w+)", file.read_text())}
    existing = {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert named
    assert named - {"mine"} <= existing  # a name for the reader's own experiment


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda f: f.name)
def test_shell_syntax(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def environment(**given: str) -> dict[str, str]:
    """The environment of a process started after env.sh."""
    shown = subprocess.run(
        ["bash", "-c", f"source {ROOT}/dms_train/launch/env.sh; env -0"],
        env={"PATH": "/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in shown.stdout.split("\0") if line)


def test_every_setting_has_a_reason_and_reaches_the_processes() -> None:
    lines = (ROOT / "dms_train" / "launch" / "env.sh").read_text().splitlines()
    names = re.findall(r'^ *: "\$\{(\w+):=', "\n".join(lines), re.MULTILINE)
    assert len(names) > 8
    assert set(names) <= set(environment(RUN="/runs/a"))
    for above, line in pairwise(lines):
        if line.startswith(": "):
            assert above.startswith(("#", ": ")), line


def test_variables_that_are_already_set_are_kept() -> None:
    assert environment(NCCL_DEBUG="INFO", SAVE_S="7")["NCCL_DEBUG"] == "INFO"
    assert environment(SAVE_S="7")["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "7"


def test_no_other_script_changes_these_settings() -> None:
    others = [file for file in SCRIPTS if file.name != "env.sh"]
    assert [
        f.name for f in others if re.search(r"NCCL_|CUDA_(?!VISIBLE)|ALLOC_CONF", f.read_text())
    ] == []


def test_templates_contain_no_cluster_options_and_no_logic() -> None:
    for file in (ROOT / "dms_train" / "slurm").glob("*.sbatch"):
        lines = file.read_text().splitlines()[1:]
        allowed = (
            "#SBATCH ",
            "@SITE@",
            "export ",
            "exec bash ",
            "exec dms-data ",
            "exec dms-eval ",
            "exec srun ",
        )
        assert [line for line in lines if not line.startswith(allowed)] == []
        assert not re.search(r"--(account|partition|qos)", file.read_text())
