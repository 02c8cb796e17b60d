"""`dms-submit` without a scheduler, or with one that records its calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from dms_train.cli.config_source import compose
from dms_train.config.build import ConfigError, to_mapping
from dms_train.launch import scheduler, submit
from dms_train.launch.chain import Job
from dms_train.launch.stage import main as run_stage
from tests.support import configs
from tests.support.chains import WORDS, config, stages
from tests.support.disks import CannotArrange, small_disk

ROOT = Path(__file__).resolve().parents[3]


def dms_submit(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dms_train.launch.submit", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_dry_run_needs_no_torch_writes_nothing_and_shows_every_job(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [*WORDS, f"run.dir={tmp_path}/run"]
    done = dms_submit(tmp_path, "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#SBATCH --job-name=run-") == 7
    assert "every node must have: 60.9 MiB in the run folder\n" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_validation_that_no_gpu_holds_is_refused_before_anything_is_submitted(
    tmp_path: Path,
) -> None:
    given = configs.config(
        cluster={"gpu": "a100_40gb", "gpus_per_node": 8},
        parallel__params_dtype="bf16",
        model={"architecture": asdict(configs.KNOWN["qwen3_32b"])},
    )
    with pytest.raises(
        ConfigError, match=r"stage\.validate_export: needs 6\d\.\d GiB of one GPU.*--skip"
    ):
        submit._check_validation([Job("validate_export", "validate")], given)
    submit._check_validation([Job("export", "train")], given)


def test_no_subcommand_needs_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    programs, run = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    for name, body in (("sbatch", "echo 7"), ("squeue", ":"), ("scancel", ":"), ("scontrol", ":")):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": f"{programs}:/usr/bin:/bin"}
    subcommands = (["status", str(run)], ["cancel", str(run)], ["resume", str(run)])
    for words in ([*WORDS, f"run.dir={run}"], *subcommands):
        done = dms_submit(tmp_path, *words, **path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("job 7") == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.nodes=3"], "config error: "),
        (["cluster.node=2"], "cluster.node: unknown key; did you mean cluster.nodes?"),
        (["--skip", "pretrain"], "--skip pretrain: no such stage"),
        (["cluster=gpu_container"], "cluster.container_image: missing"),
        (["--prepare", "tokenize 'a"], "--prepare tokenize 'a: No closing quotation; quote it"),
        (["cluster.save_seconds=300"], "save_seconds=300: not below cluster.signal_seconds=300"),
    ],
)
def test_a_bad_command_is_one_line_and_leaves_nothing(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = dms_submit(tmp_path, *WORDS, f"run.dir={tmp_path}/run", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


class FakeScheduler:
    """Accepts jobs and records them."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str | None]] = []
        self.queue: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.full = 99  # jobs that are accepted

    def submit(self, script: str, after: str | None) -> str:
        name = re.search(r"--job-name=run-(\w+)", script)
        assert name is not None
        if len(self.taken) == self.full:
            raise scheduler.SchedulerError("sbatch: no more jobs")
        self.taken.append((name[1], after))
        return str(100 + len(self.taken))

    def states(self, jobs: object) -> dict[str, str]:
        return self.queue

    def cancel(self, jobs: Iterable[str]) -> None:
        self.cancelled += jobs


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    fake = FakeScheduler()
    monkeypatch.setattr(scheduler, "submit", fake.submit)
    monkeypatch.setattr(scheduler, "states", fake.states)
    monkeypatch.setattr(scheduler, "cancel", fake.cancel)
    monkeypatch.setattr(scheduler, "ended_as", lambda job: "TIMEOUT")
    monkeypatch.setattr(scheduler, "available", lambda: True)
    return fake


def test_jobs_wait_for_the_one_before(tmp_path: Path, queue: FakeScheduler) -> None:
    submit._main([*WORDS, f"run.dir={tmp_path}/run", "--prepare", "tokenize a"])
    names = [name for name, _ in queue.taken]
    assert names == stages(config(tmp_path))
    assert [after for _, after in queue.taken] == [None, *map(str, range(101, 107))]
    launch = tmp_path / "run" / "launch"
    assert json.loads((launch / "jobs.json").read_text())["export"] == "106"
    assert json.loads((launch / "prepare.json").read_text()) == ["tokenize", "a"]
    assert "torch==" in (launch / "packages.txt").read_text()
    assert (tmp_path / "run" / "code" / "dms_train" / "launch" / "job.sh").is_file()
    assert compose([*WORDS]).stage == submit.read_frozen(tmp_path / "run" / "config.yaml").stage


def test_an_incomplete_chain_is_cancelled(tmp_path: Path, queue: FakeScheduler) -> None:
    queue.full = 2
    words = [*WORDS, f"run.dir={tmp_path}/run"]
    with pytest.raises(scheduler.SchedulerError, match="no more jobs"):
        submit._main(words)
    assert queue.cancelled == ["102", "101"]
    queue.full, queue.taken = 99, []
    submit._main(words)
    assert len(queue.taken) == 7


def test_one_submission_at_a_time(tmp_path: Path, queue: FakeScheduler) -> None:
    words, run = [*WORDS, f"run.dir={tmp_path}/run"], tmp_path / "run"
    with submit._alone(run), pytest.raises(ConfigError, match="being submitted by "):
        submit._main(words)
    assert queue.taken == []
    submit._main(words)
    assert not (run / "launch" / "submitting").exists()


def test_a_cancel_during_a_submission_leaves_no_later_job(
    tmp_path: Path, queue: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    waits = threading.Event()
    ended: list[int] = []
    cancel = threading.Thread(target=lambda: ended.append(submit._main(["cancel", str(run)])))
    pause = time.sleep

    def wait(seconds: float) -> None:
        waits.set()
        pause(seconds)

    monkeypatch.setattr(time, "sleep", wait)
    take = scheduler.submit

    def second_is_slow(text: str, after: str | None) -> str:
        if after == "101":
            cancel.start()
            assert waits.wait(60)
        taken = take(text, after)
        queue.queue[taken] = "PENDING"
        return taken

    monkeypatch.setattr(scheduler, "submit", second_is_slow)
    submit._main([*WORDS, f"run.dir={run}"])
    cancel.join(60)
    assert ended == [0]
    assert sorted(queue.cancelled) == sorted(queue.queue)
    assert len(queue.cancelled) == 7
    assert (run / "state" / "CANCELLED").is_file()
    assert not (run / "launch" / "submitting").exists()


def test_a_cancel_does_not_wait_for_ever(
    tmp_path: Path, queue: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    submit._main([*WORDS, f"run.dir={run}"])
    monkeypatch.setattr(submit, "_CANCEL_PATIENCE_SECONDS", 0.0)
    with submit._alone(run), pytest.raises(ConfigError, match="if that was killed"):
        submit._main(["cancel", str(run)])
    assert queue.cancelled == []


def test_the_submission_lock_works_on_a_full_disk(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", 8) as disk:
            with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 1024):
                    pass
            for _ in range(2):
                with submit._alone(disk / "run"):
                    mark = disk / "run" / "launch" / "submitting"
                    assert mark.read_text() == ""
                    with (
                        pytest.raises(ConfigError, match="submitted by another process"),
                        submit._alone(disk / "run"),
                    ):
                        pass
                assert not mark.exists()
    except CannotArrange as reason:
        pytest.skip(str(reason))


def test_jobs_run_in_the_folder_of_the_first_submission(
    tmp_path: Path, queue: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    for folder in (first, other):
        folder.mkdir()
    monkeypatch.chdir(first)
    submit._main([*WORDS, "run.dir=run"])
    monkeypatch.chdir(other)
    submit._main(["resume", str(first / "run")])
    text = (first / "run" / "launch" / "hold.sbatch").read_text()
    assert f"RUN={first}/run " in text
    assert f"WORKDIR={first} " in text
    assert list(other.iterdir()) == []


def test_no_key_of_the_environment_is_frozen(
    tmp_path: Path, queue: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef" * 2 + "deadbeef"
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, key)
    submit._main([*WORDS, f"run.dir={tmp_path}/run"])
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {"config.yaml", "command.txt", "git.txt", "hold.sbatch"} <= {f.name for f in files}
    assert [file for file in files if key.encode() in file.read_bytes()] == []


def test_submitting_again_leaves_out_what_is_finished(tmp_path: Path, queue: FakeScheduler) -> None:
    words = [*WORDS, f"run.dir={tmp_path}/run"]
    submit._main(words)
    run = tmp_path / "run"
    for stage in ("prepare", "hf_to_megatron", "zero_neuron"):
        (run / "state" / f"{stage}.done").touch()
    (run / "state" / "retrofit.FAILED").write_text("gave up")
    marker = run / "code" / "dms_train" / "launch" / "job.sh"
    marker.write_text("the code of the first submission")
    queue.taken.clear()
    submit._main(words)
    assert queue.taken[0] == ("retrofit", None)
    assert not (run / "state" / "retrofit.FAILED").exists()
    assert marker.read_text() == "the code of the first submission"


def test_a_run_in_the_queue_is_not_submitted_again(tmp_path: Path, queue: FakeScheduler) -> None:
    words = [*WORDS, f"run.dir={tmp_path}/run"]
    submit._main(words)
    queue.taken.clear()
    queue.queue = {"101": "RUNNING"}
    submit._main(words)
    assert queue.taken == []


def test_a_changed_configuration_is_refused(tmp_path: Path, queue: FakeScheduler) -> None:
    words = [*WORDS, f"run.dir={tmp_path}/run"]
    submit._main(words)
    queue.taken.clear()
    with pytest.raises(ConfigError, match=r"optim.lr: 0.00025 -> 0.1\); restore them"):
        submit._main([*words, "optim.lr=0.1"])
    submit._main([*words, "cluster.time=01:00:00"])  # changes no sample and no weight
    assert len(queue.taken) == 7


@pytest.mark.parametrize("words", [["tokenise"], ["tokenize", "absent.txt"]])
def test_arguments_that_make_no_data_refuse_the_stage(tmp_path: Path, words: list[str]) -> None:
    made = config(tmp_path, f"data.paths=[{tmp_path}/absent]")
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "prepare.json").write_text(json.dumps(words))
    (run / "config.yaml").write_text(yaml.safe_dump(to_mapping(made)))
    assert run_stage([str(run), "prepare"]) == 2
    refused = (run / "state" / "REFUSED").read_text()
    assert refused == f"config error: --prepare {' '.join(words)}: failed; see the lines above\n"
    assert not (run / "state" / "prepare.done").exists()


def test_status_names_the_failed_stage_and_the_first_error(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    submit._main([*WORDS, f"run.dir={tmp_path}/run"])
    run = tmp_path / "run"
    (run / "state" / "prepare.done").touch()
    (run / "state" / "hf_to_megatron.FAILED").write_text("gave up after 3 failures\n")
    (run / "errors").mkdir()
    error = {"rank": 1, "time": 5.0, "error": "OSError", "message": "error: disk full"}
    (run / "errors" / "101.0-rank1.json").write_text(json.dumps(error))
    capsys.readouterr()
    submit._main(["status", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prepare", "job", "101", "finished"]
    assert lines[1].endswith("FAILED: gave up after 3 failures")
    assert "first error, of rank 1: error: disk full" in lines


def test_status_shows_how_slurm_ended_a_job_without_a_state_file(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    submit._main([*WORDS, f"run.dir={tmp_path}/run"])
    log = tmp_path / "run" / "logs" / "prepare-101.log"
    log.touch()
    submit._main(["status", str(tmp_path / "run")])
    assert f"not in the queue (TIMEOUT); see {log}" in capsys.readouterr().out


def test_a_chain_with_former_stage_names_keeps_them(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its jobs run the code in the run folder, which knows no other names."""
    submit._main([*WORDS, f"run.dir={tmp_path}/run"])
    run = tmp_path / "run"
    jobs = run / "launch" / "jobs.json"
    jobs.write_text(jobs.read_text().replace("validate_export", "validate"))
    for stage in stages(config(tmp_path))[:-1]:
        (run / "state" / f"{stage}.done").touch()
    queue.taken.clear()
    submit._main(["resume", str(run)])
    assert queue.taken == [("validate", None)]
    assert "STAGE=validate " in (run / "launch" / "validate.sbatch").read_text()
    assert json.loads(jobs.read_text()) == {"validate": "101"}
    (run / "state" / "validate.done").touch()
    capsys.readouterr()
    submit._main(["status", str(run)])
    assert capsys.readouterr().out.split() == ["validate", "job", "101", "finished"]


def test_status_does_not_report_ranks_that_lost_a_peer_as_the_cause(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    submit._main([*WORDS, f"run.dir={tmp_path}/run"])
    run = tmp_path / "run"
    (run / "state" / "retrofit.FAILED").write_text("gave up\n")
    (run / "errors").mkdir()
    error = {"rank": 0, "time": 5.0, "error": "PeerLost", "message": "rank 0: another rank ended"}
    (run / "errors" / "101.0-rank0.json").write_text(json.dumps(error))
    submit._main(["status", str(run)])
    assert "no rank reported a cause: one was killed" in capsys.readouterr().out


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    for words in (["status", str(tmp_path)], ["cancel"], ["resume", "a", "b"]):
        with pytest.raises(ConfigError):
            submit._main(words)
