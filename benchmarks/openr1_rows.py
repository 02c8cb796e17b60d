"""Rows per second and memory of `dms-data openr1`, and whether a kill changes the result.

    python -m benchmarks openr1_rows --tokenizer MODEL --rows 20000 --workers 2

Makes a parquet file of random rows and prepares it twice: once undisturbed, and once killed with
SIGKILL and started again. Compares the manifests byte by byte. Memory is the sum over the processes
of the command, sampled every half second.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.benchmark import Args, Benchmark
from benchmarks.tables import Column, field, table
from dms_train.evaluation.errors import EvaluationError

if TYPE_CHECKING:  # for developers only
    import psutil

_WORDS = ("so", "we", "add", "the", "next", "number", "and", "check", "whether", "it", "divides")
_SAMPLE_SECONDS = 0.5
_PER_GROUP = 1000


class Finished(NamedTuple):
    """One run of the command.

    Attributes:
        seconds: Time until it ended.
        memory: Bytes of all processes at every sample.
        killed: True if the command was killed.
    """

    seconds: float
    memory: list[int]
    killed: bool


def rows(count: int, trace_words: int) -> Iterator[dict[str, Any]]:
    """Yield random rows: problems of one sum, one to four traces of which about half are right."""
    rng = random.Random(0)
    for number in range(count):
        a, b = rng.randrange(10**6), rng.randrange(10**6)
        right = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))]
        yield {
            "problem": f"Problem {number}: what is the sum of ${a}$ and ${b}$?",
            "answer": str(a + b),
            "uuid": f"row-{number}",
            "generations": [_trace(rng, a + b + (not ok), trace_words) for ok in right],
            "correctness_math_verify": right,
            "is_reasoning_complete": [True] * len(right),
        }


def _trace(rng: random.Random, answer: int, words: int) -> str:
    thought = " ".join(rng.choices(_WORDS, k=words))
    return f"<think>\n{thought}\n</think>\n\nThe answer is $\\boxed{{{answer}}}$"


def write_parquet(path: Path, count: int, trace_words: int) -> None:
    """Write the rows in row groups, one group at a time."""
    import pyarrow
    from pyarrow import parquet

    writer = None
    group: list[dict[str, Any]] = []
    for number, row in enumerate(rows(count, trace_words), 1):
        group.append(row)
        if len(group) == _PER_GROUP or number == count:
            table = pyarrow.Table.from_pylist(group)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            group = []
    assert writer is not None
    writer.close()


def run(command: list[str], kill_after: int | None = None) -> Finished:
    """Run the command, whose last word is its output, and sample its memory.

    Args:
        command: Command line of `dms-data`.
        kill_after: Number of rows after which the command is killed; None lets it end.
    """
    import psutil

    start = time.monotonic()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    memory = []
    while process.poll() is None:
        memory.append(_memory(process))
        if kill_after is not None and _rows_done(Path(command[-1])) >= kill_after:
            process.kill()
            process.wait()
            return Finished(time.monotonic() - start, memory, True)
        time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        raise EvaluationError(f"`{' '.join(command)}` ended with exit code {process.returncode}")
    return Finished(time.monotonic() - start, memory, False)


def _rows_done(prefix: Path) -> int:
    state = Path(f"{prefix}.work") / "state.json"
    try:
        return int(json.loads(state.read_text())["next_row"])
    except FileNotFoundError:  # the command has not begun, or has finished
        return 0


def _memory(process: psutil.Process) -> int:
    import psutil

    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.Error:  # the process has just ended
            continue
    return total


def _files(prefix: Path) -> dict[str, bytes]:
    return {
        suffix: Path(f"{prefix}{suffix}").read_bytes()
        for suffix in (".manifest.json", ".bin", ".loss_mask.bin", ".verdicts.jsonl")
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--tokenizer", required=True, help="directory, with a chat template")
    add("--rows", type=int, default=20000, help="(%(default)s)")
    add("--trace-words", type=int, default=1000, help="words of every trace (%(default)s)")
    add("--workers", type=int, default=2, help="(%(default)s)")
    add("--filter", default="reverify", help="as in `dms-data openr1` (%(default)s)")
    add("--kills", type=int, default=2, help="(%(default)s)")


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the speed and memory of a whole run, and whether killed runs end with its files."""
    with tempfile.TemporaryDirectory(prefix="openr1_rows", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        data = folder / "rows.parquet"
        write_parquet(data, args.rows, args.trace_words)
        command = [sys.executable, "-m", "dms_train.data_prep.prepare", "openr1", str(data)]
        command += ["--tokenizer", args.tokenizer, "--filter", args.filter]
        command += ["--workers", str(args.workers), "--output"]
        whole = run([*command, str(folder / "whole" / "out")])
        kills = _killed([*command, str(folder / "killed" / "out")], args)
        quarter = max(1, len(whole.memory) // 4)
        yield {
            "rows": args.rows,
            "parquet_bytes": data.stat().st_size,
            "seconds": whole.seconds,
            "rows_s": args.rows / whole.seconds,
            "second_quarter_bytes": max(whole.memory[quarter : 2 * quarter], default=0),
            "last_quarter_bytes": max(whole.memory[3 * quarter : 4 * quarter], default=0),
            "kills": kills,
            "identical": _files(folder / "whole" / "out") == _files(folder / "killed" / "out"),
        }


def _killed(command: list[str], args: Args) -> int:
    """Kill the command several times and let it end; return how often it was killed."""
    kills = 0
    for number in range(args.kills):
        rows_done = args.rows * (number + 1) // (args.kills + 1)
        kills += run(command, kill_after=rows_done).killed
    run(command)
    return kills


COLUMNS: tuple[Column, ...] = (
    ("rows", field("rows", ",")),
    ("parquet MB", field("parquet_bytes", ",.0f", 1e-6)),
    ("seconds", field("seconds", ".1f")),
    ("rows/s", field("rows_s", ".0f")),
    ("MB in the second quarter", field("second_quarter_bytes", ",.0f", 1e-6)),
    ("MB in the last quarter", field("last_quarter_bytes", ",.0f", 1e-6)),
    ("kills", field("kills")),
    ("files after kills", lambda row: "identical" if row["identical"] else "DIFFERENT"),
)

BENCHMARK = Benchmark(
    record="openr1_rows",
    options=options,
    device=False,
    measure=measure,
    failed=lambda row: not row["identical"],
    tables=lambda record: table(COLUMNS, record["cases"]),
)
