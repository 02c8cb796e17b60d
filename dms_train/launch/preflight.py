"""Check that a node meets the requirements of a stage: `python -m dms_train.launch.preflight RUN`.

One line reports the resources of the node. If one is missing, the attempt ends with a line that
names the resource, and `dms-submit status` repeats this line. The health of GPUs and links is not
checked.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from pathlib import Path

from dms_train.app import failures, launcher
from dms_train.cli.errors import run_main
from dms_train.launch.nodes import Needs, NodeError, look
from dms_train.observe.state_files import StateFiles


def _run(options: argparse.Namespace) -> None:
    needs = Needs(options.gpus, options.checkpoint_bytes, options.kept_bytes)
    try:
        try:
            print(f"node {options.node} {look(options.run, needs, options.visible)}")
        except NodeError as error:
            raise NodeError(f"node {options.node}: {error}") from error
    except (NodeError, OSError) as error:
        attempt = launcher.attempt() or "local"
        with contextlib.suppress(OSError):  # such as the full disk that is reported
            StateFiles(options.run).failed(options.rank, attempt, error, failures.describe(error))
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--checkpoint-bytes", type=int, default=0)
    parser.add_argument("--kept-bytes", type=int, default=0)
    parser.add_argument("--visible", help="CUDA_VISIBLE_DEVICES, where it is set")
    parser.add_argument("--node", default=socket.gethostname(), help="name of the node in messages")
    parser.add_argument("--rank", type=int, default=0, help="first rank of the node")
    options = parser.parse_args(arguments)
    return run_main(lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
