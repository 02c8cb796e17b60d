"""Compare an export, run on the compact cache, with the original model.

Measures on held-out text (--data): KL divergence and top-1 agreement with the original, next-token
losses, evicted share, KV reads and size of both caches. With --problems, both models also solve
problems, and their shares of right answers are compared. --window-only also measures a control:
the original restricted to a sliding window. The self-test of the export is always replayed. Only
one model is loaded at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dms_train import limits
from dms_train.cli.engine_arguments import add_memory
from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import ANSWER_PATTERN, ValidateOptions
from dms_train.observe import log

if TYPE_CHECKING:
    from dms_train.data.tokens import TokenSamples

_EPILOG = """\
results:
  OUTPUT/report.md, OUTPUT/metrics.json and, with matplotlib, pictures; the tables are printed.
  The command exits with 2 if the self-test fails, after the report is written.

example:
  dms-validate outputs/cr4/exports/final/hf --teacher MODEL --data data/corpus \\
      --samples 64 --output outputs/cr4/validation

A Megatron checkpoint is converted first: dms-export CHECKPOINT EXPORT.
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-validate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("export", help="directory of a retrofitted export")
    parser.add_argument(
        "--teacher",
        required=True,
        help="the original model: directory or hub id in the local cache",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write the report to")
    _add_text(parser)
    _add_problems(parser)
    parser.add_argument(
        "--window-only",
        action="store_true",
        help="also measure a control: the original with only its sliding window",
    )
    parser.add_argument(
        "--device", default="auto", help="auto (prefers a GPU), cpu, cuda or cuda:1"
    )
    add_memory(parser.add_argument)
    return parser.parse_args(arguments)


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group(
        "held-out text", "the validation split of a run, cut as that run cut it"
    )
    text.add_argument("--data", metavar="PREFIX", help="of the .bin, .idx and .manifest.json")
    text.add_argument("--split", default="98,2,0", help="data.split of the run (%(default)s)")
    text.add_argument(
        "--seq-length", type=int, default=512, help="tokens of a sample (%(default)s)"
    )
    text.add_argument(
        "--packing", action="store_true", help="data.packing of the run: keep documents apart"
    )
    text.add_argument("--samples", type=int, default=64, help="number of samples (%(default)s)")
    text.add_argument("--seed", type=int, default=1234, help="run.seed of the run (%(default)s)")


def _add_problems(parser: argparse.ArgumentParser) -> None:
    exam = parser.add_argument_group("problems", "prompts with known answers, decoded greedily")
    exam.add_argument("--problems", metavar="FILE", help="JSON lines of prompts and answers")
    exam.add_argument("--max-problems", type=int, default=400, help="limit (%(default)s)")
    exam.add_argument(
        "--max-tokens", type=int, default=256, help="tokens generated for one prompt (%(default)s)"
    )
    exam.add_argument(
        "--answer-pattern",
        default=ANSWER_PATTERN,
        help="regular expression; its one group matches an answer",
    )
    exam.add_argument(
        "--max-num-seqs", type=int, default=100, help="concurrent sequences (%(default)s)"
    )


def _options(args: argparse.Namespace) -> ValidateOptions:
    options = ValidateOptions(
        samples=args.samples,
        problems=args.problems,
        max_problems=args.max_problems,
        max_tokens=args.max_tokens,
        answer_pattern=args.answer_pattern,
        window_only=args.window_only,
        max_num_seqs=args.max_num_seqs,
        cache_bytes=args.cache_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        device=args.device,
    )
    for line in limits.problems(options):
        raise EvaluationError(line)
    return options


def _samples(args: argparse.Namespace, teacher: Path) -> TokenSamples | None:
    if args.data is None:
        return None
    # after the return, because only text needs the packages of the training
    from dms_train.data.options import DataOptions
    from dms_train.data.tokens import build_valid_samples
    from dms_train.hf.directory import read_architecture

    options = DataOptions(
        paths=(args.data,),
        split=args.split,
        seq_length=args.seq_length,
        micro_batch_size=1,
        global_batch_size=args.samples,
        packing=args.packing,
    )
    size, folder = read_architecture(teacher).vocab_size, args.output / "data_cache"
    return build_valid_samples(options, vocab_size=size, seed=args.seed, cache_dir=folder)


def _validate(args: argparse.Namespace) -> None:
    since = time.monotonic()
    if args.data is None and args.problems is None:
        raise EvaluationError("nothing to measure on; give --data, --problems or both")
    options = _options(args)
    from dms_train.evaluation.export_comparison import evaluate_export, evaluation_target
    from dms_train.hf.directory import resolve

    target = evaluation_target(resolve(args.export), resolve(args.teacher), options)
    samples = _samples(args, target.teacher)
    evaluate_export(target, samples, options, folder=args.output, since=since)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    args = _parse(arguments)
    log.configure(0)
    return run_main(lambda: _validate(args))


if __name__ == "__main__":
    sys.exit(main())
