"""Measure speed and memory, and print the tables of stored records.

    python -m benchmarks NAME [options]          # `NAME --help` describes a benchmark
    python -m benchmarks NAME --table FILE       # print the tables of a stored record
    python -m benchmarks page | summary | stale

A benchmark writes its record to `NAME.json` in the folder of the device below `--output` after each
row. The record has the versions, the command, the commit and the date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import benchmark, stale, summary
from benchmarks.records import RESULTS
from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError

_FORMAT = argparse.RawDescriptionHelpFormatter


def main(arguments: list[str] | None = None) -> int:
    """Run one command; exit code 0, 1 if a case failed, or 2 with one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_main(lambda: _run(words))


def _run(words: list[str]) -> int:
    known = benchmark.find()
    if " ".join(words[:2]) in known:  # such as `serve online`
        words[:2] = [" ".join(words[:2])]
    parser = argparse.ArgumentParser("python -m benchmarks", None, __doc__, formatter_class=_FORMAT)
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, source in known.items():
        sub = commands.add_parser(
            name, help=source.title, description=source.text, formatter_class=_FORMAT
        )
        if words[:1] == [name]:  # do not import the other benchmarks
            source.load().add_arguments(sub)
            sub.set_defaults(
                run=lambda args, source=source, sub=sub: source.load().run(args, sub, words)
            )
    _add_page(commands)
    _add_others(commands)
    args = parser.parse_args(words)
    return int(args.run(args) or 0)


def _add_page(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    page = commands.add_parser("page", help="write stored records into their pages of docs")
    page.add_argument("names", nargs="*", metavar="NAME", help="benchmarks (default: all)")
    page.add_argument("--results", type=Path, default=RESULTS, help="folders of devices")
    page.set_defaults(run=lambda args: _write_pages(args.names, args.results))


def _add_others(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("summary", help="write the speed tables of README.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folders of devices")
    parser.add_argument("--page", type=Path, default=summary.PAGE)
    parser.set_defaults(run=lambda args: summary.write(args.results, args.page))
    parser = commands.add_parser("stale", help="list records whose measured code has changed")
    parser.set_defaults(run=lambda _: stale.report())


def _write_pages(names: list[str], results: Path) -> None:
    pages = {name: source.load().page for name, source in benchmark.find().items()}
    for name in names or [name for name, page in pages.items() if page is not None]:
        page = pages.get(name)
        if page is None:
            having = ", ".join(name for name, page in pages.items() if page is not None)
            raise EvaluationError(f"{name}: has no page; choose from {having}")
        page.write(results, page.path)


if __name__ == "__main__":
    sys.exit(main())
