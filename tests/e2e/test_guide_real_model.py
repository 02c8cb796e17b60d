"""Every command of docs/guides/real_model.md, on a tiny model with the files of the real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import hub_model, launch
from tests.support.commands import write_commands
from tests.support.served_model import TEMPLATE

GUIDE = launch.ROOT / "docs" / "guides" / "real_model.md"
# What needs the network, or would change the environment of the tests.
NOT_HERE = ("hf download", "pip install", "python3.11 -m venv", "DOWNLOAD=1 make demo")
# tests/research/test_recipe.py runs it.
NOT_HERE += ("python -m research recipe",)
# The guide's settings, and those of a model of 2 layers on a CPU.
SMALLER = {
    "data.seq_length=4096": "data.seq_length=64 method.window=8",
    "data.global_batch_size=16": "data.global_batch_size=2",
    "stage.zero_neuron.steps=500": "stage.zero_neuron.steps=2 stage.retrofit.steps_per_cr=1",
    "run.dir=outputs/qwen3": "run.dir=outputs/qwen3 observe.wandb=disabled"
    " run.eval_samples=4 stage.validate_export.samples=4 run.check_teacher=false",
    "--seq-length 4096": "--seq-length 64",
    "--samples 32": "--samples 4",
    "--workers 8": "--workers 1",
    "--device cuda": "--device cpu",
    "--max-tokens 200": "--max-tokens 20",
}


def guide_commands() -> list[str]:
    """Commands of the page in their order, each on one line."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith(NOT_HERE)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after all commands have run, and what each of them printed."""
    folder = tmp_path_factory.mktemp("guide")
    model = folder / "models" / "qwen3-0.6b"
    hub_model.write_model(model)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    hub_model.write_text(folder / "data" / "en" / "c4-train.00000-of-01024.json.gz")
    commands = write_commands(folder / "bin", launch.fork_server())
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    printed = {}
    for command in guide_commands():
        small = command
        for setting, value in SMALLER.items():
            small = small.replace(setting, value)
        done = subprocess.run(
            ["bash", "-c", small],
            cwd=folder,
            env=launch.environment(PATH=path, HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{small}\n{(done.stdout + done.stderr)[-4000:]}"
        printed[command] = done.stdout + done.stderr
    return folder, printed


@pytest.mark.timeout(900)
def test_every_command_of_the_guide_succeeds(outputs):
    _, printed = outputs
    names = {command.split()[0] for command in printed}
    assert {"dms-data", "dms-plan", "dms-train", "dms-report", "dms-verify"} < names
    text = "\n".join(printed)
    assert not [setting for setting in SMALLER if setting not in text]


def test_the_run_of_the_guide_leaves_what_the_guide_names(outputs):
    folder, _ = outputs
    run = folder / "outputs" / "qwen3"
    assert (run / "report.html").is_file()
    assert (run / "report.md").is_file()
    assert {path.name for path in (run / "exports").iterdir()} >= {"cr2", "cr3", "final"}
    spec = json.loads((run / "exports" / "final" / "hf" / "config.json").read_text())["dms"]["spec"]
    assert (spec["preset"], spec["window"]) == ("dms", 8)
    card = (run / "exports" / "final" / "hf" / "README.md").read_text(encoding="utf-8")
    assert "| 1 | allenai/c4 | ODC-BY | - | 100.0% |" in card
