"""The commands `dms-data countdown` and `dms-data countdown-problems`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dms_train.data.errors import DataError
from dms_train.data.writer import refuse_existing
from dms_train.data_prep.arguments import count
from dms_train.data_prep.countdown import (
    MOST_FIRST_MOVES,
    PROBLEMS,
    TRAINING,
    WORDS,
    Countdown,
    CountdownRule,
    held_out_problems,
)
from dms_train.data_prep.exam_files import write_rows
from dms_train.data_prep.token_documents import (
    TokenShard,
    write_token_shard,
    write_word_tokenizer,
)

Commands = Any  # what add_subparsers returns; its class is private

_COUNTDOWN = """\
Make a shard of Countdown searches and their tokenizer: OUT/train and OUT/tokenizer. A search must
remember its target, its current first move and which first moves it has tried.
"""
_PROBLEMS = "Make Countdown problems that no training document holds, for dms-eval."


def add_commands(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `dms-data`.

    Args:
        commands: Of the parser.
        shared: Has `--workers` and `--overwrite`.
    """
    parser = commands.add_parser(
        "countdown", parents=[shared], help="make searches for a target", description=_COUNTDOWN
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add("--documents", type=count, required=True, help="documents to write")
    add("--document-tokens", type=count, help="fill documents of this length with searches")
    add("--long-share", type=_share, default=0.0, help="of them, that begin with a long search")
    add("--seed", type=int, default=0)
    _add_rule(parser)
    parser.set_defaults(run=_run_countdown)
    problems = commands.add_parser(
        "countdown-problems", help="make Countdown problems for dms-eval", description=_PROBLEMS
    )
    add = problems.add_argument
    add("--out", type=Path, required=True, help=".jsonl file to write")
    add("--problems", type=count, required=True)
    add("--seed", type=int, default=1)
    add("--overwrite", action="store_true", help="replace existing output")
    _add_rule(problems)
    problems.set_defaults(run=_run_problems)


def _add_rule(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--numbers", type=int, choices=(4, 5), default=4, help="of a prompt (%(default)s)")
    add("--fewest-solving", type=count, help="first moves that lead to the target")
    add("--most-solving", type=count, help="fewer make a problem harder")


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def _rule(args: argparse.Namespace, rules: dict[int, CountdownRule]) -> CountdownRule:
    given = rules[args.numbers]
    fewest = args.fewest_solving or given.fewest_solving
    most = args.most_solving or max(fewest, given.most_solving)
    if fewest > MOST_FIRST_MOVES:
        raise DataError(
            f"--fewest-solving {fewest}: instances have at most {MOST_FIRST_MOVES} first moves"
        )
    if fewest > most:
        raise DataError(f"--fewest-solving {fewest} is above --most-solving {most}")
    return CountdownRule(numbers=args.numbers, fewest_solving=fewest, most_solving=most)


def _run_countdown(args: argparse.Namespace) -> None:
    if args.long_share and args.document_tokens is None:
        raise DataError("--long-share: needs --document-tokens")
    rule, tokenizer, output = _rule(args, TRAINING), args.out / "tokenizer", args.out / "train"
    refuse_existing(output, args.overwrite)
    write_word_tokenizer(tokenizer, WORDS, overwrite=args.overwrite)
    shard = TokenShard(
        output=output,
        tokenizer=tokenizer,
        documents=args.documents,
        document_tokens=args.document_tokens,
        long_share=args.long_share,
        seed=args.seed,
        workers=args.workers,
        overwrite=args.overwrite,
    )
    made = write_token_shard(Countdown(rule), shard)
    print(f"{output}: {made.documents} documents, {made.tokens} tokens, {made.dtype}")
    assert made.preparation is not None
    print(json.dumps(made.preparation["statistics"]))


def _run_problems(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.overwrite:
        raise DataError(f"{args.out}: exists already; pass --overwrite to replace it")
    rule = _rule(args, PROBLEMS)
    write_rows(args.out, held_out_problems(args.problems, rule, args.seed))
    print(f"{args.out}: {args.problems} problems of {rule.numbers} numbers")
