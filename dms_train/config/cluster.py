"""Options of a SLURM cluster and the resources that a run requests from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dms_train.limits import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Resources and options that `dms-submit` requests from SLURM.

    Attributes:
        nodes: Nodes of a training job.
        processes_per_node: Ranks on each node, one for each GPU.
        gpus_per_node: GPUs to request; 0 requests none.
        gpu: Name of the GPUs in `planning.gpus.GPUS`; a run that does not fit is refused. None
            disables the check.
        cpus_per_node: Cores to request.
        time: Time limit of a job that trains or evaluates on tasks, in SLURM's format; the run
            continues in the next job.
        convert_time: Time limit of a job that converts or validates.
        partition: Partition; None is SLURM's default. The same holds for `account` and `qos`.
        options: Further options of sbatch, such as `--exclusive`.
        container_image: Image for pyxis and enroot; None runs without a container.
        container_mounts: Mounts such as `/data:/data:ro`, besides the run folder and the current
            folder.
        python: Interpreter of the jobs; None takes the one that runs `dms-submit`.
        signal_seconds: Seconds before the time limit at which a run is signalled to save and stop.
        save_seconds: Longest time that saving may take.
        hang_seconds: A job without heartbeat for this long is ended; 0 never ends it.
        max_failures: Consecutive failures without a new checkpoint after which a stage is not
            started again.
    """

    nodes: Annotated[int, AtLeast(1)] = 1
    processes_per_node: Annotated[int, AtLeast(1)] = 1
    gpus_per_node: Annotated[int, AtLeast(0)] = 0
    gpu: str | None = None
    cpus_per_node: Annotated[int, AtLeast(1)] = 1
    time: str = "04:00:00"
    convert_time: str = "01:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    python: str | None = None
    signal_seconds: Annotated[int, AtLeast(1)] = 300
    save_seconds: Annotated[int, AtLeast(1)] = 240
    hang_seconds: Annotated[int, AtLeast(0)] = 1800
    max_failures: Annotated[int, AtLeast(0)] = 2

    @property
    def world_size(self) -> int:
        """Ranks of a training job."""
        return self.nodes * self.processes_per_node


ONE_PROCESS = ClusterOptions()
