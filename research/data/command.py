"""Make training data and problems of the synthetic tasks.

`python -m research data NAME` makes a token file and the lab's tokenizer; `NAME-problems` makes
problems that no training document has, for `python -m research eval`. `dms-data mix` blends token
files.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.word_tokenizer import write_word_tokenizer
from dms_train.cli.errors import run_main
from dms_train.data.errors import DataError
from dms_train.data.writer import refuse_existing
from dms_train.data_prep.arguments import count
from dms_train.data_prep.exam_files import write_problems, write_rows
from research.data import (
    arithmetic,
    countdown,
    lab_linear_1d,
    lab_niah,
    lab_variable_tracking,
)
from research.data.countdown import MOST_FIRST_MOVES, PROBLEMS, TRAINING, CountdownRule
from research.data.linear_1d import linear_1d_problems
from research.data.token_documents import (
    TokenShard,
    TokenTask,
    write_token_shard,
)
from research.data.words import WORDS

Commands = Any  # result of add_subparsers, whose class is private
Parser = argparse.ArgumentParser

_COUNTDOWN = """\
Make a shard of Countdown searches and the lab's tokenizer: OUT/train and OUT/tokenizer. A search
must remember its target, its current first move and which first moves it has tried.
"""
_ARITHMETIC = """\
Make a shard of searches for a common root modulo 61, which spot checks may end in a wrong answer,
and the lab's tokenizer: OUT/train and OUT/tokenizer. A search must remember nine coefficients and
which candidates it has tried.
"""
_LINEAR = """\
Make a shard of linear equations of many terms, solved step by step, and the lab's tokenizer:
OUT/train and OUT/tokenizer. A solver must remember each term until the working collects it.
"""
_NIAH = """\
Make a shard of texts that hide numbers and ask for some by their key, and the lab's tokenizer:
OUT/train and OUT/tokenizer.
"""
_VARIABLES = """\
Make a shard of texts that hide chains of assignments and ask for the variables of some values, and
the lab's tokenizer: OUT/train and OUT/tokenizer.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0, or 2 with one line."""
    args = _parser().parse_args(arguments)
    return run_main(lambda: args.run(args))


def _parser() -> Parser:
    parser = argparse.ArgumentParser(
        prog="python -m research data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="NAME")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--workers", type=count, default=1, help="processes (%(default)s)")
    shared.add_argument("--overwrite", action="store_true", help="replace existing output")
    _add_countdown(commands, shared)
    _add_arithmetic(commands, shared)
    _add_equations(commands, shared)
    _add_haystacks(commands, shared)
    return parser


def _add_countdown(commands: Commands, shared: Parser) -> None:
    parser = _documents(commands, shared, "countdown", "make searches for a target", _COUNTDOWN)
    told = "of a prompt; 3,3,4,5 makes as many of 4 as of 5, and twice as many of 3 (4)"
    parser.add_argument("--numbers", type=_numbers, default=(4,), help=told)
    _add_rule(parser)
    parser.set_defaults(run=_run_countdown)
    problems = _problems(commands, "countdown", "Countdown")
    problems.add_argument(
        "--numbers", type=int, choices=PROBLEMS, default=4, help="of a prompt (4)"
    )
    _add_rule(problems)
    problems.set_defaults(run=_run_countdown_problems)


def _add_arithmetic(commands: Commands, shared: Parser) -> None:
    what = "make modular-arithmetic searches that may end in a wrong answer"
    parser = _documents(commands, shared, "arithmetic", what, _ARITHMETIC)
    parser.set_defaults(run=lambda args: _write_documents(args, arithmetic.Arithmetic()))
    problems = _problems(commands, "arithmetic", "modular arithmetic")
    problems.set_defaults(run=_run_arithmetic_problems)


def _add_equations(commands: Commands, shared: Parser) -> None:
    parser = _documents(commands, shared, "lab-linear-1d", "make linear equations", _LINEAR)
    parser.set_defaults(run=lambda args: _write_documents(args, lab_linear_1d.LabLinear1d()))
    problems = _problems(commands, "lab-linear-1d", "linear equation")
    most = lab_linear_1d.MOST_TERMS
    problems.add_argument("--terms", type=count, default=most, help="of each kind (%(default)s)")
    problems.set_defaults(run=_run_linear_problems)
    problems = _problems(commands, "linear-1d", "DeepMind's linear_1d")
    problems.set_defaults(run=_run_linear_1d_problems)


def _add_haystacks(commands: Commands, shared: Parser) -> None:
    parser = _documents(commands, shared, "lab-niah", "make texts that hide numbers", _NIAH)
    _add_context(parser)
    parser.set_defaults(
        run=lambda args: _write_documents(args, lab_niah.LabNiah(context=args.context))
    )
    problems = _problems(commands, "lab-niah", "needle")
    _add_context(problems, "tokens of a prompt and its answer")
    problems.add_argument("--needles", type=count, default=1, help="in each text (%(default)s)")
    problems.set_defaults(run=_run_niah_problems)
    name = "lab-variable-tracking"
    parser = _documents(commands, shared, name, "make texts that hide assignments", _VARIABLES)
    _add_context(parser)
    parser.set_defaults(
        run=lambda args: _write_documents(
            args, lab_variable_tracking.LabVariableTracking(context=args.context)
        )
    )
    problems = _problems(commands, name, "variable tracking")
    _add_context(problems, "tokens of a prompt and its answer")
    add = problems.add_argument
    most = lab_variable_tracking.MOST_ASSIGNMENTS
    add("--chains", type=count, default=most, help="of assignments in a text (%(default)s)")
    hops = range(lab_variable_tracking.MOST_HOPS + 1)
    told = "assignments after the first of a chain (%(default)s)"
    add("--hops", type=int, choices=hops, default=0, help=told)
    problems.set_defaults(run=_run_variable_problems)


def _add_context(parser: Parser, what: str = "most tokens of a document") -> None:
    parser.add_argument("--context", type=count, default=2048, help=f"{what} (%(default)s)")


def _documents(
    commands: Commands, shared: Parser, name: str, what: str, description: str
) -> Parser:
    parser: Parser = commands.add_parser(name, parents=[shared], help=what, description=description)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add("--documents", type=count, required=True, help="documents to write")
    add("--document-tokens", type=count, help="fill documents of this length with drawn ones")
    add("--long-share", type=_share, default=0.0, help="of them, that begin with a long one")
    told = "tokens that the loss counts; answer: those after prompts (%(default)s)"
    add("--loss-on", choices=("all", "answer"), default="all", help=told)
    add("--seed", type=int, default=0)
    return parser


def _problems(commands: Commands, name: str, what: str) -> Parser:
    parser: Parser = commands.add_parser(
        f"{name}-problems",
        help=f"make {what} problems for the evaluation",
        description=f"Make {what} problems that no training document holds, for the evaluation.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help=".jsonl file to write")
    add("--problems", type=count, required=True)
    add("--seed", type=int, default=1)
    add("--overwrite", action="store_true", help="replace existing output")
    return parser


def _add_rule(parser: Parser) -> None:
    add = parser.add_argument
    add("--fewest-solving", type=count, help="first moves that lead to the target")
    add("--most-solving", type=count, help="fewer make a problem harder")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if not set(numbers) <= set(TRAINING):
        known = ", ".join(map(str, TRAINING))
        raise argparse.ArgumentTypeError(f"{text}: choose from {known}, with commas between them")
    return numbers


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def _rule(args: argparse.Namespace, given: CountdownRule) -> CountdownRule:
    """Return a rule with the limits of the arguments."""
    fewest = args.fewest_solving or given.fewest_solving
    most = args.most_solving or max(fewest, given.most_solving)
    if fewest > MOST_FIRST_MOVES:
        raise DataError(
            f"--fewest-solving {fewest}: instances have at most {MOST_FIRST_MOVES} first moves"
        )
    if fewest > most:
        raise DataError(f"--fewest-solving {fewest} is above --most-solving {most}")
    return replace(given, fewest_solving=fewest, most_solving=most)


def _run_countdown(args: argparse.Namespace) -> None:
    rules = tuple(_rule(args, TRAINING[number]) for number in args.numbers)
    _write_documents(args, countdown.Countdown(rules))


def _run_countdown_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    rule = _rule(args, PROBLEMS[args.numbers])
    write_rows(args.out, countdown.held_out_problems(args.problems, rule, args.seed))
    print(f"{args.out}: {args.problems} problems of {rule.numbers} numbers")


def _run_arithmetic_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    write_rows(args.out, arithmetic.held_out_problems(args.problems, args.seed))
    print(f"{args.out}: {args.problems} problems")


def _run_linear_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    write_rows(
        args.out, lab_linear_1d.held_out_problems(args.problems, args.seed, terms=args.terms)
    )
    print(f"{args.out}: {args.problems} problems of {args.terms} terms of each kind")


def _run_linear_1d_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    write_problems(args.out, linear_1d_problems(args.problems, 1, args.seed))
    print(f"{args.out}: {args.problems} sheets of one question")


def _run_niah_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    rows = lab_niah.held_out_problems(
        args.problems, args.seed, context=args.context, needles=args.needles
    )
    write_rows(args.out, rows)
    print(f"{args.out}: {args.problems} problems of {args.context} tokens")


def _run_variable_problems(args: argparse.Namespace) -> None:
    _refuse_file(args)
    rows = lab_variable_tracking.held_out_problems(
        args.problems, args.seed, context=args.context, chains=args.chains, hops=args.hops
    )
    write_rows(args.out, rows)
    print(f"{args.out}: {args.problems} problems of {args.context} tokens")


def _refuse_file(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.overwrite:
        raise DataError(f"{args.out}: exists already; pass --overwrite to replace it")


def _write_documents(args: argparse.Namespace, task: TokenTask) -> None:
    if args.long_share and args.document_tokens is None:
        raise DataError("--long-share: needs --document-tokens")
    tokenizer, output = args.out / "tokenizer", args.out / "train"
    refuse_existing(output, args.overwrite)
    write_word_tokenizer(tokenizer, WORDS, overwrite=args.overwrite)
    shard = TokenShard(
        output=output,
        tokenizer=tokenizer,
        documents=args.documents,
        document_tokens=args.document_tokens,
        long_share=args.long_share,
        answers_only=args.loss_on == "answer",
        seed=args.seed,
        workers=args.workers,
        overwrite=args.overwrite,
    )
    made = write_token_shard(task, shard)
    print(f"{output}: {made.documents} documents, {made.tokens} tokens, {made.dtype}")
    assert made.preparation is not None
    print(json.dumps(made.preparation["statistics"]))
