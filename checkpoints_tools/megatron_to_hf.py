"""`dms-export`: a Megatron checkpoint of any layout into a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from checkpoints_tools.single_process import open_engine
from dms_train.cli.errors import run_main
from dms_train.cli.exporter import ModelExporter, check_format
from dms_train.cli.start_point import described_model
from dms_train.hf.directory import resolve
from dms_train.hf.export import check_replaceable
from dms_train.mcore import checkpoint
from dms_train.mcore.engine import McoreEngine
from dms_train.training.options import ExportOptions


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dms-export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder with run_state.json")
    parser.add_argument("out", type=Path, help="Hugging Face directory to write")
    parser.add_argument(
        "--tokenizer-from",
        help="model directory or hub id whose tokenizer files are carried over "
        "(default: the model the run started from, when it is still there)",
    )
    parser.add_argument("--format", choices=("dms", "nvidia", "fastdms"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--block-size", type=int, default=256, help="page size, nvidia format")
    parser.add_argument(
        "--selftest-tokens", type=int, help="length of the self-test (default: window + 128)"
    )
    return parser.parse_args(arguments)


def _tokens(engine: McoreEngine, wanted: int | None) -> torch.Tensor:
    """Random ids: a checkpoint alone has no text. They exercise every row all the same."""
    longest = engine.architecture.max_position_embeddings
    length = min(wanted or engine.spec.window + 128, longest)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.architecture.vocab_size, (length,), generator=generator)


def _tokenizer_dir(wanted: str | None, model: str | None) -> Path | None:
    if wanted is not None:
        return resolve(wanted)
    return Path(model) if model is not None and Path(model).is_dir() else None


def convert(args: argparse.Namespace) -> None:
    """Write the directory; errors as in `checkpoint.check` and `hf.export.write_export`."""
    state = checkpoint.check(args.checkpoint)
    architecture, spec = described_model(args.checkpoint, state)
    check_replaceable(args.out)
    tokenizer = _tokenizer_dir(args.tokenizer_from, state.get("model"))
    options = ExportOptions(
        format=args.format, dtype=args.dtype, paged_attention_block_size=args.block_size
    )
    if state["lane_borrowed"]:
        check_format(options, spec, architecture, args.dtype, float(state["target_cr"]))
    with open_engine(architecture, spec, args.dtype, None) as engine:
        engine.load(args.checkpoint, with_optimizer=False)
        exporter = ModelExporter(
            engine=engine,
            options=options,
            folder=args.out.parent,
            tokens=_tokens(engine, args.selftest_tokens),
            source_dir=tokenizer,
            params_dtype=args.dtype,
            provenance={key: state[key] for key in ("model", "versions") if key in state},
        )
        exporter.write_hf(args.out, state)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    args = _parse(arguments)

    def command() -> None:
        convert(args)
        print(f"wrote {args.out}")

    return run_main(command)


if __name__ == "__main__":
    sys.exit(main())
