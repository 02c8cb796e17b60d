"""What a site says about its cluster, and how much of it a run takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How `dms-submit` asks SLURM for a run; nothing else reads it.

    Attributes:
        nodes: Nodes of a training job.
        processes_per_node: Ranks on each of them, one for each GPU.
        gpus_per_node: GPUs to ask for; 0 asks for none.
        gpu: Their model, one of `config.gpus.GPUS`; a run that does not fit it is refused. None
            is unknown.
        cpus_per_node: Cores to ask for.
        time: Time limit of a training job as SLURM writes it; the run goes on in the next one.
        convert_time: Time limit of a job that converts or validates.
        partition: Where to run; None is SLURM's default. `account` and `qos` likewise.
        options: Further options of sbatch, such as `--exclusive`.
        container_image: Image for pyxis and enroot; None runs without a container.
        container_mounts: Mounts such as `/data:/data:ro`, besides the run folder and the current
            one.
        python: Interpreter of the jobs; None is the one that submits.
        signal_seconds: How long before the time limit a run is told to save and stop.
        save_seconds: How long it may take for that.
        hang_seconds: A job without heartbeat for this long is ended; 0 waits for ever.
        max_failures: Failures in a row without a new checkpoint after which a stage is given up.
    """

    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int = 0
    gpu: str | None = None
    cpus_per_node: int = 1
    time: str = "04:00:00"
    convert_time: str = "01:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    python: str | None = None
    signal_seconds: int = 300
    save_seconds: int = 240
    hang_seconds: int = 1800
    max_failures: int = 2

    @property
    def world_size(self) -> int:
        """Ranks of a training job."""
        return self.nodes * self.processes_per_node


ONE_PROCESS = ClusterOptions()
