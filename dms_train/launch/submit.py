"""Submit a run as a chain of SLURM jobs; a login node needs neither torch nor a GPU.

    dms-submit [--dry-run] [--skip STAGE,...] [--prepare 'WORDS'] OVERRIDE...   start or continue
    dms-submit status RUN    state of every job, the first error, the newest checkpoint
    dms-submit resume RUN    submit the stages that are left
    dms-submit cancel RUN    cancel the jobs in the queue

The overrides are those of dms-train; `cluster=...` holds the resources to request. The jobs are
prepare (data), hf_to_megatron (initial checkpoint), one job for every stage, and validate. The
run folder keeps the scripts, the logs and a copy of the code (launch/, logs/, code/).

Submitting again is safe: it skips finished stages, does nothing if the run is in the queue, and
refuses a changed configuration.

To see the jobs without submitting them:

    dms-submit --dry-run experiment=llama31_8b cluster=gpu_node run.dir=/runs/cr4 ...
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from dms_train.app.model import read_architecture
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError
from dms_train.config.cluster import ClusterOptions
from dms_train.config.frozen import CONFIG_FILE, read_frozen, require_same
from dms_train.config.schema import RunConfig
from dms_train.launch import scheduler
from dms_train.launch.chain import Job, chain, frozen, needs, script
from dms_train.launch.freeze import freeze, workdir
from dms_train.launch.stage import PREPARE_FILE
from dms_train.observe.state_files import StateFiles, current_stage
from dms_train.planning import validation_memory
from dms_train.planning.check import check
from dms_train.planning.gpus import GPUS
from dms_train.training.options import VALIDATE_EXPORT

_JOBS_FILE = Path("launch") / "jobs.json"
_VERBS = ("status", "resume", "cancel")
_CANCEL_PATIENCE_SECONDS = 120.0  # submitting a chain takes a few calls of sbatch
_AGAIN_SECONDS = 0.2


def main() -> None:
    """Run the command; exit code 0, or 2 with one line for each problem."""
    sys.exit(run_main(lambda: _main(sys.argv[1:])))


def _main(arguments: list[str]) -> int:
    if arguments and arguments[0] in _VERBS:
        return _act_on(arguments[0], arguments[1:])
    options = _parse(arguments)
    from dms_train.cli.config_source import compose

    config = compose(options.overrides, options.config_dir)
    skipped = [name for name in options.skip.split(",") if name]
    check(
        config,
        world_size=config.cluster.world_size,
        architecture=read_architecture(config.model),
        processes_per_host=config.cluster.processes_per_node,
    )
    config = frozen(config, skipped)
    jobs, run, recipe = chain(config, skipped), Path(config.run.dir), _recipe(options.prepare)
    _check_site(config.cluster)
    _check_validation(jobs, config)
    if options.dry_run:
        require_same(config, run / CONFIG_FILE)
        _show(jobs, config)
        return 0
    scheduler.require()
    with _alone(run):
        require_same(config, run / CONFIG_FILE)
        freeze(config, shlex.join(["dms-submit", *arguments]))
        if recipe is not None:
            (run / PREPARE_FILE).write_text(json.dumps(recipe) + "\n")
        _submit(jobs, config)
    return 0


def _recipe(words: str | None) -> list[str] | None:
    try:
        return None if words is None else shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--prepare {words}: {error}; quote it as for a shell") from error


def _check_site(cluster: ClusterOptions) -> None:
    """Refuse time limits that would end every job before it has saved."""
    if cluster.save_seconds >= cluster.signal_seconds:
        raise ConfigError(
            f"cluster.save_seconds={cluster.save_seconds}: not below cluster.signal_seconds="
            f"{cluster.signal_seconds}; a run is signalled that long before it is killed"
        )


def _check_validation(jobs: list[Job], config: RunConfig) -> None:
    """Refuse a validation that its one GPU cannot hold."""
    name = config.cluster.gpu
    if name is None or VALIDATE_EXPORT not in [job.stage for job in jobs]:
        return
    gpu = GPUS[name]
    problem = validation_memory.problem(
        config, read_architecture(config.model), gpu.label, gpu.memory
    )
    if problem is not None:
        raise ConfigError(
            f"{problem}; leave it out with --skip {VALIDATE_EXPORT}, and run dms-validate on a "
            "larger GPU or on a CPU"
        )


@contextmanager
def _alone(run: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a run folder against every other `dms-submit`, also on other machines.

    Args:
        run: The folder.
        patience: Seconds to wait for another process that holds the lock.
    """
    mark = run / "launch" / "submitting"
    end = time.monotonic() + patience
    while not _marked(run, mark):
        if time.monotonic() >= end:
            raise ConfigError(
                f"{run}: being submitted by {_text(mark)}; wait, or remove {mark} if that "
                "was killed"
            )
        time.sleep(_AGAIN_SECONDS)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _marked(run: Path, mark: Path) -> bool:
    """Create the lock file; return False if another process holds it."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)  # atomic on shared file systems too
    except FileExistsError as error:
        if not mark.parent.is_dir():
            raise ConfigError(f"run.dir={run}: not a folder; choose another one") from error
        return False
    except OSError as error:
        raise ConfigError(
            f"run.dir={run}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    with suppress(OSError):  # a run on a full disk can be cancelled
        mark.write_text(f"{getpass.getuser()} on {socket.gethostname()}, process {os.getpid()}\n")
    return True


def _text(mark: Path) -> str:
    text = ""
    with suppress(FileNotFoundError):  # it has just ended
        text = mark.read_text().strip()
    return text or "another process"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="as for dms-train: group=option key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the jobs, submit nothing")
    parser.add_argument("--skip", default="", metavar="STAGE,...", help="stages to leave out")
    parser.add_argument(
        "--prepare",
        metavar="WORDS",
        help="arguments of dms-data that make the token files where they are absent, such as "
        "'tokenize --tokenizer MODEL --output PREFIX FILE'",
    )
    parser.add_argument("--config-dir", type=Path, help="folder with group files of your own")
    return parser.parse_intermixed_args(arguments)


def _left(jobs: list[Job], config: RunConfig) -> list[Job]:
    files = StateFiles(Path(config.run.dir))
    return [job for job in jobs if not files.is_done(job.stage)]


def _show(jobs: list[Job], config: RunConfig) -> None:
    """Print what would be submitted, and SLURM's answer to it."""
    left = _left(jobs, config)
    print(f"run folder {config.run.dir}: {' -> '.join(job.stage for job in jobs)}")
    for job in jobs:
        if job not in left:
            print(f"\n== {job.stage}: finished, left out")
            continue
        text = script(job, config, workdir(Path(config.run.dir)))
        print(f"\n== {job.stage} (slurm/{job.kind}.sbatch)\n{text.rstrip()}")
        print(f"== before it starts, every node must have: {needs(job, config)}")
        if scheduler.available():
            print(f"== {scheduler.test(text)}")
    print("\ndry run: nothing was written or submitted")


def _submit(jobs: list[Job], config: RunConfig) -> None:
    run = Path(config.run.dir)
    queued = scheduler.states(_submitted(run).values())
    if queued:
        print(f"{run}: already in the queue as {', '.join(sorted(queued))}; nothing submitted")
        return
    # the jobs run the code of the first submission, where stages may have earlier names
    known = {current_stage(name): name for name in _submitted(run)}
    jobs = [replace(job, stage=known.get(job.stage, job.stage)) for job in jobs]
    left = _left(jobs, config)
    if not left:
        print(f"{run}: every stage is finished; nothing submitted")
        return
    for old in (
        *run.glob("state/*.FAILED"),
        *run.glob("state/*.failures"),
        run / "state/CANCELLED",
    ):
        old.unlink(missing_ok=True)
    submitted: dict[str, str] = {}
    after = None
    for job in left:
        text = script(job, config, workdir(run))
        (run / "launch" / f"{job.stage}.sbatch").write_text(text)
        try:
            after = submitted[job.stage] = scheduler.submit(text, after)
        except scheduler.SchedulerError:
            scheduler.cancel(reversed(submitted.values()))  # an incomplete chain is useless
            (run / _JOBS_FILE).unlink(missing_ok=True)
            raise
        # written after every job, so that an interrupted chain can be cancelled
        (run / _JOBS_FILE).write_text(json.dumps(submitted, indent=1) + "\n")
        print(f"{job.stage}: job {after}")
    print("\n".join(shlex.join(["dms-submit", verb, str(run)]) for verb in ("status", "cancel")))


def _submitted(run: Path) -> dict[str, str]:
    """Return the job ids of the newest submission by stage."""
    file = run / _JOBS_FILE
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def _act_on(verb: str, words: list[str]) -> int:
    if len(words) != 1:
        raise ConfigError(f"dms-submit {verb}: give one run folder")
    run = Path(words[0]).expanduser().resolve()
    if verb == "cancel" and (run / "launch").is_dir():
        # not between two jobs of a chain: the later ones would stay in the queue
        with _alone(run, _CANCEL_PATIENCE_SECONDS):
            return _act(verb, run)
    return _act(verb, run)


def _act(verb: str, run: Path) -> int:
    config = read_frozen(run / CONFIG_FILE)
    if not (run / _JOBS_FILE).is_file():
        raise ConfigError(f"{run}: was not submitted by dms-submit")
    if verb == "status":
        return _status(run)
    if verb == "cancel":
        return _cancel(run)
    scheduler.require()
    with _alone(run):
        submitted = {current_stage(name) for name in _submitted(run)}
        _submit([job for job in chain(config) if job.stage in submitted], config)
    return 0


def _cancel(run: Path) -> int:
    # written first, so that a signalled job does not requeue itself
    (run / "state" / "CANCELLED").touch()
    scheduler.require()
    queued = sorted(scheduler.states(_submitted(run).values()), key=int, reverse=True)
    scheduler.cancel(queued)
    print(f"{run}: cancelled {', '.join(queued)}" if queued else f"{run}: nothing in the queue")
    return 0


def _why(files: StateFiles) -> str:
    """Return the reason that the newest attempt recorded for its end."""
    cause = files.root_cause()
    if cause is None or cause["error"] == "PeerLost":
        return (
            "no rank reported a cause: one was killed (memory, node lost, time limit); see the logs"
        )
    return f"first error, of rank {cause['rank']}: {cause['message']}"


def _ended(run: Path, stage: str, job: str) -> str:
    """Describe a job that SLURM ended before it wrote its state file."""
    if not scheduler.available():
        return "not finished; SLURM is not installed here"
    state = scheduler.ended_as(job)
    log = run / "logs" / f"{stage}-{job}.log"
    seen = f"; see {log}" if log.is_file() else ""
    return f"not in the queue ({state or 'no record in SLURM'}){seen}"


def _status(run: Path) -> int:
    """Print one line for each stage, the cause of a failure, and the progress of the run."""
    files, jobs = StateFiles(run), _submitted(run)
    queue = scheduler.states(jobs.values())
    failed = False
    for stage, job in jobs.items():
        note = run / "state" / f"{stage}.FAILED"
        if files.is_done(stage):
            text = "finished"
        elif note.is_file():
            failed, text = True, f"FAILED: {note.read_text().strip()}"
        else:
            text = queue.get(job) or _ended(run, stage, job)
        print(f"{stage:<16} job {job:<10} {text}")
    if failed:
        print(_why(files))
    checkpoints = sorted((run / "checkpoints").glob("step_????????"))
    if checkpoints:
        print(f"newest checkpoint: {checkpoints[-1].name}")
    beat = run / "state" / "heartbeat"
    if queue and beat.is_file():
        print(f"last heartbeat {time.time() - beat.stat().st_mtime:.0f} s ago")
    return 0


if __name__ == "__main__":
    main()
