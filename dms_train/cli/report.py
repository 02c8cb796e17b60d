"""Write plots, tables and the configuration of a run to one HTML file, or compare several runs.

Reads RUN/metrics.jsonl and RUN/config.yaml, also while the run is in progress. The file loads
nothing from the network and holds the metrics as JSON. With several runs, each picture shows one
metric of all of them, and tables show last values and the differences of the configurations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.cli.errors import run_main


def _report(runs: list[Path], output: Path | None) -> None:
    from dms_train.evaluation.run_comparison import compare
    from dms_train.evaluation.run_report import read_run, render

    records = [read_run(run) for run in runs]
    alone = len(records) == 1
    target = output or (runs[0] / "report.html" if alone else Path("comparison.html"))
    page = render(records[0]) if alone else compare(records)
    target.write_text(page, encoding="utf-8")
    print(target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="dms-report",
        description=__doc__,
        epilog="examples: dms-report outputs/cr4\n"
        "          dms-report outputs/cr4 outputs/cr8 --output cr4_cr8.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run folder")
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write (default: RUN/report.html; comparison.html for several runs)",
    )
    args = parser.parse_args(arguments)
    return run_main(lambda: _report(args.runs, args.output))


if __name__ == "__main__":
    sys.exit(main())
