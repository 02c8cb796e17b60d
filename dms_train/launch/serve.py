"""Server of vLLM on the nodes of a job: `python -m dms_train.launch.serve MODEL [OPTION ...]`.

`slurm/serve.sbatch` starts this module on every node. The first node runs the HTTP server and
distributes requests over the replicas of all nodes; the others run replicas only.

If a replica of such a node dies, vLLM ends the node's other replicas with exit code 0. The option
`--wait` of srun then ends the job.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from dms_train.app import launcher
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError

# The port is derived from the number of the job, so that two jobs may share a node.
_FIRST_PORT, _PORTS = 20000, 20000


def command(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command of vLLM for this node.

    Args:
        words: Model and options of `vllm serve`, without those that the job sets.
        environment: Variables of SLURM for a task of the job, and REPLICAS_PER_NODE, which
            defaults to the number of GPUs over the ranks of a replica.

    Raises:
        ConfigError: There is no model, the job sets one of the options, the number of replicas is
            unknown, or this is no task of a job.
    """
    _check_words(words)
    ranks, replica_words = _replica_options(words)
    replicas = _number_of_replicas(environment, ranks)
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
    if not node:
        return ["vllm", "serve", *words, *options]
    options += ["--headless", "--data-parallel-start-rank", str(node * replicas)]
    return ["vllm", "serve", *replica_words, *options]


def _check_words(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        raise ConfigError("name the model first: sbatch slurm/serve.sbatch EXPORT [OPTION ...]")
    for word in words:
        if word.startswith(("--data-parallel-", "--headless")):
            raise ConfigError(f"{word.partition('=')[0]}: the job sets it; remove it")


def _replica_options(words: list[str]) -> tuple[int, list[str]]:
    """Return the ranks of a replica, and the words for a node without the HTTP server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-server-count", "-asc")
    _, replica_words = parser.parse_known_args(words)
    parser.add_argument("--tensor-parallel-size", "-tp", default="1")
    ranks = parser.parse_known_args(words)[0].tensor_parallel_size
    return _positive("--tensor-parallel-size", ranks), replica_words


def _number_of_replicas(environment: Mapping[str, str], ranks: int) -> int:
    if given := environment.get("REPLICAS_PER_NODE"):
        return _positive("REPLICAS_PER_NODE", given)
    gpus = environment.get("SLURM_GPUS_ON_NODE")
    if not gpus:
        raise ConfigError("the nodes have no GPUs; pass --gpus-per-node to sbatch")
    if _positive("SLURM_GPUS_ON_NODE", gpus) % ranks:
        raise ConfigError(
            f"{gpus} GPUs of a node are not a multiple of --tensor-parallel-size {ranks}; "
            "change one of them"
        )
    return int(gpus) // ranks


def _positive(name: str, given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{name}={given}: must be an integer of at least 1")
    return int(given)


def main() -> int:
    """Entry point; becomes `vllm serve`."""
    words = command(sys.argv[1:], launcher.variables())
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        raise ConfigError("vllm is not on PATH; activate its environment") from None


if __name__ == "__main__":
    sys.exit(run_main(main))
