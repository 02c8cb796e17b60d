"""The command `dms-data generate`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from dms_train.cli.engine_arguments import add_engine, engine_options
from dms_train.data.errors import DataError
from dms_train.data_prep.arguments import terms_of
from dms_train.data_prep.chat_rows import KEYS
from dms_train.data_prep.continuations import ContinuationJob, Speed, make_shard
from dms_train.data_prep.conversation_commands import (
    RESUMES,
    Commands,
    hub_options,
    report_shard,
)
from dms_train.data_prep.conversations import LossOn
from dms_train.data_prep.documents import TEXT_TYPES
from dms_train.data_prep.prompts import Beginning, EmptyPrompts, PromptOptions
from dms_train.data_prep.rows import LINES, Rows, open_rows, passages
from dms_train.data_prep.shard_files import shard_prefix
from dms_train.hf.text_files import read_text
from dms_train.inference.options import SamplingParams

_GENERATE = """\
Make a shard of a model's own continuations of prompts, as the paper does for Llama 3.2 1B. A
document is a prompt and what the model generates after it, with the end-of-text token where the
model wrote one. The same command continues an interrupted one.

A prompt is a text, which the model continues as it is (after its bos_token, if it has one), or a
list of messages, which the chat template renders; turns of the assistant at the end of the list are
left out. An empty text gives the bos_token alone. With --beginning a text is a document, of which
the model continues a beginning of random length.
"""
_EPILOG = """\
examples:
  dms-data generate prompts.jsonl --model MODEL --max-new-tokens 2048 --output data/own
  dms-data generate problems.parquet --column problem --chat --model MODEL --continuations 4 \\
      --top-p 0.95 --max-new-tokens 8192 --device cuda --max-num-seqs 128 --output data/own
  dms-data generate gsm8k/train.jsonl --column question --answer-column answer --chat \\
      --suffix ' Put the final answer into \\boxed{}.' --model MODEL --max-new-tokens 512 \\
      --source openai/grade-school-math --license MIT --output data/gsm8k
  dms-data generate books/ --beginning 32-512 --model MODEL --max-new-tokens 1536 --output data/own
  dms-data generate --unconditional 10000 --model MODEL --max-new-tokens 4096 --output data/own
"""


def add_command(commands: Commands, rows: argparse.ArgumentParser) -> None:
    """Add the command to the parser of `dms-data`.

    Args:
        commands: Subcommands of `dms-data`.
        rows: Arguments of all commands that read rows.
    """
    parser = commands.add_parser(
        "generate",
        parents=[rows],
        help="make a shard of a model's own continuations",
        description=_GENERATE,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        help=".jsonl, .json, .csv, .parquet or .txt (lines) files, folders, or one hub id",
    )
    add("--unconditional", type=_positive, metavar="N", help="N empty prompts in place of inputs")
    add("--model", required=True, help="directory or export; a hub id only if it is in the cache")
    add("--column", metavar="NAME", help="prompt column; default prompt, else messages")
    add("--chat", action="store_true", help="make a text a user turn")
    add("--suffix", default="", metavar="TEXT", help="append this to text prompts")
    add(
        "--beginning",
        type=_lengths,
        metavar="MIN-MAX",
        help="continue the first MIN to MAX tokens of documents: of column text, or of passages of "
        f"{', '.join(TEXT_TYPES)} files",
    )
    add("--limit", type=_positive, metavar="N", help="read only the first N rows")
    add("--workers", type=_positive, metavar="N", help="threads on a CPU; default all cores")
    add("--overwrite", action="store_true", help="replace existing output")
    _add_filters(parser)
    _add_sampling(parser)
    add_engine(parser)
    parser.set_defaults(run=_run, interrupted=RESUMES)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("filters").add_argument
    add(
        "--only-finished",
        action="store_true",
        help="leave out continuations that a limit has cut off",
    )
    add(
        "--answer-column",
        metavar="NAME",
        help="column with the answer, or with a solution that ends in '#### ANSWER'; leave out "
        "continuations with another answer",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=_positive, required=True, metavar="N", help="limit of new tokens")
    add("--continuations", type=_positive, default=1, metavar="N", help="per prompt (%(default)s)")
    add("--temperature", type=float, default=1.0, help="0 decodes greedily (%(default)s)")
    add("--top-p", type=float, default=1.0, help="smallest set with this probability (%(default)s)")
    add("--top-k", type=int, default=-1, help="most likely tokens to draw from; -1 takes all")
    add("--seed", type=int, default=0, help="seed of all draws (%(default)s)")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _lengths(text: str) -> Beginning:
    shortest, _, longest = text.partition("-")
    if not (shortest.isdecimal() and longest.isdecimal() and 1 <= int(shortest) <= int(longest)):
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN-MAX with 1 <= MIN <= MAX")
    return Beginning(int(shortest), int(longest))


def _run(args: argparse.Namespace) -> None:
    # not at the top of the file, because `dms-data --help` must start without torch
    import torch

    from dms_train.evaluation.devices import resolve_device
    from dms_train.hf.directory import resolve

    if args.workers is not None:
        torch.set_num_threads(args.workers)
    engine = replace(engine_options(args), device=resolve_device(args.device))
    model = resolve(args.model)
    prompts = _prompts(args, model)
    job = ContinuationJob(
        model=model,
        output=args.output,
        rows=_rows(args, prompts),
        prompts=prompts,
        sampling=_sampling(args),
        engine=engine,
        loss_on=LossOn(args.loss_on),
        append_eod=args.append_eod,
        only_finished=args.only_finished,
        terms=terms_of(args, _model_name(args.model)),
        evaluation_sets=tuple(args.evaluation_set),
        limit=args.limit,
        shard=args.shard,
        overwrite=args.overwrite,
    )
    speed = Speed()
    manifest = make_shard(job, speed)
    counted = ("rows", "continuations", "outcomes", "overlaps")
    report_shard(shard_prefix(job.output, job.shard), manifest, counted)
    if speed.tokens:
        print(speed.line("CPU" if engine.device == "cpu" else "GPU"))


def _prompts(args: argparse.Namespace, model: Path) -> PromptOptions:
    template = None if args.chat_template is None else read_text(args.chat_template)
    return PromptOptions(
        tokenizer=str(model),
        column=args.column,
        chat=args.chat,
        suffix=args.suffix,
        beginning=args.beginning and args.beginning._replace(seed=args.seed),
        answer_column=args.answer_column,
        chat_template=template,
        variables=tuple(args.template_variable),
    )


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=args.continuations,
        max_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )


def _model_name(model: str) -> str:
    """Return the name of a directory, or a hub id as it is."""
    return Path(model).absolute().name if Path(model).is_dir() else model


def _rows(args: argparse.Namespace, prompts: PromptOptions) -> Rows:
    if bool(args.inputs) == (args.unconditional is not None):
        raise DataError("prompts: give files, one hub id or --unconditional N")
    if args.unconditional is not None:
        if any((args.column, args.chat, args.suffix, args.beginning, args.answer_column)):
            raise DataError(
                "--unconditional: its prompts are empty; leave out --column, --chat, --suffix, "
                "--beginning and --answer-column"
            )
        return EmptyPrompts(args.unconditional)
    beginning = prompts.beginning
    if beginning is not None and (args.chat or args.suffix):
        raise DataError("--beginning: continues text as it is; leave out --chat and --suffix")
    text = LINES if beginning is None else passages(beginning.passage)
    answer = () if prompts.answer_column is None else (prompts.answer_column,)
    return open_rows(args.inputs, (*prompts.columns, *answer, *KEYS), hub_options(args), text)
