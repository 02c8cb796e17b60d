"""Rows per second and memory of `dms-data openr1`, and whether a kill changes the result.

    python -m benchmarks.openr1_rows --tokenizer MODEL --rows 20000 --workers 2

Makes a parquet file of random rows, prepares it once undisturbed and once killed with SIGKILL and
started again, and compares the manifests byte by byte. Memory is the sum over the processes of the
command, sampled every half second.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_WORDS = ("so", "we", "add", "the", "next", "number", "and", "check", "whether", "it", "divides")
_SAMPLE_SECONDS = 0.5
_PER_GROUP = 1000


class Finished(NamedTuple):
    """One run of the command.

    Attributes:
        seconds: Until it ended.
        memory: Bytes of all its processes at every sample.
        killed: Whether it was killed.
    """

    seconds: float
    memory: list[int]
    killed: bool


def rows(count: int, trace_words: int) -> Iterator[dict[str, Any]]:
    """Random rows: problems of one sum, one to four traces of which about half are right."""
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
    """The rows in row groups, written one group at a time."""
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
        command: Of `dms-data`.
        kill_after: Rows after which it is killed; None lets it end.
    """
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
        raise SystemExit(f"the command ended with {process.returncode}")
    return Finished(time.monotonic() - start, memory, False)


def _rows_done(prefix: Path) -> int:
    state = Path(f"{prefix}.work") / "state.json"
    try:
        return int(json.loads(state.read_text())["next_row"])
    except FileNotFoundError:  # not begun, or finished
        return 0


def _memory(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total


def _files(prefix: Path) -> dict[str, bytes]:
    return {
        suffix: Path(f"{prefix}{suffix}").read_bytes()
        for suffix in (".manifest.json", ".bin", ".loss_mask.bin", ".verdicts.jsonl")
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="directory, with a chat template")
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--trace-words", type=int, default=1000, help="of every trace")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--filter", default="reverify")
    parser.add_argument("--kills", type=int, default=2)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="openr1_rows"))
    try:
        measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Entry point; see the docstring of this module."""
    data = folder / "rows.parquet"
    write_parquet(data, args.rows, args.trace_words)
    print(f"{args.rows} rows, {data.stat().st_size / 1e6:.0f} MB of parquet", flush=True)
    command = [sys.executable, "-m", "dms_train.data_prep.prepare", "openr1", str(data)]
    command += ["--tokenizer", args.tokenizer, "--filter", args.filter]
    command += ["--workers", str(args.workers), "--output"]
    whole = run([*command, str(folder / "whole" / "out")])
    quarter = max(1, len(whole.memory) // 4)
    second, last = (whole.memory[k * quarter : (k + 1) * quarter] for k in (1, 3))
    print(
        f"{whole.seconds:.1f} s, {args.rows / whole.seconds:.0f} rows/s; memory in the second "
        f"quarter {max(second) / 1e6:.0f} MB, in the last {max(last) / 1e6:.0f} MB",
        flush=True,
    )
    resumed = [*command, str(folder / "killed" / "out")]
    kills = 0
    for number in range(args.kills):
        rows_done = args.rows * (number + 1) // (args.kills + 1)
        kills += run(resumed, kill_after=rows_done).killed
    run(resumed)
    same = _files(folder / "whole" / "out") == _files(folder / "killed" / "out")
    print(f"killed {kills} times and resumed: {'identical' if same else 'DIFFERENT'} files")


if __name__ == "__main__":
    main()
