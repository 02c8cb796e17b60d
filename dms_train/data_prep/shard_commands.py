"""The commands `dms-data mix`, `dms-data show` and `dms-data packing`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from dms_train.data import packing
from dms_train.data.errors import DataError
from dms_train.data.reader import ShardReader
from dms_train.data_prep.mix import Part, mix_shards
from dms_train.data_prep.show import show_documents

Commands = Any  # result of add_subparsers, whose class is private

_MIX = """\
Blend shards into one, shuffled, and without repeating a document. PREFIX=WEIGHT gives the share of
the tokens; the blend ends when one shard is used up. Without weights it holds all documents.
"""
_SHOW = """\
Print documents as text. What the loss counts is green and the rest grey; without a terminal it
stands in double brackets instead.
"""
_PACKING = """\
Show how the documents of shards fill sequences with data.packing=true, before a training: its
padding, and documents that are cut because they are longer than a sequence.
"""
_MEASURED = 100  # fewest sequences, so that an unfinished one has little weight


def add_commands(commands: Commands) -> None:
    """Add the commands to the parser of `dms-data`."""
    mix = commands.add_parser("mix", help="blend shards by weight", description=_MIX)
    add = mix.add_argument
    add("parts", nargs="+", type=_part, metavar="PREFIX[=WEIGHT]")
    add("--output", type=Path, required=True, metavar="PREFIX")
    add("--seed", type=int, default=0, help="seed of the document order")
    add("--overwrite", action="store_true", help="replace existing output")
    mix.set_defaults(run=_run_mix)
    show = commands.add_parser(
        "show", help="print documents with their loss mask", description=_SHOW
    )
    add = show.add_argument
    add("prefix", type=Path, help="PREFIX of PREFIX.bin")
    add("--tokenizer", required=True, metavar="DIR", help="tokenizer of the shard")
    add("--first", type=_natural, default=0, metavar="N", help="number of the first document")
    add("--documents", type=_natural, default=3, metavar="N", help="number to show (%(default)s)")
    show.set_defaults(run=_run_show)
    packed = commands.add_parser(
        "packing", help="show how documents fill sequences", description=_PACKING
    )
    add = packed.add_argument
    add("prefixes", nargs="+", type=Path, metavar="PREFIX")
    add("--seq-length", type=_positive, required=True, metavar="N", help="data.seq_length")
    add("--seed", type=_natural, default=1234, help="run.seed (%(default)s)")
    packed.set_defaults(run=_run_packing)


def _part(text: str) -> Part:
    prefix, equals, weight = text.rpartition("=")
    if not equals:
        return Part(prefix=Path(text), weight=None)
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: the weight is not a number above 0")
    return Part(prefix=Path(prefix), weight=value)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if _natural(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _run_packing(args: argparse.Namespace) -> None:
    for prefix in args.prefixes:
        print(_packing_line(prefix, args.seq_length, args.seed))


def _packing_line(prefix: Path, seq_length: int, seed: int) -> str:
    lengths = ShardReader(prefix).lengths
    pieces = packing.cut(lengths, seq_length)
    if not len(pieces.positions):
        raise DataError(f"{prefix}: every document is a single token; there is nothing to predict")
    made = packing.pack(pieces.positions, seq_length, seed=seed, count=_MEASURED)
    filled = int(pieces.positions[made.pieces].sum())
    padding = 1 - filled / (len(made) * seq_length)
    epochs = filled / int(pieces.positions.sum())
    return (
        f"{prefix}: {len(lengths)} documents, {(lengths - 1 > seq_length).sum()} of them cut, "
        f"{(lengths < 2).sum()} left out; {len(made)} sequences of {seq_length} in {epochs:.1f} "
        f"epochs, {padding:.2%} padding"
    )


def _run_mix(args: argparse.Namespace) -> None:
    made = mix_shards(args.parts, args.output, seed=args.seed, overwrite=args.overwrite)
    print(f"{args.output}: {made.documents} documents, {made.tokens} tokens, {made.dtype}")
    for source in made.sources:
        print(f"{source.rows} documents of {source.name}")
    for origin in made.origins:
        share = origin.tokens / made.tokens
        print(f"{share:.1%} of the tokens: source {origin.source}, licence {origin.license}")


def _run_show(args: argparse.Namespace) -> None:
    lines = show_documents(
        args.prefix,
        args.tokenizer,
        first=args.first,
        count=args.documents,
        colour=sys.stdout.isatty(),
    )
    for line in lines:
        print(line)
