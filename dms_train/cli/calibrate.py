"""Measure the queries of a model on a text, for the cache policy `triattention`.

The file holds the mean query of each head before RoPE. It belongs to one model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dms_train.cli.errors import run_main

if TYPE_CHECKING:
    from torch import Tensor

    from dms_train.inference.models.loader import LoadedModel

_EPILOG = """\
example:
  dms-calibrate MODEL MODEL/queries.safetensors --text corpus.txt
  dms-generate MODEL --policy triattention --budget 1024 \\
      --policy-option statistics=MODEL/queries.safetensors --prompt "..."
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-calibrate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="model directory or export, dense or retrofitted")
    add("output", type=Path, help="safetensors file to write")
    add("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to measure on")
    add("--max-tokens", type=int, default=65_536, help="tokens from its beginning on (%(default)s)")
    add("--seq-length", type=int, default=2_048, help="tokens of a sample (%(default)s)")
    add("--device", default="cpu", help="torch device (%(default)s)")
    return parser.parse_args(arguments)


def _samples(directory: Path, model: LoadedModel, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Return the tokens of the text in samples that the model can read."""
    import torch

    from dms_train.hf.text_files import read_text
    from dms_train.inference.errors import InferenceError
    from dms_train.inference.tokenizer import Tokenizer

    if min(args.max_tokens, args.seq_length) < 1:
        raise InferenceError("--max-tokens and --seq-length: use at least 1")
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise InferenceError(f"{directory}: has no tokenizer.json; copy the model's file to it")
    ids = tokenizer.encode(read_text(args.text), special=False)[: args.max_tokens]
    length = min(args.seq_length, model.architecture.max_position_embeddings)
    return torch.tensor(ids, dtype=torch.int64, device=args.device).split(length) if ids else ()


def _calibrate(args: argparse.Namespace) -> None:
    from dms_train.hf.directory import resolve
    from dms_train.inference.devices import require_device
    from dms_train.inference.models.loader import load_model
    from dms_train.inference.query_statistics import measure_queries

    require_device(args.device)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    directory = resolve(args.model)
    model = load_model(directory, device=args.device)
    samples = _samples(directory, model, args)
    measure_queries(model, samples).save(args.output)
    print(f"{args.output}: queries of {sum(map(len, samples)):,d} tokens")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    args = _parse(arguments)
    return run_main(lambda: _calibrate(args))


if __name__ == "__main__":
    sys.exit(main())
