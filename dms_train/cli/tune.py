"""`dms-tune`: measure the fastest tile sizes of the training attention on this GPU."""

from __future__ import annotations

import argparse
import sys

from dms_train.cli.errors import run_main
from dms_train.kernels.options import TUNED_FILE

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main() -> None:
    """Run the command; exit code 0, or 2 without a GPU."""
    sys.exit(run_main(lambda: _main(sys.argv[1:])))


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dms-tune",
        description="Measure tile sizes of the training attention on this GPU and store the "
        f"fastest of each head size in {TUNED_FILE}, which later runs read; "
        "delete the file to return to the defaults. Example: dms-tune 64 128",
    )
    parser.add_argument("head_sizes", nargs="+", type=int, metavar="HEAD_SIZE", help="such as 128")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for one head size (%(default)s)"
    )
    _tune(parser.parse_args(arguments))


def _tune(args: argparse.Namespace) -> None:
    import torch

    from dms_train.kernels import dispatch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dispatch.choose_train_attention("triton", device)
    from dms_train.kernels.train_attention import tuning

    def show(trial: tuning.Trial) -> None:
        print(f"  {trial.seconds * 1e3:8.3f} ms  {trial.plan.forward}  {trial.plan.backward}")

    dtype: torch.dtype = getattr(torch, DTYPES[args.dtype])
    for size in args.head_sizes:
        print(f"head size {size}, {args.dtype}:", flush=True)
        best = tuning.tune(dtype, size, device, seconds=args.seconds, note=show)
        print(f"fastest: {best.seconds * 1e3:.3f} ms, stored in {TUNED_FILE}", flush=True)


if __name__ == "__main__":
    main()
