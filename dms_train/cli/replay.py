"""Recompute a skipped step, one microbatch at a time, and report where it is not finite.

    python -m dms_train.cli.replay RUN/skipped/step_00000024.json

Uses the configuration of the run folder and the newest checkpoint before that step. Changes
nothing, and prints loss and gradient norm of every microbatch. Under torchrun, with the layout of
the run, a line stands for one microbatch of every data-parallel rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.app import launcher
from dms_train.cli.errors import run_main
from dms_train.observe import log


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m dms_train.cli.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="skipped/step_*.json of a run folder")
    args = parser.parse_args(arguments)
    return run_main(lambda: _replay(args.file))


def _replay(file: Path) -> None:
    from dms_train.app.replay import replay

    log.configure(launcher.rank())
    for line in replay(file):
        if launcher.rank() == 0:
            numbers = f"{line.first}" if line.first == line.last else f"{line.first}-{line.last}"
            sys.stdout.write(
                f"samples {numbers}: loss {line.loss:.6g}, gradient norm {line.grad_norm:.6g}\n"
            )


if __name__ == "__main__":
    sys.exit(main())
