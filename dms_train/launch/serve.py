"""Server of vLLM on the nodes of a job: `python -m dms_train.launch.serve MODEL [OPTION ...]`.

`slurm/serve.sbatch` starts this module on every node. The first node runs the HTTP server and
distributes requests over the replicas of all nodes; the others run replicas only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dms_train.app import launcher
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError

# Ports from here on are taken by the number of the job, so that two jobs may share a node.
_FIRST_PORT, _PORTS = 20000, 20000


def command(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command of vLLM for this node.

    Args:
        words: Model and options of `vllm serve`.
        environment: Variables of SLURM for a task of the job, and REPLICAS_PER_NODE, which
            defaults to the number of GPUs.

    Raises:
        ConfigError: The number of replicas is unknown, or this is no task of a job.
    """
    replicas = _number_of_replicas(environment)
    try:
        nodes, node, job = (
            int(environment[f"SLURM_{name}"]) for name in ("NNODES", "NODEID", "JOB_ID")
        )
        first_node = environment["SLURM_LAUNCH_NODE_IPADDR"]  # ZeroMQ cannot bind to a name
    except KeyError as missing:
        raise ConfigError(f"{missing.args[0]} is not set; submit slurm/serve.sbatch") from None
    parallel = {
        "--data-parallel-size": nodes * replicas,
        "--data-parallel-size-local": replicas,
        "--data-parallel-address": first_node,
        "--data-parallel-rpc-port": _FIRST_PORT + job % _PORTS,
    }
    options = [str(word) for pair in parallel.items() for word in pair]
    if node:
        options += ["--headless", "--data-parallel-start-rank", str(node * replicas)]
    return ["vllm", "serve", *words, *options]


def _number_of_replicas(environment: Mapping[str, str]) -> int:
    for name in ("REPLICAS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if given := environment.get(name):
            if not given.isdecimal() or int(given) < 1:
                raise ConfigError(f"{name}={given}: the number of replicas of a node, at least 1")
            return int(given)
    raise ConfigError("the nodes have no GPUs; pass --gpus-per-node to sbatch")


def main() -> int:
    """Entry point; becomes `vllm serve`."""
    words = command(sys.argv[1:], launcher.variables())
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        raise ConfigError("vllm is not on PATH; activate its environment") from None


if __name__ == "__main__":
    sys.exit(run_main(main))
