"""The checks of a node before anything starts; nvidia-smi is a stand-in on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dms_train.launch import preflight
from dms_train.launch.nodes import Needs, NodeError, look

ROOT = Path(__file__).resolve().parents[3]
EIGHT = 'for i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done'


def node(folder: Path, nvidia_smi: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run node.sh with a module that prints a line, in a run folder of that name."""
    programs, run = folder / "bin", folder / "run"
    programs.mkdir()
    run.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (programs / "nvidia-smi").chmod(0o755)
    (folder / "code").mkdir()
    (folder / "code" / "started.py").write_text("print('the module ran')")
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "node.sh"), "started"],
        env={
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder / "code"),
            "PYTHON": sys.executable,
            "NPROC": "0",
            "NODE_NAME": "a7",
            "DMS_ATTEMPT": "12.0",
            "RUN": str(run),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_node_with_everything_is_logged_and_starts(tmp_path: Path) -> None:
    done = node(tmp_path, EIGHT, NODE_GPUS="8", CHECKPOINT_BYTES="600", KEPT_BYTES="400")
    first, second = done.stdout.splitlines()
    assert first.startswith("node a7 has 8 visible GPU(s), ")
    assert first.endswith("needs 8 visible GPU(s) and 0.0 MiB in the run folder")
    assert second == "the module ran"
    assert not (tmp_path / "run" / "errors").exists()


@pytest.mark.parametrize(
    ("nvidia_smi", "environment", "message"),
    [
        ("echo 'GPU 0: NVIDIA H200'", {"NODE_GPUS": "2"}, "1 visible GPU(s), 2 are needed"),
        (
            "echo 'GPU 0: H200'; echo '  MIG 1g.18gb Device 0: (UUID: MIG-1)'",
            {"NODE_GPUS": "2"},
            "1 visible GPU(s), 2 are needed",
        ),
        (
            EIGHT,
            {"NODE_GPUS": "8", "CUDA_VISIBLE_DEVICES": "0,1,2"},
            "3 visible GPU(s), 8 are needed",
        ),
        (EIGHT, {"NODE_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}, "0 visible GPU(s), 8 are needed"),
        ("echo gone >&2; exit 9", {"NODE_GPUS": "1"}, "nvidia-smi does not answer (gone)"),
        ("", {"NODE_GPUS": "0", "CHECKPOINT_BYTES": str(10 * 2**50)}, "11534336.0 GiB are needed"),
        ("", {"NODE_GPUS": "0", "KEPT_BYTES": str(10 * 2**50)}, "11534336.0 GiB are needed"),
    ],
)
def test_a_node_that_lacks_something_is_reported_and_starts_nothing(
    tmp_path: Path, nvidia_smi: str, environment: dict[str, str], message: str
) -> None:
    done = node(tmp_path, nvidia_smi, **environment, SLURM_NODEID="1")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: node a7: ")
    assert message in line
    assert done.stdout == ""
    described = json.loads((tmp_path / "run" / "errors" / "12.0-rank0.json").read_text())
    assert described["message"] == line


def taken(path: Path, size: int) -> None:
    """Make a sparse file of `size` bytes, which takes nothing of the disk."""
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size)


def needed(run: Path, checkpoint_bytes: int, kept_bytes: int) -> float:
    """GiB that the check of a node asks for; every requirement is more than the disk has."""
    with pytest.raises(NodeError, match=r"needed for what the run still writes") as refused:
        look(run, Needs(0, checkpoint_bytes, kept_bytes))
    return float(str(refused.value).partition("GiB are needed")[0].split()[-1])


def test_what_a_run_has_written_is_not_needed_again(tmp_path: Path) -> None:
    taken(tmp_path / "checkpoints" / "step_00000004" / "shard", 3 << 40)
    taken(tmp_path / "weights" / "zero_neuron" / "shard", 1 << 40)
    taken(tmp_path / "exports" / "cr2" / "hf" / "model", 2 << 40)
    assert (
        needed(tmp_path, (3 << 40) + (10 << 50), 3 << 40) == 11 << 20
    )  # 10 PiB of checkpoints, and 10 %
    assert needed(tmp_path, 3 << 40, (3 << 40) + (10 << 50)) == 11 << 20
    assert look(tmp_path, Needs(0, 3 << 40, 3 << 40)).endswith("needs 6144.0 GiB in the run folder")


def test_checkpoints_make_no_room_for_exports(tmp_path: Path) -> None:
    """The export stage needs no checkpoint; those of the training stay."""
    taken(tmp_path / "checkpoints" / "step_00000004" / "shard", 9 << 40)
    assert needed(tmp_path, 0, 10 << 50) == 11 << 20


def test_a_damaged_checkpoint_makes_no_room(tmp_path: Path) -> None:
    taken(tmp_path / "checkpoints" / "step_00000004.damaged" / "shard", 9 << 40)
    assert needed(tmp_path, 10 << 50, 0) == 11 << 20


def test_without_slurm_nothing_is_checked(tmp_path: Path) -> None:
    assert node(tmp_path, "exit 1").stdout == "the module ran\n"


def test_a_report_that_cannot_be_written_hides_no_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "errors").touch()  # in place of the folder
    assert preflight.main([str(tmp_path), "--node", "a7", "--kept-bytes", str(1 << 62)]) == 2
    assert "error: node a7: " in capsys.readouterr().err
    assert (tmp_path / "errors").is_file()
