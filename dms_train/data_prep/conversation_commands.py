"""The commands `dms-data openr1` and `dms-data chat`."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dms_train.data.errors import DataError
from dms_train.data.manifest import Manifest
from dms_train.data_prep import chat_rows, openr1
from dms_train.data_prep.arguments import add_terms, terms_of
from dms_train.data_prep.conversation_files import (
    Choice,
    ConversationJob,
    make_shard,
)
from dms_train.data_prep.conversations import ChatOptions, LossOn
from dms_train.data_prep.openr1 import Filter
from dms_train.data_prep.rows import HubOptions, Shard, open_rows
from dms_train.data_prep.shard_files import shard_prefix, verdicts_path
from dms_train.hf.gguf_directory import local_directory
from dms_train.hf.text_files import read_text

RESUMES = "run the same command to continue"
Commands = Any  # result of add_subparsers, whose class is private

_OPENR1 = """\
Make a shard of reasoning traces from rows in the schema of OpenR1-Math-220k. Each kept trace
becomes one document, rendered with the model's chat template and with its reasoning whole. The
same command continues an interrupted one. PREFIX.verdicts.jsonl records the outcome of every row.
"""
_CHAT = """\
Make a shard from conversations: rows with `messages`, or with `prompt` and `completion`. Each
becomes one document, rendered with the model's chat template. The same command continues an
interrupted one.
"""


def add_commands(
    commands: Commands, rows: argparse.ArgumentParser, shared: argparse.ArgumentParser
) -> None:
    """Add both commands to the parser of `dms-data`.

    Args:
        commands: Subcommands of `dms-data`.
        rows: Made by `row_arguments`.
        shared: Arguments of all commands with several processes.
    """
    common = _common(rows, shared)
    parser = commands.add_parser(
        "openr1",
        parents=[common],
        help="make a shard of verified reasoning traces",
        description=_OPENR1,
    )
    parser.add_argument(
        "--filter",
        choices=[rule.value for rule in Filter],
        default=Filter.FLAG.value,
        help="correct traces: by the data set's flag, verified again, or strict: both and complete "
        "(%(default)s)",
    )
    parser.add_argument("--traces", choices=("one", "all"), default="one", help="for each problem")
    parser.set_defaults(run=_run_openr1, interrupted=RESUMES)
    chat = commands.add_parser(
        "chat", parents=[common], help="make a shard of conversations", description=_CHAT
    )
    chat.add_argument("--messages-key", default="messages", help="column with the conversation")
    chat.set_defaults(run=_run_chat, interrupted=RESUMES)


def _common(
    rows: argparse.ArgumentParser, shared: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=[rows, shared])
    add = parser.add_argument
    add("inputs", nargs="+", help=".parquet, .jsonl, .json or .csv files, folders, or one hub id")
    add("--tokenizer", required=True, metavar="DIR", help="local Hugging Face directory")
    add("--min-tokens", type=int, default=1, help="leave shorter documents out")
    add("--max-tokens", type=int, help="leave longer documents out")
    return parser


def row_arguments() -> argparse.ArgumentParser:
    """Return a parser with the arguments of all commands that read rows."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="PREFIX")
    add_terms(parser)
    add(
        "--loss-on",
        choices=[choice.value for choice in LossOn],
        default=LossOn.ASSISTANT.value,
        help="tokens of the assistant or generated ones, or all tokens (%(default)s)",
    )
    add(
        "--evaluation-set",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="leave out problems that this file holds or shares 13 words with; may be repeated",
    )
    add("--append-eod", action="store_true", help="append eos_token to every document")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template in place of the model's")
    add(
        "--template-variable",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the template, such as 'date_string=23 July 2024'; may be repeated",
    )
    add("--shard", type=_shard, default=Shard(), metavar="I/N", help="every N-th row from row I on")
    add("--hub-config", metavar="NAME", help="configuration of a data set of the hub")
    add("--hub-split", default="train", metavar="NAME")
    add("--hub-revision", default="main", metavar="NAME", help="branch, tag or commit")
    add("--allow-network", action="store_true", help="stream a data set from the hub")
    return parser


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _shard(text: str) -> Shard:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")
    return Shard(int(match[1]), int(match[2]))


def _run_openr1(args: argparse.Namespace) -> None:
    rule = Filter(args.filter)
    job = ConversationJob(
        command="openr1",
        rows=_rows(args, (*openr1.COLUMNS, openr1.KEY)),
        sample_of=partial(openr1.sample_of, rule=rule),
        settings={"filter": rule.value},
        choice=_choice(args, every_trace=args.traces == "all"),
        verify=rule is not Filter.FLAG,
        **_job_arguments(args),
    )
    _report(job, make_shard(job))


def _run_chat(args: argparse.Namespace) -> None:
    job = ConversationJob(
        command="chat",
        rows=_rows(args, (args.messages_key, *chat_rows.PAIR, *chat_rows.KEYS)),
        sample_of=partial(chat_rows.sample_of, messages_key=args.messages_key),
        settings={"messages_key": args.messages_key},
        choice=_choice(args, every_trace=False),
        **_job_arguments(args),
    )
    _report(job, make_shard(job))


def _rows(args: argparse.Namespace, columns: tuple[str, ...]) -> Any:
    return open_rows(args.inputs, columns, hub_options(args))


def hub_options(args: argparse.Namespace) -> HubOptions:
    """Return the options of a hub data set from the arguments of `row_arguments`."""
    return HubOptions(
        config=args.hub_config,
        split=args.hub_split,
        revision=args.hub_revision,
        allow_network=args.allow_network,
    )


def _choice(args: argparse.Namespace, *, every_trace: bool) -> Choice:
    longest = args.max_tokens
    if args.min_tokens < 1 or (longest is not None and longest < args.min_tokens):
        raise DataError(
            f"no document has {args.min_tokens} to {longest} tokens; correct the limits"
        )
    return Choice(every_trace=every_trace, min_tokens=args.min_tokens, max_tokens=longest)


def _job_arguments(args: argparse.Namespace) -> dict[str, Any]:
    template = None if args.chat_template is None else read_text(args.chat_template)
    chat = ChatOptions(
        tokenizer=str(local_directory(args.tokenizer)),
        chat_template=template,
        variables=tuple(args.template_variable),
        loss_on=LossOn(args.loss_on),
        append_eod=args.append_eod,
    )
    return {
        "output": args.output,
        "chat": chat,
        "evaluation_sets": tuple(args.evaluation_set),
        "shard": args.shard,
        "terms": terms_of(args),
        "workers": args.workers,
        "overwrite": args.overwrite,
    }


def report_shard(prefix: Path, manifest: Manifest, counted: tuple[str, ...]) -> None:
    """Print the contents of a shard, and the reasons for leaving rows out.

    Args:
        prefix: Prefix of its files.
        manifest: Its manifest.
        counted: Groups of counts to print.
    """
    preparation = manifest.preparation
    assert preparation is not None
    print(
        f"{prefix}: {manifest.documents} documents, {manifest.tokens} tokens, "
        f"{preparation['loss_tokens']} in the loss, {manifest.dtype}"
    )
    for name in counted:
        if preparation[name]:
            print(
                f"{name}: "
                + ", ".join(f"{count} {why}" for why, count in preparation[name].items())
            )
    print(f"every row: {verdicts_path(prefix)}")


def _report(job: ConversationJob, manifest: Manifest) -> None:
    preparation = manifest.preparation
    assert preparation is not None
    report_shard(shard_prefix(job.output, job.shard), manifest, ("rows", "traces", "overlaps"))
    if preparation["traces"].get("timeout"):
        print("some answers could not be compared in time (timeout)", file=sys.stderr)
