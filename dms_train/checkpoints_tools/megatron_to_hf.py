"""Convert a Megatron checkpoint of any layout to a Hugging Face directory.

Works on the checkpoints of a run (RUN/checkpoints/step_*) and on its Megatron exports. The result
holds weights, tokenizer, the code that transformers runs, and a self-test for dms-verify.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.hf.formats import FORMATS
from dms_train.training.options import ExportOptions

_EPILOG = """\
example:
  dms-export outputs/cr4/checkpoints/step_00001000 exports/step1000
  dms-verify exports/step1000
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-export",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder with run_state.json")
    parser.add_argument("out", type=Path, help="directory to write; replaces an export only")
    parser.add_argument(
        "--tokenizer-from",
        metavar="MODEL",
        help="model directory or hub id whose tokenizer files are carried over "
        "(default: the model the run started from, when it is still there)",
    )
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help="who loads it: transformers, NVIDIA's code, FastDMS, or PEFT beside the base model "
        "(default: as trained)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (%(default)s)"
    )
    parser.add_argument(
        "--block-size", type=int, default=256, help="page size, format nvidia (%(default)s)"
    )
    parser.add_argument(
        "--selftest-tokens", type=int, help="length of the self-test (default: window + 128)"
    )
    parser.add_argument(
        "--push-to-hub", metavar="REPO_ID", help="then upload it to this repository of the hub"
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private if it is created"
    )
    return parser.parse_args(arguments)


def _export(args: argparse.Namespace) -> None:
    from dms_train.app.conversion import export_checkpoint
    from dms_train.export.hub import check_upload, push

    if args.push_to_hub is not None:
        check_upload(args.push_to_hub)
    export_checkpoint(
        args.checkpoint,
        args.out,
        ExportOptions(
            format=args.format, dtype=args.dtype, paged_attention_block_size=args.block_size
        ),
        tokenizer_from=args.tokenizer_from,
        selftest_tokens=args.selftest_tokens,
    )
    print(f"wrote {args.out}")
    if args.push_to_hub is not None:
        print(f"uploaded to {push(args.out, args.push_to_hub, private=args.private)}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 after one line."""
    args = _parse(arguments)
    return run_main(lambda: _export(args))


if __name__ == "__main__":
    sys.exit(main())
