"""Every option of a SLURM cluster is read back from the batch scripts and checks of a chain."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dms_train.config.build import ConfigError, build
from dms_train.config.cluster import ClusterOptions
from dms_train.config.resolve import resolved
from dms_train.config.schema import RunConfig
from dms_train.launch.chain import Job, needs, script
from dms_train.planning.check import check
from tests.support import configs
from tests.support.wiring import Wire, leaves, uncovered

TRAIN, CONVERT = Job("retrofit", "train"), Job("prepare", "convert")
CONTAINER = {"container_image": "/image.sqsh"}


def text(config: RunConfig, job: Job = TRAIN) -> str:
    return script(job, config, Path("/home/me"))


def line(pattern: str, job: Job = TRAIN) -> Callable[[RunConfig], str | None]:
    """Return the line after a text in the script, or None where it is absent."""

    def read(config: RunConfig) -> str | None:
        found = re.search(rf"{re.escape(pattern)}(\S+)", text(config, job))
        return None if found is None else found[1].strip("'\"")

    return read


def gpu(config: RunConfig) -> bool:
    """Return True if a model that no GPU of that name can hold is refused."""
    try:
        check(config, world_size=1, architecture=configs.KNOWN["qwen3_32b"])
    except ConfigError as error:
        return "H100" in str(error)
    return False


WIRES: dict[str, Wire] = {
    "nodes": Wire(3, line("--nodes="), "3"),
    "processes_per_node": Wire(4, lambda c: needs(TRAIN, c).gpus, others={"gpus_per_node": 8}),
    "processes_per_node (of torchrun)": Wire(4, line("NPROC="), "4"),
    "gpus_per_node": Wire(8, line("--gpus-per-node="), "8"),
    "gpu": Wire("h100", gpu, True),
    "cpus_per_node": Wire(7, line("--cpus-per-task="), "7"),
    "time": Wire("01:23:45", line("--time="), "01:23:45"),
    "convert_time": Wire("00:12:34", line("--time=", CONVERT), "00:12:34"),
    "partition": Wire("long", line("--partition=")),
    "account": Wire("mine", line("--account=")),
    "qos": Wire("high", line("--qos=")),
    "options": Wire(["--exclusive"], lambda c: "#SBATCH --exclusive" in text(c), True),
    "container_image": Wire("/image.sqsh", line("--container-image=")),
    "container_mounts": Wire(
        ["/data:/data:ro"],
        lambda c: "/data:/data:ro" in text(c),
        True,
        CONTAINER,
    ),
    "python": Wire("/opt/python", lambda c: "/opt/python" in text(c), True),
    "signal_seconds": Wire(99, line("--signal=B:USR1@"), "99"),
    "save_seconds": Wire(77, line("SAVE_S="), "77"),
    "hang_seconds": Wire(66, line("HANG_S="), "66"),
    "max_failures": Wire(5, line("MAX_FAILURES="), "5"),
}


@pytest.mark.parametrize("key", WIRES)
def test_an_option_acts(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dms_train.launch.chain.read_architecture", lambda model: configs.architecture()
    )
    wire, found = WIRES[key], []
    name = key.partition(" ")[0]
    for own in (None, name):
        changes: dict[str, Any] = wire.given(None, own)
        config = resolved(build(configs.mapping(cluster=changes)))
        found.append(wire.read(config))
    assert found[1] == wire.expectation(config)
    assert found[0] != found[1], "the value is the default, or another option decides"


def test_every_option_has_a_test() -> None:
    assert uncovered(leaves(ClusterOptions), WIRES, {}) == []
