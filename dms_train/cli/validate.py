"""`dms-validate EXPORT --teacher MODEL`: what an export is worth beside the original.

Measures agreement on held-out text (`--data`), the cost of both caches, the export's self-test
through the compact cache, and solved problems (`--problems`); writes a report.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.cli.validator import judge, resolve_device
from dms_train.data.options import DataOptions
from dms_train.data.tokens import TokenSamples, build_valid_samples
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.findings import export_window, require_replay
from dms_train.evaluation.measure import Place
from dms_train.evaluation.options import (
    ANSWER_PATTERN,
    DEVICES,
    ValidateOptions,
    check_options,
)
from dms_train.evaluation.problems import check_prompts, read_problems
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.observe import log


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dms-validate", description=__doc__)
    parser.add_argument("export", help="directory of a DMS export")
    parser.add_argument("--teacher", required=True, help="the original model (directory or hub id)")
    parser.add_argument("--output", required=True, type=Path, help="folder of the report")
    text = parser.add_argument_group("held-out text")
    text.add_argument("--data", help="PREFIX of .bin/.idx/.manifest.json files")
    text.add_argument("--split", default="98,2,0", help="the run's data.split")
    text.add_argument("--seq-length", type=int, default=512)
    text.add_argument("--samples", type=int, default=64)
    text.add_argument("--seed", type=int, default=1234, help="the run's run.seed")
    exam = parser.add_argument_group("problems")
    exam.add_argument("--problems", help="JSON-lines file of prompts and answers")
    exam.add_argument("--max-problems", type=int, default=400)
    exam.add_argument("--max-tokens", type=int, default=256, help="of one line")
    exam.add_argument("--answer-pattern", default=ANSWER_PATTERN, help="one group, the answer")
    exam.add_argument("--no-window-only", action="store_true", help="leave the control out")
    exam.add_argument("--max-num-seqs", type=int, default=100)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    return parser.parse_args(arguments)


def _options(args: argparse.Namespace) -> ValidateOptions:
    return ValidateOptions(
        samples=args.samples,
        problems=args.problems,
        max_problems=args.max_problems,
        max_tokens=args.max_tokens,
        answer_pattern=args.answer_pattern,
        window_only=not args.no_window_only,
        max_num_seqs=args.max_num_seqs,
        device=args.device,
    )


def _samples(args: argparse.Namespace, architecture: Architecture) -> TokenSamples | None:
    if args.data is None:
        return None
    options = DataOptions(
        paths=(args.data,),
        split=args.split,
        seq_length=args.seq_length,
        micro_batch_size=1,
        global_batch_size=args.samples,
    )
    size, folder = architecture.vocab_size, args.output / "data_cache"
    return build_valid_samples(options, vocab_size=size, seed=args.seed, cache_dir=folder)


def _validate(args: argparse.Namespace) -> None:
    since = time.monotonic()
    if args.data is None and args.problems is None:
        raise EvaluationError("nothing to measure on; give --data, --problems or both")
    options = _options(args)
    for line in check_options(options):
        raise EvaluationError(line)
    export, teacher = resolve(args.export), resolve(args.teacher)
    window, architecture = export_window(export), read_architecture(teacher)
    if args.problems is not None:
        sheets = read_problems(Path(args.problems), args.max_problems)
        check_prompts(sheets, export, architecture)
    place = Place(export=export, teacher=teacher, window=window, device=resolve_device(args.device))
    require_replay(judge(place, _samples(args, architecture), options, args.output, since))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    args = _parse(arguments)
    log.configure(0)
    return run_main(lambda: _validate(args))


if __name__ == "__main__":
    sys.exit(main())
