"""Write plots, tables and the configuration of a run to one HTML file.

Reads RUN/metrics.jsonl and RUN/config.yaml, also while the run is in progress. The file loads
nothing from the network and holds the metrics as JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.cli.errors import run_main


def _report(run: Path, output: Path | None) -> None:
    from dms_train.evaluation.run_report import read_run, render

    target = output or run / "report.html"
    page = render(read_run(run))
    target.write_text(page, encoding="utf-8")
    print(target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="dms-report",
        description=__doc__,
        epilog="example: dms-report outputs/cr4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--output", type=Path, help="file to write (default: RUN/report.html)")
    args = parser.parse_args(arguments)
    return run_main(lambda: _report(args.run, args.output))


if __name__ == "__main__":
    sys.exit(main())
