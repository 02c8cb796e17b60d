"""Solve exam problems greedily.

python -m research exam MODEL PROBLEMS.jsonl ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.problems import ProblemSet, evaluate_accuracy, read_problems
from dms_train.evaluation.scorers.sheet import SheetScorer
from dms_train.hf.directory import resolve


def _run(args: argparse.Namespace) -> None:
    directory = resolve(args.model)
    for path in args.problems:
        problems = ProblemSet(
            documents=read_problems(path, args.max_problems),
            scorer=SheetScorer(),
            max_tokens=args.max_tokens,
            max_num_seqs=args.max_num_seqs,
        )
        share = evaluate_accuracy(directory, problems, {"device": args.device}).share
        count = sum(len(document.gold) for document in problems.documents)
        print(f"{path}: {share} of {count} problems", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research exam",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model directory or export")
    parser.add_argument("problems", nargs="+", type=Path, help="of dms-data exam-problems")
    parser.add_argument("--max-problems", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))
