"""Configurations of a run that is submitted as a chain of jobs."""

from __future__ import annotations

from pathlib import Path

from dms_train.cli.config_source import compose
from dms_train.config.schema import RunConfig
from dms_train.launch.chain import chain

WORDS = [
    "experiment=demo",
    "parallel=tp2",
    "cluster.nodes=2",
    "data.global_batch_size=16",
    "data.micro_batch_size=8",
]


def config(folder: Path, *changes: str) -> RunConfig:
    """The demo on two nodes with its run folder below `folder`."""
    return compose([*WORDS, f"run.dir={folder}/run", *changes])


def stages(config: RunConfig, *skipped: str) -> list[str]:
    """Names of the jobs in order."""
    return [job.stage for job in chain(config, skipped)]
