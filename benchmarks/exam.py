"""Problems of a file that a model solves greedily: `exam.py MODEL PROBLEMS.jsonl ...`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.options import ANSWER_PATTERN
from dms_train.evaluation.problems import Sheet, read_problems, solved
from dms_train.inference.engine import LLM
from dms_train.inference.options import SamplingParams


def count(llm: LLM, sheets: list[Sheet], max_tokens: int) -> int:
    """Problems whose answer is right."""
    params = [
        SamplingParams(max_tokens=max_tokens, stop=() if s.stop is None else (s.stop,))
        for s in sheets
    ]
    outputs = llm.generate([sheet.prompt for sheet in sheets], params)
    pattern = re.compile(ANSWER_PATTERN)
    texts = (output.outputs[0].text for output in outputs)
    return sum(solved(t, s.answers, pattern) for t, s in zip(texts, sheets, strict=True))


def _run(args: argparse.Namespace) -> None:
    for path in args.problems:
        sheets = read_problems(path, args.max_problems)
        llm = LLM(args.model, max_num_seqs=100, device=args.device)
        hits = count(llm, sheets, args.max_tokens)
        total = sum(len(sheet.answers) for sheet in sheets)
        print(f"{path}: {hits} of {total} problems, {hits / total:.4f}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model directory or export")
    parser.add_argument("problems", nargs="+", type=Path, help="of dms-data exam-problems")
    parser.add_argument("--max-problems", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))


if __name__ == "__main__":
    sys.exit(main())
