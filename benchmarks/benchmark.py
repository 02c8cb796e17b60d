"""Declaration of a benchmark, and its runner.

A module below `benchmarks` that assigns `BENCHMARK` is a benchmark. Its command is the path of the
module (`serve/online.py` is `serve online`), without `main`. The first line of its docstring is its
help text.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.records import RESULTS, Table, folder_of, origin, print_record, show
from benchmarks.timing import device_name, versions
from dms_train.evaluation.errors import EvaluationError

Args = argparse.Namespace
Record = dict[str, Any]
Word = TypeVar("Word")
_MODULES = Path(__file__).parent
_SHOWN = 400  # characters of a measurement that are printed while others are measured


class Page(NamedTuple):
    """Page of the documentation that quotes records.

    Attributes:
        path: Markdown file with markers.
        write: Function of the results folder that writes the records of all devices into a page.
    """

    path: Path
    write: Callable[[Path, Path], None]


def append(record: Record, row: Record) -> None:
    """Add a row to the rows of a record."""
    record.setdefault("cases", []).append(row)


def add_fields(record: Record, fields: Record) -> None:
    """Add fields to a record, or replace them."""
    record |= fields


def replace(field_name: str, key: Callable[[Record], Hashable]) -> Callable[[Record, Record], None]:
    """Return a function that puts a row in place of the earlier row with the same key."""

    def store(record: Record, row: Record) -> None:
        others = [other for other in record.get(field_name, ()) if key(other) != key(row)]
        record[field_name] = [*others, row]

    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark: its measurements, its record and its tables.

    Attributes:
        record: Name of the record; `{option}` stands for an option of the command.
        measure: Yields the measurements of one case, each as soon as it is complete.
        tables: Returns a record as text.
        cases: Yields the cases for `measure`. The default is a single case, None.
        settings: Further fields of the record.
        store: Adds a measurement to the record.
        continues: Field whose rows are kept from an earlier run; None starts a new record. Each
            row of a continued record names its own commit (`args.origin`).
        options: Adds the options of only this benchmark.
        check: Raises ValueError or OSError for options that cannot be used.
        repeats: Default of `--repeats`; None if there is no such option.
        device: True if there is an option `--device`.
        views: Other ways to show a stored record, by the name of the option.
        failed: Returns True for a measurement that makes the exit code 1.
        stored: Records in the repository, for the command `stale`.
        page: Page that quotes the records.
    """

    record: str
    measure: Callable[[Any, Args], Iterable[Record]]
    tables: Callable[[Record], str]
    cases: Callable[[Args], Iterable[Any]] = lambda _: (None,)
    settings: Callable[[Args], Record] = lambda _: {}
    store: Callable[[Record, Record], None] = append
    continues: str | None = None
    options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    check: Callable[[Args], None] = lambda _: None
    repeats: int | None = None
    device: bool = True
    views: Mapping[str, Callable[[Record], str]] = field(default_factory=dict)
    failed: Callable[[Record], bool] = lambda row: "failed" in row
    stored: tuple[Table, ...] = ()
    page: Page | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark and the common ones."""
        self.options(parser)
        add = parser.add_argument
        if self.device:
            add("--device", type=_device, help="default: the GPU if there is one")
        if self.repeats is not None:
            add("--repeats", type=int, default=self.repeats, help="(%(default)s)")
        add("--output", type=Path, default=RESULTS, help="folder of results (%(default)s)")
        words: dict[str, Any] = {"action": _Show, "type": Path, "metavar": "FILE"}
        add("--table", const=self.tables, help="print the tables of a stored record", **words)
        for option, view in self.views.items():
            text = (view.__doc__ or "").partition("\n")[0].rstrip(".")
            add(f"--{option}", const=view, help=text[:1].lower() + text[1:], **words)

    def run(self, args: Args, parser: argparse.ArgumentParser, words: list[str]) -> int:
        """Measure all cases and print the tables.

        Args:
            args: Parsed options.
            parser: Parser, for messages about options that cannot be used.
            words: Command line.

        Returns:
            Exit code: 1 if a measurement failed, else 0.
        """
        try:
            self.check(args)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        self._prepare(args, words)
        record, failed = self._header(args), False
        for case in self.cases(args):
            for measured in self.measure(case, args):
                self.store(record, measured)
                failed |= self.failed(measured)
                args.file.parent.mkdir(parents=True, exist_ok=True)
                args.file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                print(json.dumps(measured)[:_SHOWN], flush=True)
        if not args.file.exists():
            raise EvaluationError("no case fits these options and this device; choose others")
        print()
        print_record(record, self.tables)
        print(f"\nwritten: {args.file}")
        return int(failed)

    def _prepare(self, args: Args, words: list[str]) -> None:
        """Complete the options by the device, the file of the record and its provenance."""
        default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        args.device = getattr(args, "device", None) or default
        name = re.sub(r"\W+", "_", self.record.format(**vars(args)).lower())
        args.file = folder_of(device_name(args.device), args.output) / f"{name}.json"
        given = re.sub(r"--output[ =]\S+", "", " ".join(words)).split()
        args.command = " ".join(["python -m benchmarks", *given])
        args.versions, args.origin = versions(args.device), origin()
        args.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def _header(self, args: Args) -> Record:
        record: Record = {"device": device_name(args.device)}
        if self.continues is None:
            record |= {"versions": args.versions, "command": args.command, **args.origin}
        elif args.file.exists():
            record[self.continues] = json.loads(args.file.read_text())[self.continues]
        return record | self.settings(args)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(skip_reason(error)) from None


class _Show(argparse.Action):
    """Option that prints a stored record and exits, as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *words: Any) -> None:
        show(words[1], self.const)
        parser.exit()


class Source(NamedTuple):
    """Module that declares a benchmark.

    Attributes:
        module: Dotted name.
        text: Docstring.
    """

    module: str
    text: str

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return self.text.partition("\n")[0].rstrip(".")

    def load(self) -> Benchmark:
        """Import the module and return its declaration."""
        benchmark: Benchmark = importlib.import_module(self.module).BENCHMARK
        return benchmark


def find() -> dict[str, Source]:
    """Return all benchmarks by name, without importing them."""
    sources = {}
    for file in sorted(_MODULES.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "\nBENCHMARK = Benchmark(" in text:
            words = file.relative_to(_MODULES).with_suffix("").parts
            name = " ".join(word for word in words if word != "main")
            docstring = ast.get_docstring(ast.parse(text)) or ""
            sources[name] = Source(".".join(("benchmarks", *words)), docstring)
    return sources


def or_skipped(measure: Callable[[], Record]) -> Record:
    """Return the result of `measure`, or the reason why it does not fit the GPU."""
    try:
        return measure()
    except torch.cuda.OutOfMemoryError as error:
        reason = skip_reason(error)
    torch.cuda.empty_cache()
    return {"skipped": reason}


def skip_reason(error: Exception) -> str:
    """Return the first line of a message, or the class of an exception without a message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return an argument type that accepts these words."""
    words = tuple(known)

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(words)}")
        return text

    return read


def comma_separated(read: Callable[[str], Word]) -> Callable[[str], list[Word]]:
    """Return an argument type for several words, separated by commas."""

    def read_all(text: str) -> list[Word]:
        try:
            return [read(word) for word in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all
