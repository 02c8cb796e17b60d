"""Convert a Hugging Face model to a Megatron checkpoint that any layout can load.

A GGUF file of llama.cpp is dequantised to a Hugging Face directory instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.app import launcher
from dms_train.cli.errors import run_main
from dms_train.hf.errors import HFError
from dms_train.hf.gguf_directory import convert_gguf, is_gguf

_EPILOG = """\
example:
  dms-import model.gguf models/model
  dms-import MODEL checkpoints/model
  torchrun --nproc-per-node 8 -m dms_train.checkpoints_tools.hf_to_megatron \\
      MODEL checkpoints/model
  torchrun --nproc-per-node 8 -m dms_train parallel=tp8 model.path=MODEL \\
      run.load=checkpoints/model 'data.paths=[data/corpus]' run.dir=outputs/cr4

The second command divides the model among eight processes; the checkpoint fits any layout.
Training reads Hugging Face weights directly as well. A checkpoint is the faster start for large
models: every rank reads its own part of it.
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-import",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        help="Hugging Face directory or hub id, dense or a retrofitted export; or a GGUF file",
    )
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="of the weights (default: bf16, or fp32 if the model holds a matrix in 32 bits)",
    )
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument(
        "--download", action="store_true", help="allow network access to the hub (default: cache)"
    )
    return parser.parse_args(arguments)


def _import(args: argparse.Namespace) -> None:
    path = Path(args.model).expanduser()
    if is_gguf(path):
        if launcher.world_size() > 1:
            raise HFError(f"{path}: one process converts a GGUF file; start dms-import alone")
        print(f"{path}: {convert_gguf(path, args.out, dtype=args.dtype)}")
    else:
        launcher.hide_gpus()  # host memory holds larger models than one GPU
        from dms_train.app.conversion import import_model

        dtype = import_model(
            args.model,
            args.out,
            dtype=args.dtype,
            revision=args.revision,
            download=args.download,
        )
        if launcher.rank():
            return
        print(f"{args.model}: weights written as {dtype}")
    print(f"wrote {args.out}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 after one line."""
    args = _parse(arguments)
    return run_main(lambda: _import(args))


if __name__ == "__main__":
    sys.exit(main())
