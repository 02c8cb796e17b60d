"""The options of vLLM on each node of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dms_train.config.build import ConfigError
from dms_train.launch.serve import command
from tests.support import launch

JOB = {
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "70123",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_GPUS_ON_NODE": "8",
}


def test_the_first_node_serves_and_the_others_add_replicas() -> None:
    first, second, third = (
        command(["EXPORT", "--max-model-len", "64"], {**JOB, "SLURM_NODEID": str(node)})
        for node in range(3)
    )
    assert " ".join(first) == (
        "vllm serve EXPORT --max-model-len 64 --data-parallel-size 24 --data-parallel-size-local 8 "
        "--data-parallel-address 10.0.0.7 --data-parallel-rpc-port 30123"
    )
    assert second == [*first, "--headless", "--data-parallel-start-rank", "8"]
    assert third == [*first, "--headless", "--data-parallel-start-rank", "16"]


def test_the_number_of_replicas_can_be_given() -> None:
    words = command(["EXPORT"], {**JOB, "REPLICAS_PER_NODE": "2", "SLURM_NODEID": "1"})
    assert words[words.index("--data-parallel-size") + 1] == "6"
    assert words[-1] == "2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_GPUS_ON_NODE": ""}, "pass --gpus-per-node to sbatch"),
        ({"REPLICAS_PER_NODE": "0"}, "REPLICAS_PER_NODE=0: must be an integer of at least 1"),
        ({"REPLICAS_PER_NODE": "two"}, "REPLICAS_PER_NODE=two: must be an integer of at least 1"),
    ],
)
def test_a_job_without_replicas_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(["EXPORT"], {**JOB, **change})


def test_a_replica_has_the_gpus_of_its_ranks() -> None:
    words = command(["EXPORT", "-tp", "2"], {**JOB, "SLURM_NODEID": "1"})
    assert words[2:5] == ["EXPORT", "-tp", "2"]
    assert words[words.index("--data-parallel-size-local") + 1] == "4"
    assert words[-1] == "4"
    with pytest.raises(ConfigError, match=r"8 GPUs of a node are not a multiple of .* 3; change"):
        command(["EXPORT", "--tensor-parallel-size=3"], JOB)


@pytest.mark.parametrize("count", [["--api-server-count", "4"], ["--api-server-count=4"]])
def test_only_the_first_node_has_processes_for_http(count: list[str]) -> None:
    words = ["EXPORT", *count, "--max-model-len", "64"]
    first, second = (command(words, {**JOB, "SLURM_NODEID": str(node)}) for node in range(2))
    assert first[2 : 2 + len(words)] == words
    assert second[2:6] == ["EXPORT", "--max-model-len", "64", "--data-parallel-size"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the model first: sbatch slurm/serve.sbatch EXPORT"),
        (["--max-model-len", "64"], "name the model first"),
        (["EXPORT", "--data-parallel-size=4"], "--data-parallel-size: the job sets it; remove it"),
        (["EXPORT", "--headless"], "--headless: the job sets it; remove it"),
    ],
)
def test_words_that_vllm_would_take_for_something_else_are_refused(
    words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        command(words, JOB)


def test_outside_of_a_job_one_line_says_what_to_submit() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_NNODES is not set; submit slurm/serve\.sbatch"):
        command(["EXPORT"], {"REPLICAS_PER_NODE": "1"})


def test_the_process_becomes_vllm(tmp_path: Path) -> None:
    words = ("-m", "dms_train.launch.serve", "EXPORT")
    missing = launch.python(*words, **JOB, PATH=str(tmp_path))
    assert missing.returncode == 2
    assert missing.stderr == "config error: vllm is not on PATH; activate its environment\n"
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent)])
    found = launch.python(*words, **JOB, PATH=path)
    assert found.returncode == 7
    assert found.stdout.startswith("serve EXPORT --data-parallel-size 24 ")
