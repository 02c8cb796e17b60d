"""A run that is signalled saves on all ranks after the same step, and resumes from there.

And the launch scripts without a scheduler, which start the same runs.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import launch, paused_run, stalls
from tests.support.commands import forked_python
from tests.support.ranks import Ranks, dms_train, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
STEPS = 16


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exam sheets, and an undisturbed run over them on two nodes without a scheduler."""
    root = tmp_path_factory.mktemp("signals")
    sheets = ("exam-sheets", "--out", str(root / "sheets"), "--sheets", "200")
    launch.checked(launch.module("dms_train.data_prep.prepare", *sheets))
    port = str(launch.free_ports(1)[0])
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    words = ("node.sh", *command(root, "whole")[1:])
    run = str(root / "whole")
    shared |= {"NODE_NAME": "localhost", "RUN": run, **without_imports(root)}
    nodes = [script(root, *words, **shared) for _ in "ab"]
    for node in nodes:
        code, stderr = ended(node)
        assert code == 0, stderr
    return root


def command(root: Path, name: str) -> list[str]:
    """`python -m dms_train` for a tiny run from scratch with TP 2."""
    return [
        *("-m", "dms_train", "experiment=tiny_pretrain", "observe.wandb=disabled"),
        "model.architecture.num_layers=2",
        "model.architecture.hidden_size=32",
        "model.architecture.ffn_hidden_size=48",
        "model.architecture.kv_channels=8",
        f"model.tokenizer={root}/sheets/tokenizer",
        f"data.paths=[{root}/sheets/train]",
        "data.seq_length=96",
        "run.eval_samples=8",
        "run.save_interval=0",
        "run.log_interval=1",
        f"stage.pretrain.steps={STEPS}",
        f"run.dir={root}/{name}",
    ]


def without_imports(root: Path) -> dict[str, str]:
    """Variables with which launch scripts and torchrun start forks that have imported torch.

    One test starts everything anew: `test_both_ranks_stop_..._when_their_launcher_is_ended`.
    """
    python = forked_python(root)
    return {"PYTHON": python, "PYTHON_EXEC": python}


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def steps_saved(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").glob("step_*"))]


def stopped_by_usr1(root: Path, name: str) -> str:
    """Start a run and signal one rank in mid-stage; its log."""
    (root / name).mkdir()
    words = command(root, name)[2:]
    log = root / f"{name}.log"
    ranks = Ranks.start(paused_run.train_with_pause, 2, 4, root / name, *words, log=log)
    try:
        paused_run.wait_for_pause(root / name, 2, ranks.running)
        while ranks.running():
            ranks.signal(1, signal.SIGUSR1)  # until the process has ended, as launch/job.sh does
            time.sleep(0.05)
        assert ranks.wait(60)
        assert ranks.codes == {0: 0, 1: 0}
        return ranks.output(0) + ranks.output(1)
    finally:
        ranks.kill()


def stopped_with_its_launcher(root: Path, name: str) -> str:
    """Start a run under torchrun and end torchrun in mid-stage; its log."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (root / name).mkdir()
    words = paused_run.command(4, root / name, command(root, name)[2:])
    process = subprocess.Popen(
        [sys.executable, *launcher, *words],
        env=launch.environment(**without_imports(root)),
        cwd=launch.ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        paused_run.wait_for_pause(root / name, 2, lambda: process.poll() is None)
        process.terminate()
        return process.communicate()[1]
    finally:
        process.kill()


def assert_both_ranks_stop_after_one_step(log: str, run: Path) -> None:
    assert "stopped after step" in log
    assert steps_saved(run) == [5]
    assert (run / "state" / "STOPPED").read_text() == "step 5\n"
    assert not (run / "state" / "pretrain.done").exists()


def test_both_ranks_stop_after_one_step_and_the_rest_is_the_same(workspace: Path) -> None:
    """Resumed with `--until`, and then continued from its own file."""
    run = workspace / "usr1"
    log = stopped_by_usr1(workspace, "usr1")
    assert_both_ranks_stop_after_one_step(log, run)
    words = command(workspace, "usr1")[2:]
    launch.checked(run_ranks(dms_train, 2, *words, "--until", "pretrain"))
    assert not (run / "state" / "STOPPED").exists()
    assert (run / "state" / "pretrain.done").is_file()
    assert losses(run) == losses(workspace / "whole")
    assert not (run / "state" / "DONE").exists()
    assert not (run / "exports").exists()
    frozen = ("--frozen", str(run / "config.yaml"))
    launch.checked(run_ranks(dms_train, 2, *frozen, "--until", "export"))
    assert (run / "exports" / "final").exists()
    assert (run / "state" / "DONE").is_file()
    assert losses(run) == losses(workspace / "whole")


@pytest.mark.slow
def test_both_ranks_stop_after_one_step_when_their_launcher_is_ended(workspace: Path) -> None:
    """The launch script of one node without a scheduler continues the run."""
    run = workspace / "term"
    log = stopped_with_its_launcher(workspace, "term")
    assert_both_ranks_stop_after_one_step(log, run)
    code, stderr = ended(script(workspace, "local.sh", "2", *command(workspace, "term")[2:]))
    assert code == 0, stderr
    assert losses(run) == losses(workspace / "whole")
    assert (run / "state" / "DONE").is_file()


def test_a_rank_that_hangs_is_reported_and_the_run_ends(workspace: Path) -> None:
    words = [*command(workspace, "hang"), "stage.pretrain.steps=4000"]
    words.append("parallel.distributed_timeout_minutes=0.4")
    run = workspace / "hang"
    ranks = Ranks.start(dms_train, 2, *words[2:], log=workspace / "hang.log")
    try:
        metrics = run / "metrics.jsonl"
        while not (metrics.is_file() and len(losses(run)) >= 4):
            assert ranks.running(), ranks.output(0)
            time.sleep(0.05)
        ranks.signal(1, signal.SIGSTOP)
        while ranks.running():
            time.sleep(0.05)
        assert ranks.codes[0] != 0
        message = ranks.output(0).splitlines()[-1]
    finally:
        ranks.kill()
    assert re.search(
        r"error: rank 1 \(.*, after step \d+, silent for \d+ s\) did not answer", message
    )


def test_a_rank_that_stalls_reading_data_is_reported(workspace: Path) -> None:
    words = [*command(workspace, "stuck")[2:], "parallel=single"]
    words.append(f"parallel.distributed_timeout_minutes={stalls.TIMEOUT_SECONDS / 60}")
    result = run_ranks(stalls.train_with_a_hanging_disk, 2, *words)
    assert result.returncode != 0
    (message,) = re.findall("^error: .*$", result.stderr, re.MULTILINE)
    assert re.match(
        # the samples of a step are read while the step before is computed
        rf"error: rank 1 \(\S+, after step {stalls.STEP - 1}\) has stalled for "
        r"\d+ s reading data, at \S*stalls.py:\d+ in read_from_a_hanging_disk, called from "
        r"dms_train/data/batches.py:\d+ in \S+; stacks in \S+/ranks/\*\.stack; "
        r"the run ends here\. Start the same command",
        message,
    )


def test_a_stage_that_is_not_in_the_configuration_is_refused(workspace: Path) -> None:
    result = launch.module(
        *command(workspace, "wrong")[1:], "parallel=single", "--until", "retrofit"
    )
    assert result.returncode == 2
    assert "--until retrofit: not in stage.run; choose one of pretrain, export" in result.stderr
    assert not (workspace / "wrong").exists()


def script(root: Path, file: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """Start a launch script in a folder that holds no code."""
    return subprocess.Popen(
        ["bash", str(launch.ROOT / "launch" / file), *arguments],
        env=launch.environment(**{"PYTHON": sys.executable, **extra}),
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        stderr = process.communicate()[1]
    finally:
        process.kill()
    return process.returncode, stderr


def test_two_nodes_without_a_scheduler(workspace: Path) -> None:
    assert [step for step, _ in losses(workspace / "whole")] == [*range(1, STEPS + 1)]
    assert (workspace / "whole" / "state" / "DONE").is_file()


def test_the_script_of_one_node_needs_a_number_of_ranks(workspace: Path) -> None:
    assert ended(script(workspace, "local.sh", "experiment=demo"))[0] == 2


def test_a_refused_run_keeps_why_it_ended(workspace: Path) -> None:
    run = workspace / "refused"
    words = ["node.sh", *command(workspace, "refused")[1:], "parallel=single"]
    words.append(f"data.paths=[{workspace}/absent]")
    variables = {"NPROC": "1", "RUN": str(run), "DMS_ATTEMPT": "7.1", **without_imports(workspace)}
    code, _ = ended(script(workspace, *words, **variables))
    assert code != 0
    message = json.loads((run / "errors" / "7.1-rank0.json").read_text())["message"]
    assert message.startswith(f"error: {workspace}/absent.manifest.json: missing")
    assert (run / "state" / "REFUSED").read_text() == f"{message}\n"
    assert not (run / "checkpoints").exists()
