"""Chains of jobs under a real SLURM: two nodes of this machine, one rank each, TP 2 over gloo."""

from __future__ import annotations

import json
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

from tests.support import launch
from tests.support.local_slurm import LocalSlurm, missing

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
STAGES = ["prepare", "hf_to_megatron", "zero_neuron", "retrofit", "export", "validate"]
ZEROING, ANNEALING = 4, 60


@dataclass(frozen=True)
class Site:
    """A cluster, and a folder with a text for all tests."""

    slurm: LocalSlurm
    root: Path

    def submit(self, *words: str, code: int = 0) -> str:
        """What `dms-submit` prints."""
        done = subprocess.run(
            [sys.executable, "-m", "launch.submit", *words],
            env=launch.environment(**self.slurm.environment),
            cwd=launch.ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, name: str, *changes: str, flags: tuple[str, ...] = ()) -> Path:
        """Submit a run called `name`; its folder."""
        self.submit(*flags, *self.words(name), *changes)
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
            "stage.validate.samples=4",
            "stage.validate.problems=null",
            "run.eval_samples=8",
            "observe.wandb=disabled",
            "cluster.nodes=2",
            "cluster.time=01:00:00",
            "cluster.signal_seconds=30",
            "cluster.save_seconds=60",
            f"run.dir={self.root}/{name}",
        ]

    def job(self, run: Path, stage: str) -> str:
        """Id of a stage's job."""
        return json.loads((run / "launch" / "jobs.json").read_text())[stage]

    def field(self, job: str, name: str) -> str:
        """A field of what SLURM says about a job."""
        described = self.slurm.call("scontrol", "show", "job", "-o", job)
        return next(w.partition("=")[2] for w in described.split() if w.startswith(f"{name}="))

    def finish(self, run: Path, seconds: float = 400) -> None:
        """Wait until no job of the run is left."""
        jobs = json.loads((run / "launch" / "jobs.json").read_text()).values()

        def left() -> set[str]:
            listed = self.slurm.call("squeue", "--noheader", "--format=%A").split()
            return set(listed) & set(jobs)

        wait(lambda: not left(), seconds, lambda: f"{self.submit('status', str(run))}{logs(run)}")


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


def reach(run: Path, step: int) -> None:
    """Wait until a run has taken that many steps."""
    wait(lambda: (losses(run) or [(0, 0.0)])[-1][0] >= step, 240, lambda: logs(run))


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


@pytest.fixture(scope="module")
def whole(site: Site) -> Path:
    """A chain that nobody disturbed; it also makes the text for the others."""
    sheets = f"exam-sheets --out {site.root}/sheets --sheets 300 --document-tokens 90"
    run = site.start("whole", flags=("--prepare", sheets))
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
    assert state["layout"] == {"tp": 2, "pp": 1, "dp": 1}


def test_submitting_again_leaves_a_finished_run_alone(site: Site, whole: Path) -> None:
    assert "every stage is finished" in site.submit(*site.words("whole"))
    refused = site.submit(*site.words("whole"), "optim.lr=1e-5", code=2)
    assert "optim.lr: 0.00025 -> 1e-05" in refused
    assert len(refused.splitlines()) == 1


def test_sbatch_accepts_every_script(site: Site) -> None:
    shown = site.submit("--dry-run", *site.words("dry"))
    assert shown.count("to start at") == len(STAGES), shown
    assert not (site.root / "dry").exists()


def test_a_time_limit_in_mid_stage_changes_no_loss(site: Site, whole: Path) -> None:
    run = site.start("limited")
    reach(run, ZEROING + 3)
    job = site.job(run, "retrofit")
    # the limit is now nearer than cluster.signal_seconds
    site.slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait(lambda: site.field(job, "Restarts") == "1", 200, lambda: logs(run))
    site.slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    site.finish(run)
    assert "finished" in site.submit("status", str(run)).splitlines()[-2], logs(run)
    assert "requeued: stopped and saved" in logs(run)
    assert "could not be requeued" not in logs(run)
    assert losses(run) == losses(whole)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_only(site: Site, whole: Path) -> None:
    run = site.start("killed", "run.save_interval=5")
    reach(run, ZEROING + 7)
    ranks = [p for p in psutil.process_iter() if is_rank(p, run, "1")]
    assert len(ranks) == 1
    ranks[0].kill()
    site.finish(run)
    assert site.submit("status", str(run)).count("finished") == len(STAGES), logs(run)
    assert site.field(site.job(run, "retrofit"), "Restarts") == "1"
    assert "requeued: failed after step_" in logs(run)
    assert losses(run) == losses(whole)


def is_rank(process: psutil.Process, run: Path, rank: str) -> bool:
    try:
        found = process.environ()
    except psutil.Error:
        return False
    return found.get("RUN") == str(run) and found.get("RANK") == rank


def test_a_failing_stage_stops_the_chain_and_says_why(site: Site, whole: Path) -> None:
    absent = f"data.paths=[{site.root}/absent]"
    run = site.start("failing", absent, "cluster.max_failures=0", flags=("--skip", "prepare"))
    site.finish(run)
    status = site.submit("status", str(run))
    assert "zero_neuron" in status
    assert "FAILED: gave up after 1 failure(s) without progress" in status, logs(run)
    assert "absent.manifest.json: missing; make the files with dms-data tokenize" in status
    assert site.field(site.job(run, "retrofit"), "JobState") == "CANCELLED"
    assert not (run / "exports").exists()


def test_a_cancelled_run_is_not_requeued_and_can_be_resumed(site: Site, whole: Path) -> None:
    run = site.start("cancelled")
    reach(run, ZEROING + 3)
    first = site.job(run, "retrofit")
    site.submit("cancel", str(run))
    site.finish(run, 60)
    assert site.field(first, "JobState") == "CANCELLED"
    assert site.field(first, "Restarts") == "0"
    site.submit("resume", str(run))
    site.finish(run)
    assert site.submit("status", str(run)).count("finished") == 3, logs(run)
    assert losses(run) == losses(whole)


def test_a_lost_node_that_comes_back_is_used_again(site: Site, whole: Path) -> None:
    run = site.start("lost", "run.save_interval=5", "cluster.hang_seconds=40")
    reach(run, ZEROING + 7)
    name = site.slurm.names[1]
    site.slurm.kill_node(name)
    time.sleep(5)
    site.slurm.start_node(name)
    site.finish(run)
    assert site.submit("status", str(run)).count("finished") == len(STAGES), logs(run)
    assert losses(run) == losses(whole)
