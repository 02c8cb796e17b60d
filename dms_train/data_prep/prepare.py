"""Make and check token files for training.

A shard consists of PREFIX.bin and PREFIX.idx (megatron-core's format) and PREFIX.manifest.json,
which records the tokenizer and checksums. data.paths of a run names the prefixes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from dms_train.app.failures import REFUSED, is_expected, message
from dms_train.cli.known_warnings import hide_known_warnings
from dms_train.data.errors import DataError
from dms_train.data.manifest import (
    Manifest,
    Source,
    check_bin_hash,
    check_shard,
    file_sha256,
    read_manifest,
)
from dms_train.data.origins import UNKNOWN_TERMS, Terms
from dms_train.data.writer import ShardWriter
from dms_train.data_prep import (
    conversation_commands,
    generate_command,
    shard_commands,
)
from dms_train.data_prep.arguments import add_terms, count, terms_of
from dms_train.data_prep.documents import (
    BLANK_LINE,
    DOCUMENT_TYPES,
    EVERY_LINE,
    WHOLE_FILE,
    Document,
    InputRule,
    files_below,
    read_documents,
)
from dms_train.data_prep.encode import DocumentEncoder, EncoderOptions, encode_in_order
from dms_train.data_prep.exam_files import SheetText, write_problems, write_sheets
from dms_train.data_prep.exam_sheets import held_out_problems
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.data_prep.progress import progress_bar
from dms_train.data_prep.token_arrays import ArrayJob, write_arrays
from dms_train.hf.gguf_directory import local_directory
from dms_train.hf.text_files import read_text

_EPILOG = """\
examples:
  dms-data tokenize --tokenizer MODEL --append-eod --output data/corpus corpus.jsonl
  dms-data tokenize --tokenizer MODEL --append-eod --output data/books --workers 4 \\
      --source https://openstax.org --license CC-BY-4.0 textbooks/
  dms-data openr1 --tokenizer MODEL --output data/openr1 --workers 8 openr1/*.parquet
  dms-data check data/corpus

`dms-data COMMAND --help` explains a command.
"""
_TOKENIZE = (
    "Make a shard from text. Special tokens that are written out in the text become those tokens."
)
_ARRAYS = """\
Make a shard from token ids. A .npy file has one document a row; a .npz file has `ids` of all
documents, one after the other, and their `lengths`, or `offsets` with the end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """One shard to make.

    Attributes:
        inputs: Files, read in this order.
        output: Prefix of the files to write.
        rule: Rule that divides the inputs into documents.
        encoder: Options of the conversion to tokens.
        workers: Number of tokenising processes.
        limit: Largest number of documents; None takes all.
        terms: Source and licence of the text.
        overwrite: Replace an existing shard.
    """

    inputs: tuple[Path, ...]
    output: Path
    rule: InputRule
    encoder: EncoderOptions
    workers: int = 1
    limit: int | None = None
    terms: Terms = UNKNOWN_TERMS
    overwrite: bool = False


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 for a refused input or a wrong command line."""
    args = _parser().parse_args(argv)
    hide_known_warnings()
    try:
        args.run(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if not is_expected(error):
            raise
        print(f"dms-data: {message(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"dms-data: interrupted; {args.interrupted}", file=sys.stderr)
        return 130
    return 0


def tokenize_files(job: TokenizeJob) -> Manifest:
    """Make one shard, showing progress on stderr.

    Raises:
        DataError: An input is unfit, there are no documents, or the output cannot be written.
    """
    encoder = DocumentEncoder(job.encoder)
    rows: Counter[Path] = Counter()
    total = sum(path.stat().st_size for path in job.inputs)
    writer = ShardWriter(
        job.output,
        vocab_size=encoder.vocab_size,
        eod_id=encoder.eod_id,
        tokenizer_sha256=file_sha256(Path(job.encoder.tokenizer) / "tokenizer.json"),
        overwrite=job.overwrite,
    )
    with writer, progress_bar(total) as advance:
        documents = islice(_documents(job, rows), job.limit)
        make = partial(DocumentEncoder, job.encoder)
        for encoded in encode_in_order(documents, encoder, make, job.workers):
            for ids in encoded.documents:
                writer.add(ids)
            advance(encoded.size, f"{sum(rows.values())} documents")
        return writer.finish(
            tuple(Source(name=p.name, sha256=file_sha256(p), rows=rows[p]) for p in job.inputs),
            origins=job.terms,
        )


def _documents(job: TokenizeJob, rows: Counter[Path]) -> Iterator[Document]:
    for path in job.inputs:
        for document in read_documents(path, job.rule):
            rows[path] += 1
            yield document


def _run_tokenize(args: argparse.Namespace) -> None:
    template = None if args.chat_template is None else read_text(args.chat_template)
    job = TokenizeJob(
        inputs=tuple(files_below(args.inputs, DOCUMENT_TYPES)),
        output=args.output,
        rule=InputRule(
            text_split=args.text_split,
            passage=args.passages,
            text_key=args.text_key,
            messages_key=args.messages_key,
        ),
        encoder=EncoderOptions(
            tokenizer=str(local_directory(args.tokenizer)),
            append_eod=args.append_eod or args.eod_token is not None,
            eod_token=args.eod_token,
            add_bos=args.add_bos,
            chat_template=template,
        ),
        workers=args.workers,
        limit=args.limit,
        terms=terms_of(args),
        overwrite=args.overwrite,
    )
    _report(args.output, tokenize_files(job))


def _run_arrays(args: argparse.Namespace) -> None:
    job = ArrayJob(
        inputs=tuple(args.inputs),
        output=args.output,
        tokenizer=local_directory(args.tokenizer),
        eod_id=args.eod_id,
        terms=terms_of(args),
        overwrite=args.overwrite,
    )
    _report(args.output, write_arrays(job), hint=False)


def _run_check(args: argparse.Namespace) -> None:
    manifest = read_manifest(args.prefix)
    check_shard(args.prefix, manifest)
    check_bin_hash(args.prefix, manifest)
    _report(args.prefix, manifest)


def _run_exam_sheets(args: argparse.Namespace) -> None:
    if args.n_min > args.n_max:
        raise DataError(f"--n-min {args.n_min} is above --n-max {args.n_max}")
    tokenizer, sheets = args.out / "tokenizer", args.out / "sheets.jsonl"
    if sheets.exists() and not args.overwrite:
        raise DataError(f"{sheets}: exists already; pass --overwrite to replace it")
    write_exam_tokenizer(tokenizer)
    text = SheetText(
        documents=args.sheets,
        n_range=(args.n_min, args.n_max),
        document_tokens=args.document_tokens,
        seed=args.seed,
    )
    write_sheets(sheets, text)
    # documents of a given length already hold their end-of-document tokens
    whole = args.document_tokens is None
    job = TokenizeJob(
        inputs=(sheets,),
        output=args.out / "train",
        rule=InputRule(),
        encoder=EncoderOptions(tokenizer=str(tokenizer), append_eod=whole),
        workers=args.workers,
        overwrite=args.overwrite,
    )
    _report(job.output, tokenize_files(job), hint=whole)


def _run_exam_problems(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.overwrite:
        raise DataError(f"{args.out}: exists already; pass --overwrite to replace it")
    write_problems(args.out, held_out_problems(args.sheets, args.n, args.seed))
    print(f"{args.out}: {args.sheets} sheets of {args.n} questions")


def _report(prefix: Path, manifest: Manifest, *, hint: bool = True) -> None:
    print(f"{prefix}: {manifest.documents} documents, {manifest.tokens} tokens, {manifest.dtype}")
    if hint and manifest.eod_id is None and manifest.preparation is None:
        print("documents do not end in an end-of-document token; --append-eod adds one")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-data",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(interrupted="nothing was written")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--workers", type=count, default=1, help="processes (%(default)s)")
    shared.add_argument("--overwrite", action="store_true", help="replace existing output")
    _add_tokenize(commands, shared)
    _add_arrays(commands)
    check = commands.add_parser(
        "check",
        help="verify every byte of a shard",
        description="Compare a shard with the checksums of its manifest, every byte of it.",
    )
    check.add_argument("prefix", type=Path, help="PREFIX of PREFIX.bin")
    check.set_defaults(run=_run_check)
    rows = conversation_commands.row_arguments()
    conversation_commands.add_commands(commands, rows, shared)
    generate_command.add_command(commands, rows)
    shard_commands.add_commands(commands)
    _add_exams(commands, shared)
    return parser


def _add_exams(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    sheets = commands.add_parser("exam-sheets", parents=[shared], help="make the demo's text")
    add = sheets.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add("--sheets", type=count, required=True, help="documents to write")
    add("--document-tokens", type=count, help="fill documents of this length with sheets")
    add("--seed", type=int, default=0)
    add("--n-min", type=count, default=1, help="fewest questions on a sheet")
    add("--n-max", type=count, default=3, help="most questions on a sheet")
    sheets.set_defaults(run=_run_exam_sheets)
    problems = commands.add_parser(
        "exam-problems", help="make questions with answers that no training sheet holds"
    )
    add = problems.add_argument
    add("--out", type=Path, required=True, help=".jsonl file to write")
    add("--sheets", type=count, required=True)
    add("--n", type=count, default=2, help="questions on a sheet")
    add("--seed", type=int, default=1)
    add("--overwrite", action="store_true", help="replace existing output")
    problems.set_defaults(run=_run_exam_problems)


def _add_tokenize(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "tokenize", parents=[shared], help="make a shard from text", description=_TOKENIZE
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        type=Path,
        help=f"{', '.join(DOCUMENT_TYPES)} files, or folders, of which all such files are read",
    )
    add("--output", type=Path, required=True, metavar="PREFIX")
    add_terms(parser)
    add("--tokenizer", required=True, metavar="DIR", help="local Hugging Face directory")
    add("--append-eod", action="store_true", help="end documents in the end-of-document token")
    add("--eod-token", help="that token; default eos_token; implies --append-eod")
    add("--add-bos", action="store_true", help="begin documents with bos_token")
    add("--limit", type=count, help="stop after this many documents")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template for conversations")
    field = parser.add_mutually_exclusive_group()
    field.add_argument("--text-key", default="text", help=".jsonl field with the text")
    field.add_argument("--messages-key", help=".jsonl field with a conversation")
    split = parser.add_mutually_exclusive_group()
    rules = {"--split-on-blank-line": BLANK_LINE, "--document-per-line": EVERY_LINE}
    for flag, rule in rules.items():
        split.add_argument(flag, dest="text_split", action="store_const", const=rule)
    split.add_argument(
        "--passages",
        type=count,
        metavar="N",
        help="cut text files at line ends into documents of at least N characters",
    )
    parser.set_defaults(run=_run_tokenize, text_split=WHOLE_FILE)


def _add_arrays(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "arrays", help="make a shard from token ids in NumPy files", description=_ARRAYS
    )
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, help=".npy or .npz files")
    add("--output", type=Path, required=True, metavar="PREFIX")
    add_terms(parser)
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="that the ids belong to")
    add("--eod-id", type=int, help="token that ends every document, which is checked")
    add("--overwrite", action="store_true", help="replace existing output")
    parser.set_defaults(run=_run_arrays)


if __name__ == "__main__":
    sys.exit(main())
