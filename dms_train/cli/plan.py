"""Show what a run would do, without starting it; needs no GPU.

Prints the layout, the memory of every pipeline stage by kind, the operations and expected time of
a step, and duration and disk space of the whole run. Also prints the schedule at five steps of
every training stage. If a layout does not divide the model or does not fit --gpu, the command
suggests one that does and returns 2. Data need not be given.

With --trace it lists the collectives of a step instead, on the first and last pipeline stage. They
come from the real schedule, run as one rank of all with few layers and short samples.

With --inference it prints the operations, memory traffic and latency of a decoding step instead,
with the share of the KV cache. The model is that of the DMS paper (appendix G).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dms_train.app.inference_plan import inference_table
from dms_train.app.model import read_architecture
from dms_train.app.plan import advise, describe, ranked, with_student
from dms_train.cli.errors import run_main
from dms_train.planning.check import check
from dms_train.planning.gpus import GPUS, gpu

_INFERENCE_GPU = "h100"  # the paper's
_EPILOG = """\
examples:
  dms-plan experiment=llama32_1b model.path=MODEL
  dms-plan experiment=llama31_8b model.path=MODEL --world-size 16 --gpu h100 --list-layouts
  dms-plan model.path=MODEL --inference --gpu h100 --batch 1,256 --length 8192,32768 --cr 1,4,8
"""


def main() -> None:
    """Run the command; exit code 0, or 2 for a refused configuration."""
    sys.exit(run_main(lambda: _main(sys.argv[1:])))


def _main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from dms_train.cli.config_source import compose

    # a plan reads no data
    config = compose(options.overrides, options.config_dir, default_paths=["DATA"])
    world_size = options.world_size or max(1, config.parallel.ranks_per_copy)
    architecture = read_architecture(config.model)
    if options.gpu is not None:
        gpu(options.gpu)
        config = replace(config, cluster=replace(config.cluster, gpu=options.gpu))
    if options.list_layouts is not None:
        print("\n".join(ranked(config, architecture, world_size, options.list_layouts)))
        return 0
    if options.trace:
        check(config, world_size=world_size, architecture=architecture)
        from dms_train.app.collectives import trace_lines  # needs torch

        print("\n".join(trace_lines(config, architecture, world_size)))
        return 0
    if options.inference:
        known = gpu(options.gpu or _INFERENCE_GPU)
        print(inference_table(architecture, known, options.batch, options.length, options.cr))
        return 0
    advise(config, architecture, world_size)
    check(config, world_size=world_size, architecture=architecture)
    config, loaded_cr = with_student(config)
    print(describe(config, architecture, world_size, loaded_cr))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(1 <= ratio < float("inf") for ratio in ratios):
        raise argparse.ArgumentTypeError(f"{text}: give numbers from 1, separated by commas")
    return ratios


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-plan",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="overrides: group=option key=value")
    parser.add_argument(
        "--world-size", type=_count, help="number of processes (default: TP x PP x CP)"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"{', '.join(GPUS)}; refuses a run that does not fit"
    )
    parser.add_argument(
        "--list-layouts",
        type=_count,
        nargs="?",
        const=10,
        metavar="N",
        help="the fastest N layouts (default 10) that divide and fit, instead of the plan",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="every collective of a step with its bytes, from a small step in one process",
    )
    parser.add_argument("--config-dir", type=Path, help="folder with your own group files")
    add = parser.add_argument_group("inference").add_argument
    add("--inference", action="store_true", help="plan decoding instead of training")
    add("--batch", type=_counts, default=[1, 256], metavar="N,N", help="sequences (1,256)")
    add("--length", type=_counts, default=[8192], metavar="N,N", help="tokens of a sequence (8192)")
    add("--cr", type=_ratios, default=[1.0, 4.0, 8.0], metavar="X,X", help="ratios (1,4,8)")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    main()
