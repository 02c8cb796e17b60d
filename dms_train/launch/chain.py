"""Chain of jobs for the stages of a run, and the batch script of each job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import dms_train
from dms_train.app.model import read_architecture
from dms_train.config.build import ConfigError
from dms_train.config.cluster import ClusterOptions
from dms_train.config.schema import RunConfig
from dms_train.launch.nodes import Needs
from dms_train.observe.state_files import current_stage
from dms_train.planning.parameters import parameter_count
from dms_train.planning.run_size import checkpoint_count, run_size
from dms_train.training.options import (
    RETROFIT_STAGES,
    RUN_TASKS,
    TEACHER_LOGITS,
    VALIDATE_EXPORT,
)

Kind = Literal["convert", "train", "validate"]
TEMPLATES = Path(dms_train.__file__).parent / "slurm"
PREPARE, IMPORT = "prepare", "hf_to_megatron"
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_WIDTHS = {"fp32": 4, "bf16": 2}  # bytes of a parameter
START_FOLDER = "start"  # in the run folder; IMPORT writes it and training begins with it


@dataclass(frozen=True, slots=True)
class Job:
    """One stage of the chain; its mark in the run folder has the same name."""

    stage: str
    kind: Kind


def chain(config: RunConfig, skipped: Collection[str] = ()) -> list[Job]:
    """Return the jobs of a run in order.

    `prepare` checks the token files, and makes them if --prepare was given. `hf_to_megatron` makes
    the checkpoint that training starts from, see `imports`. Then the stages of `stage.run` follow.
    An export is always validated, whether or not `stage.run` names `validate_export`. Validation
    and tasks take one node.

    Raises:
        ConfigError: A stage to skip does not exist, or the stages do not form a chain.
    """
    trained = [stage for stage in config.stage.run if stage not in (VALIDATE_EXPORT, RUN_TASKS)]
    if len(set(trained)) != len(trained):
        raise ConfigError("stage.run: a chain has one job for each stage; name each once")
    jobs = [Job(PREPARE, "convert")]
    if imports(config):
        jobs.append(Job(IMPORT, "convert"))
    jobs += [Job(stage, "train") for stage in trained]
    if "export" in trained and config.model.path is not None and compresses(config):
        jobs.append(Job(VALIDATE_EXPORT, "validate"))
    if RUN_TASKS in config.stage.run:
        jobs.append(Job(RUN_TASKS, "validate"))
    names = [job.stage for job in jobs]
    for name in skipped:
        if name not in names:
            raise ConfigError(f"--skip {name}: no such stage; this run has {', '.join(names)}")
    return [job for job in jobs if job.stage not in skipped]


def imports(config: RunConfig) -> bool:
    """Return whether training starts from a checkpoint that the chain makes.

    A student with frozen weights reads `model.path` itself: it shares them with its teacher, and a
    converted checkpoint has no adapters.
    """
    if config.model.path is None or config.method.train != "all":
        return False
    if TEACHER_LOGITS in config.stage.run:
        return False  # it runs the original itself
    return config.run.load in (None, str(Path(config.run.dir) / START_FOLDER))


def compresses(config: RunConfig) -> bool:
    """Return whether the export has decisions that can be evaluated."""
    return bool(set(RETROFIT_STAGES) & set(config.stage.run))


def frozen(config: RunConfig, skipped: Collection[str] = ()) -> RunConfig:
    """Return the configuration that the jobs read, with an absolute run folder."""
    run = replace(config.run, dir=str(Path(config.run.dir).expanduser().resolve()))
    config = replace(config, run=run)
    if imports(config) and IMPORT not in skipped:
        config = replace(config, run=replace(run, load=str(Path(run.dir) / START_FOLDER)))
    return config


def script(job: Job, config: RunConfig, workdir: Path) -> str:
    """Return the batch script of a job: its template with every `@PLACEHOLDER@` filled."""
    text = (TEMPLATES / f"{job.kind}.sbatch").read_text(encoding="utf-8")
    values = _values(job, config, workdir)
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def needs(job: Job, config: RunConfig) -> Needs:
    """Return the requirements that every node is checked for before a job starts."""
    cluster = config.cluster
    # one GPU for each rank; a conversion runs on CPUs, a validation on one GPU
    gpus = {"train": cluster.processes_per_node, "validate": 1}.get(job.kind, 0)
    checkpoint_bytes, kept_bytes = _disk(job, config)
    return Needs(gpus if cluster.gpus_per_node else 0, checkpoint_bytes, kept_bytes)


def _disk(job: Job, config: RunConfig) -> tuple[int, int]:
    """Return the bytes that a job needs for checkpoints, and for all other files."""
    architecture = read_architecture(config.model)
    if job.stage == IMPORT:
        return 0, _WIDTHS[config.parallel.params_dtype] * parameter_count(architecture)
    if job.kind != "train":
        return 0, 0
    # The ratio of another run's student is known when it is loaded; no annealing is counted then.
    begins_at_1 = config.run.load is None or imports(config)
    loaded_cr = 1.0 if begins_at_1 else config.stage.retrofit.target_cr
    size = run_size(config, architecture, loaded_cr)
    checkpoints = checkpoint_count(config, loaded_cr, job.stage)
    return checkpoints * size.checkpoint_bytes, size.kept_bytes


def _values(job: Job, config: RunConfig, workdir: Path) -> dict[str, str]:
    run, cluster, wanted = Path(config.run.dir), config.cluster, needs(job, config)
    python, convert = cluster.python or sys.executable, cluster.convert_time
    tasks = current_stage(job.stage) == RUN_TASKS
    quoted = {
        "RUN": str(run),
        "STAGE": job.stage,
        "CODE": str(run / "code"),
        "WORKDIR": str(workdir),
        "PYTHON": python,
        "SRUN_OPTIONS": "\n".join(container_options(cluster, run, workdir)),
    }
    plain = {
        "NAME": re.sub(r"[^\w.+-]", "_", f"{run.name}-{job.stage}"),
        "LOG": _log_pattern(run, job),
        "NODES": str(cluster.nodes),
        "CPUS": str(cluster.cpus_per_node),
        "TIME": cluster.time if job.kind == "train" or tasks else convert,
        "SITE": "\n".join(_site_lines(cluster, job.kind)),
        "NPROC": str(cluster.processes_per_node),
        "NODE_GPUS": str(wanted.gpus),
        "CHECKPOINT_BYTES": str(wanted.checkpoint_bytes),
        "KEPT_BYTES": str(wanted.kept_bytes),
        "SIGNAL_S": str(cluster.signal_seconds),
        "SAVE_S": str(cluster.save_seconds),
        "HANG_S": str(cluster.hang_seconds),
        "MAX_FAILURES": str(cluster.max_failures),
    }
    return {**plain, **{name: shlex.quote(value) for name, value in quoted.items()}}


def _log_pattern(run: Path, job: Job) -> str:
    """Return the path of the log in sbatch's notation, where `%` begins a field."""
    folder = str(run / "logs").replace("%", "%%")
    return shlex.quote(f"{folder}/{job.stage}-%j.log")


def _site_lines(cluster: ClusterOptions, kind: Kind) -> list[str]:
    options = [
        f"--{name}={value}"
        for name, value in (
            ("partition", cluster.partition),
            ("account", cluster.account),
            ("qos", cluster.qos),
        )
        if value is not None
    ]
    gpus = {"train": cluster.gpus_per_node, "validate": min(1, cluster.gpus_per_node)}.get(kind, 0)
    if gpus:
        options.append(f"--gpus-per-node={gpus}")
    if kind == "train":
        options += cluster.options
    return [f"#SBATCH {option}" for option in options]


def container_options(cluster: ClusterOptions, run: Path, workdir: Path) -> list[str]:
    """Return srun's container options; the batch shell needs scontrol, so it stays outside."""
    if cluster.container_image is None:
        return []
    own = [f"{folder}:{folder}" for folder in dict.fromkeys((run, workdir))]
    return [
        f"--container-image={cluster.container_image}",
        f"--container-mounts={','.join([*own, *cluster.container_mounts])}",
        f"--container-workdir={workdir}",
        "--no-container-mount-home",
    ]
