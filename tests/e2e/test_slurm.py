"""Chains of jobs under a real SLURM: two nodes of this machine, one rank each, TP 2 over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dms_train.evaluation.scaling import store
from dms_train.evaluation.scaling.results import load_all
from tests.support import launch, wandb_file
from tests.support.commands import write_commands
from tests.support.local_slurm import LocalSlurm, missing
from tests.support.r1_tokenizer import write_tokenizer

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]
STAGES = ["prepare", "hf_to_megatron", "zero_neuron", "retrofit", "export", "validate_export"]
ZEROING, ANNEALING = 4, 30
# the two stages that faults are put into, from the model's own weights
TRAINING = ("--skip", "prepare,hf_to_megatron", "stage.run=[zero_neuron,retrofit]")
KEY = "0123456789abcdef" * 2 + "deadbeef"  # looks like one of Weights & Biases


@dataclass(frozen=True)
class Site:
    """A cluster, and a folder with a text for all tests."""

    slurm: LocalSlurm
    root: Path

    def submit(self, *words: str, code: int = 0) -> str:
        """Run `dms-submit` and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "dms_train.launch.submit", *words],
            env=launch.environment(**self.slurm.environment, WANDB_API_KEY=KEY),
            cwd=launch.ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, name: str, *words: str) -> Path:
        """Submit a run called `name`; its folder."""
        self.submit(*self.words(name), *words)
        return self.root / name

    def words(self, name: str) -> list[str]:
        """Overrides of a short retrofit of the embedded teacher over two nodes."""
        return [
            "experiment=demo",
            "parallel=tp2",
            f"data.paths=[{self.root}/sheets/train]",
            "data.seq_length=96",
            "data.micro_batch_size=4",
            "data.global_batch_size=8",
            "stage.run=[zero_neuron,retrofit,export]",
            f"stage.zero_neuron.steps={ZEROING}",
            f"stage.retrofit.steps_per_cr={ANNEALING}",
            "stage.retrofit.target_cr=2",
            "stage.validate_export.samples=4",
            "stage.validate_export.problems=null",
            "run.eval_samples=8",
            "observe.wandb=disabled",
            "parallel.distributed_timeout_minutes=60",  # paused ranks are not lost
            "cluster.nodes=2",
            "cluster.time=01:00:00",
            "cluster.signal_seconds=90",
            "cluster.save_seconds=80",
            f'run.dir="{self.root}/{name}"',
        ]

    def job(self, run: Path, stage: str) -> str:
        """Id of a stage's job."""
        return json.loads((run / "launch" / "jobs.json").read_text())[stage]

    def field(self, job: str, name: str) -> str:
        """A field of SLURM's record of a job."""
        described = self.slurm.call("scontrol", "show", "job", "-o", job)
        return next(w.partition("=")[2] for w in described.split() if w.startswith(f"{name}="))

    def finish(self, run: Path, seconds: float = 600) -> None:
        """Wait until no job of the run is left."""
        jobs = json.loads((run / "launch" / "jobs.json").read_text()).values()

        def left() -> set[str]:
            listed = self.slurm.call("squeue", "--noheader", "--format=%A").split()
            return set(listed) & set(jobs)

        wait(lambda: not left(), seconds, lambda: f"{self.submit('status', str(run))}{logs(run)}")

    def finished(self, run: Path, stages: int) -> None:
        """Wait for the end, which must be that of that many finished stages."""
        self.finish(run)
        status = self.submit("status", str(run))
        assert status.count("finished") == stages, status + logs(run)

    def signal(self, run: Path, stage: str) -> None:
        """Send a job's batch shell what SLURM sends before the time limit."""
        self.slurm.call("scancel", "--batch", "--signal=USR1", self.job(run, stage))


def wait(condition: Callable[[], Any], seconds: float, otherwise: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(otherwise())
        time.sleep(0.2)


def logs(run: Path) -> str:
    return "".join(f"\n--- {f.name}\n{f.read_text()[-3000:]}" for f in run.glob("logs/*.log"))


def losses(run: Path) -> list[tuple[int, float]]:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def wait_for_log(run: Path, text: str) -> None:
    """Wait until a log of the run holds a text."""
    wait(lambda: text in logs(run), 300, lambda: logs(run))


@contextlib.contextmanager
def held(run: Path, step: int) -> Iterator[list[psutil.Process]]:
    """The two ranks of a run, paused after that many steps.

    However fast or busy the machine is, they are in mid-stage until they are let go.
    """
    wait(lambda: (losses(run) or [(0, 0.0)])[-1][0] >= step, 400, lambda: logs(run))
    both = ranks(run)
    for rank in both:
        rank.suspend()
    try:
        yield both
    finally:
        for rank in both:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()


def ranks(run: Path) -> list[psutil.Process]:
    """The two training processes of a run, in order."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            values = process.environ()
            if values.get("RUN") == str(run) and "RANK" in values:
                found[values["RANK"]] = process
    assert sorted(found) == ["0", "1"], logs(run)
    return [found["0"], found["1"]]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="dms-slurm-"))  # sockets need a short path
    slurm = LocalSlurm(root / "slurm")
    try:
        slurm.start()
        yield Site(slurm, root)
    finally:
        slurm.stop()
        shutil.rmtree(root, ignore_errors=True)


WHOLE = "the $HOME's 50% run"  # a folder whose name needs care everywhere


@pytest.fixture(scope="module")
def whole(site: Site) -> Path:
    """An undisturbed chain; it also makes the text for the others."""
    sheets = f"exam-sheets --out {site.root}/sheets --sheets 300 --document-tokens 90"
    run = site.start(WHOLE, "--prepare", sheets, "observe.wandb=offline")
    site.finish(run)
    return run


def test_a_chain_runs_from_text_to_a_validated_export(site: Site, whole: Path) -> None:
    status = site.submit("status", str(whole))
    assert [line.split()[0] for line in status.splitlines()[: len(STAGES)]] == STAGES, logs(whole)
    assert status.count("finished") == len(STAGES), status + logs(whole)
    assert [step for step, _ in losses(whole)] == list(range(1, ZEROING + ANNEALING + 1))
    assert (whole / "exports" / "final" / "hf" / "model.safetensors").is_file()
    assert (whole / "report.md").is_file()
    state = json.loads(next((whole / "checkpoints").glob("*/run_state.json")).read_text())
    assert state["layout"] == {"tp": 2, "pp": 1, "cp": 1, "dp": 1}


def test_a_run_takes_the_space_that_nodes_are_checked_for(whole: Path) -> None:
    script = (whole / "launch" / "retrofit.sbatch").read_text()
    named = ("CHECKPOINT_BYTES=", "KEPT_BYTES=")
    required = sum(int(script.partition(name)[2].split()[0]) for name in named) * 1.1  # margin
    folders = [whole / name for name in ("checkpoints", "weights", "exports")]
    files = (file for folder in folders for file in folder.rglob("*"))
    taken = sum(file.lstat().st_size for file in files)
    assert taken <= required <= 1.2 * taken
    assert "node dmsnode2 has " in logs(whole)


def test_one_rank_records_and_every_job_continues_one_tracked_run(whole: Path) -> None:
    segments = [wandb_file.read(path) for path in wandb_file.find(whole)]
    assert len(segments) == 3  # zero_neuron, retrofit, export; of rank 0 alone
    assert len({segment.run_id for segment in segments}) == 1
    rows = [row for segment in segments for row in segment.rows if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in rows] == losses(whole)


def test_no_key_is_written_anywhere(site: Site, whole: Path) -> None:
    files = [file for file in whole.rglob("*") if file.is_file()]
    assert {"sbatch", "yaml", "txt", "log", "wandb"} <= {file.suffix[1:] for file in files}
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def test_submitting_again_does_not_change_a_finished_run(site: Site, whole: Path) -> None:
    assert "every stage is finished" in site.submit(*site.words(WHOLE))
    refused = site.submit(*site.words(WHOLE), "optim.lr=1e-5", code=2)
    assert "optim.lr: 0.00025 -> 1e-05" in refused
    assert len(refused.splitlines()) == 1
    assert "nothing in the queue" in site.submit("cancel", str(whole))
    (whole / "state" / "CANCELLED").unlink()


def test_sbatch_accepts_every_script(site: Site) -> None:
    shown = site.submit("--dry-run", *site.words("dry"))
    assert shown.count("to start at") == len(STAGES), shown
    assert not (site.root / "dry").exists()


def test_a_refusal_of_sbatch_leaves_no_incomplete_chain(site: Site) -> None:
    words = (*site.words("refused"), "cluster.partition=absent")
    assert "invalid partition specified: absent" in site.submit(*words, code=2)
    assert "was not submitted" in site.submit("status", f"{site.root}/refused", code=2)


def test_a_time_limit_in_mid_stage_changes_no_loss(site: Site, whole: Path) -> None:
    run = site.start("limited", *TRAINING)
    with held(run, ZEROING + 3):
        job = site.job(run, "retrofit")
        # the limit is now nearer than cluster.signal_seconds; SLURM looks twice a minute
        site.slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")
        wait_for_log(run, "signal USR1")
        site.slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait(lambda: site.field(job, "Restarts") == "1", 300, lambda: logs(run))
    site.finished(run, 2)
    assert "requeued: stopped and saved" in logs(run)
    assert "could not be requeued" not in logs(run)
    assert "Signal 10 (SIGUSR1)" not in logs(run)  # it is sent again while the ranks shut down
    assert losses(run) == losses(whole)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_only(site: Site, whole: Path) -> None:
    run = site.start("killed", *TRAINING, "run.save_interval=5")
    with held(run, ZEROING + 7) as both:
        both[1].kill()
    site.finished(run, 2)
    assert site.field(site.job(run, "retrofit"), "Restarts") == "1"
    assert "requeued: failed after step_" in logs(run)
    assert losses(run) == losses(whole)


def test_a_refused_stage_stops_the_chain_at_once_with_its_reason(site: Site, whole: Path) -> None:
    absent = f"data.paths=[{site.root}/absent]"
    run = site.start("failing", absent, "--skip", "prepare")
    site.finish(run)
    status = site.submit("status", str(run))
    refused = f"refused: error: {site.root}/absent.manifest.json: missing; make the files with"
    assert f"FAILED: {refused} dms-data tokenize" in status, status + logs(run)
    assert status.split("zero_neuron")[1].splitlines()[0].count("FAILED") == 1
    assert site.field(site.job(run, "zero_neuron"), "Restarts") == "0"
    assert site.field(site.job(run, "retrofit"), "JobState") == "CANCELLED"
    assert not (run / "exports").exists()


def test_a_stage_that_fails_repeatedly_is_not_restarted(site: Site) -> None:
    python = site.root / "broken-python"
    python.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 7\n")
    python.chmod(0o755)
    run = site.start("broken", f"cluster.python={python}", "cluster.max_failures=1")
    site.finish(run)
    status = site.submit("status", str(run))
    assert "FAILED: gave up after 2 failure(s) without progress, exit code 7" in status, logs(run)
    assert "prepare" in next(line for line in status.splitlines() if "FAILED" in line)
    assert "failure 1 of at most 1 without progress, exit code 7" in logs(run)
    assert site.field(site.job(run, "prepare"), "Restarts") == "1"
    assert site.field(site.job(run, "validate_export"), "JobState") == "CANCELLED"


def test_a_signal_before_the_ranks_handle_it_is_not_lost(site: Site, whole: Path) -> None:
    steps = 100
    short = ("stage.run=[zero_neuron]", f"stage.zero_neuron.steps={steps}")
    run = site.start("early", *TRAINING, *short)
    wait_for_log(run, "attempt 0, nodes")
    site.signal(run, "zero_neuron")
    site.finished(run, 1)
    assert "signal USR1: asking the step" in logs(run)
    assert "requeued: stopped and saved, step " in logs(run)
    assert "without progress" not in logs(run)
    assert "Signal 10 (SIGUSR1)" not in logs(run)
    assert [step for step, _ in losses(run)] == list(range(1, steps + 1))


def test_a_step_that_does_not_stop_is_ended_and_counted(site: Site, whole: Path) -> None:
    run = site.start("stubborn", *TRAINING, "cluster.save_seconds=5")
    with held(run, ZEROING + 3):
        site.signal(run, "retrofit")
        wait_for_log(run, "no clean stop in 5 s: ending the step")
        wait_for_log(run, "requeued: failure 1 of at most 2 without progress")
    site.finished(run, 2)
    assert losses(run) == losses(whole)


def test_a_preempted_run_saves_and_continues(site: Site, whole: Path) -> None:
    run = site.start("preempted", *TRAINING)
    job = site.job(run, "retrofit")
    with held(run, ZEROING + 3):
        wide = ["--nodes=2", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null"]
        site.slurm.call("sbatch", "--partition=urgent", *wide, "--wrap=sleep 3")
        wait(lambda: site.field(job, "PreemptTime") != "None", 120, lambda: logs(run))
    wait(lambda: site.field(job, "Restarts") == "1", 300, lambda: logs(run))
    site.finished(run, 2)
    assert "requeued: stopped and saved" in logs(run)
    assert "without progress" not in logs(run)
    assert losses(run) == losses(whole)


def test_a_cancelled_run_is_not_requeued_and_can_be_resumed(site: Site, whole: Path) -> None:
    run = site.start("cancelled", *TRAINING)
    with held(run, ZEROING + 3):
        first = site.job(run, "retrofit")
        site.submit("cancel", str(run))
    site.finish(run)
    assert site.field(first, "JobState") == "CANCELLED"
    assert site.field(first, "Restarts") == "0"
    site.submit("resume", str(run))
    site.finished(run, 1)
    assert losses(run) == losses(whole)


def test_a_lost_node_that_returns_is_used_again(site: Site, whole: Path) -> None:
    run = site.start("lost", *TRAINING, "run.save_interval=5", "cluster.hang_seconds=60")
    with held(run, ZEROING + 7):
        name = site.slurm.names[1]
        site.slurm.kill_node(name)
        time.sleep(5)
        site.slurm.start_node(name)
    site.finished(run, 2)
    assert losses(run) == losses(whole)


def test_an_array_prepares_every_shard_of_a_data_set(site: Site) -> None:
    folder = site.root / "array"
    folder.mkdir()
    write_tokenizer(folder / "tokenizer")
    rows = [
        {"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(7)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = os.pathsep.join([str(write_commands(folder / "bin")), os.environ["PATH"]])
    words = ["2", "chat", "rows.jsonl", "--tokenizer", "tokenizer", "--output", "data/chat"]
    subprocess.run(
        [
            *("sbatch", "--wait", "--array=0-1", "--cpus-per-task=1", f"--chdir={folder}"),
            *(str(launch.ROOT / "slurm" / "data.sbatch"), *words),
        ],
        env=launch.environment(**{**site.slurm.environment, "PATH": path}),
        timeout=300,
        check=False,
    )
    said = "".join(log.read_text() for log in folder.glob("*.log"))
    made = {
        file.name: len(file.read_text().splitlines())
        for file in (folder / "data").glob("*.verdicts.jsonl")
    }
    expected = {f"chat-0000{index}-of-00002.verdicts.jsonl": 4 - index for index in range(2)}
    assert made == expected, said
    assert len(list((folder / "data").glob("*.manifest.json"))) == 2, said


SWEEP = [
    f"model.path={launch.ROOT}/dms_train/assets/exam_teacher",
    "model.device=cpu",
    "model.max_num_seqs=2",  # one document at a time
    "task.path=problems.jsonl",
    "sweep.lengths=[0.125,0.25]",
    "sweep.widths=[1,2]",
    "sampling.temperature=0.8",
]
CLOCKS = ("session", "clock", "seconds", "peak_allocated_bytes")


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """The stored chains of an evaluation, without what a clock says."""
    found = store.read_chains(folder)
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in found]


def points(folder: Path) -> list[str]:
    (merged,) = load_all([folder])
    assert merged.complete
    return [str(point) for point in merged.points()]


def test_an_array_evaluates_and_a_task_that_is_requeued_continues(site: Site) -> None:
    folder, count = site.root / "evaluation", 20
    folder.mkdir()
    path = os.pathsep.join([str(write_commands(folder / "bin")), os.environ["PATH"]])
    environment = launch.environment(**{**site.slurm.environment, "PATH": path})

    def call(*words: str) -> str:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def said() -> str:
        return "".join(
            f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log")
        )

    call("dms-data", "exam-problems", "--out", "problems.jsonl", "--sheets", str(count))
    script = str(launch.ROOT / "slurm" / "eval.sbatch")
    batch = ("sbatch", "--parsable", "--array=0-1", "--cpus-per-task=1", script)
    job = call(*batch, *SWEEP, "run.dir=array").strip()
    chains = folder / "array" / "chains" / "00001-of-00002.jsonl"
    wait(lambda: chains.exists() and chains.stat().st_size, 300, said)
    call("scontrol", "requeue", f"{job}_1")
    wait(lambda: not call("squeue", "--noheader", f"--jobs={job}"), 600, said)
    log = next(folder.glob("*_1.log")).read_text()
    starts = re.findall(rf"(\d+) of {count // 2} documents to do", log)
    assert len(starts) == 2, said()
    assert count // 2 == int(starts[0]) > int(starts[1]) > 0, "give it more documents"

    call("dms-eval", *SWEEP, "run.dir=whole")
    assert evaluated(folder / "array") == evaluated(folder / "whole")
    assert points(folder / "array") == points(folder / "whole")
    for name in ("array", "whole"):
        call("dms-eval", "report", name, "--output", f"{name}.html")
    # seconds and bytes follow the word of a complete run
    merged, whole = (
        re.sub(r"(?m)\| yes \|.*$", "", (folder / f"{name}.md").read_text())
        for name in ("array", "whole")
    )
    assert merged == whole


def test_a_server_has_replicas_on_every_node(site: Site) -> None:
    folder = site.root / "server"
    folder.mkdir()
    program = folder / "vllm"
    # the replicas of the second node end, as after a fault; vLLM's exit code is then 0
    program.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *headless*) ;; *) sleep 600 ;; esac\n')
    program.chmod(0o755)
    script = str(launch.ROOT / "slurm" / "serve.sbatch")
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**site.slurm.environment, "PATH": path, "REPLICAS_PER_NODE": "3"}
    subprocess.run(
        [
            *("sbatch", "--wait", "--nodes=2", "--cpus-per-task=2", f"--chdir={folder}"),
            *(script, "EXPORT", "--served-model-name", "a name"),
        ],
        env=launch.environment(**given),
        timeout=300,
        check=False,
    )
    (log,) = folder.glob("dms-vllm-*.log")
    job = int(log.stem.rpartition("-")[2])
    common = (
        "serve EXPORT --served-model-name a name --data-parallel-size 6 "
        "--data-parallel-size-local 3 --data-parallel-address 127.0.0.1 "
        f"--data-parallel-rpc-port {20000 + job}"
    )
    headless = f"{common} --headless --data-parallel-start-rank 3"
    lines = [line for line in log.read_text().splitlines() if line.startswith("serve ")]
    assert sorted(lines) == [common, headless]
