"""Convert a dense Hugging Face model to grouped-query attention with fewer KV heads.

The key and value heads of each group become their mean; nothing else changes. The result is a
model directory like the original, which is trained before it is used (stage=pretrain).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dms_train.cli.errors import run_main

_EPILOG = """\
example:
  dms-gqa MODEL models/kv4 --kv-heads 4
  dms-train model.path=models/kv4 stage=pretrain stage.pretrain.min_lr_ratio=1 \\
      'data.paths=[data/corpus]' run.dir=outputs/kv4
  dms-train model.path=outputs/kv4/exports/final/hf 'data.paths=[data/corpus]' run.dir=outputs/cr4
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-gqa",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="dense Hugging Face directory or hub id")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--kv-heads", type=int, required=True, help="KV heads afterwards, a divisor of the present"
    )
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument(
        "--download", action="store_true", help="allow network access to the hub (default: cache)"
    )
    return parser.parse_args(arguments)


def _pool(args: argparse.Namespace) -> None:
    from dms_train.export.kv_pooling import pool_kv_heads

    pool_kv_heads(
        args.model, args.out, args.kv_heads, revision=args.revision, download=args.download
    )
    print(f"wrote {args.out}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 after one line."""
    args = _parse(arguments)
    return run_main(lambda: _pool(args))


if __name__ == "__main__":
    sys.exit(main())
