"""`dms-compare`: what eviction costs, on text the model was not trained on.

Three rows against the original model: the DMS export, the original with nothing but its window
(every token evicted when it leaves), and the original itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints_tools.single_process import open_engine
from dms_train.cli.errors import run_main
from dms_train.data.batches import Batch, BatchSource
from dms_train.data.options import DataOptions
from dms_train.data.tokens import build_valid_samples
from dms_train.hf import formats
from dms_train.hf.architecture import Architecture, from_hf_config
from dms_train.hf.directory import WeightReader, read_config, resolve
from dms_train.hf.errors import HFError
from dms_train.mcore.engine import McoreEngine
from dms_train.method.plan import StepPlan, StepResult

_DENSE = StepPlan()
_WINDOW_ONLY = StepPlan(eviction="all")
_DMS = StepPlan(neuron_scale=0.0, eviction="hard")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dms-compare", description=__doc__)
    parser.add_argument("export", help="directory of a DMS export")
    parser.add_argument("--teacher", required=True, help="the original model (directory or hub id)")
    parser.add_argument("--data", required=True, help="PREFIX of .bin/.idx/.manifest.json files")
    parser.add_argument("--split", default="98,2,0", help="the run's data.split")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1234, help="the run's run.seed")
    parser.add_argument("--cache-dir", default="outputs/data_cache")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    return parser.parse_args(arguments)


def _batches(args: argparse.Namespace, architecture: Architecture) -> list[Batch]:
    """Samples of the validation split."""
    options = DataOptions(
        paths=(args.data,),
        split=args.split,
        seq_length=args.seq_length,
        micro_batch_size=1,
        global_batch_size=args.samples,
    )
    size = architecture.vocab_size
    valid = build_valid_samples(options, vocab_size=size, seed=args.seed, cache_dir=args.cache_dir)
    source = BatchSource(
        valid,
        micro_batch_size=1,
        global_batch_size=args.samples,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    return source.microbatches(0)


def _row(engine: McoreEngine, plan: StepPlan, batches: list[Batch]) -> dict[str, float]:
    kl: StepResult = engine.evaluate(plan, batches)
    lm = engine.evaluate(replace(plan, loss="lm"), batches)
    return {
        "kl_nats_per_token": kl.token_loss,
        "lm_nats_per_token": lm.token_loss,
        "evicted_fraction": kl.alpha,
        "cr_factor": kl.cr_factor,
        "kv_reads": kl.kv_reads,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The three rows, with what they were measured on."""
    export, teacher = resolve(args.export), resolve(args.teacher)
    spec = formats.read_spec(export)
    if spec is None:
        raise HFError(f"{export}: not a DMS export; give the folder of an export")
    architecture = from_hf_config(read_config(teacher))
    batches = _batches(args, architecture)
    with open_engine(architecture, spec, "fp32", WeightReader(export)) as engine:
        engine.attach_teacher(WeightReader(teacher))
        rows = {"dms": _row(engine, _DMS, batches)}
        engine.load_hf(WeightReader(teacher))
        rows["window_only"] = _row(engine, _WINDOW_ONLY, batches)
        rows["original"] = _row(engine, _DENSE, batches)
    measured = {"samples": args.samples, "seq_length": args.seq_length, "window": spec.window}
    return {**measured, "rows": rows}


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['samples']} held-out samples of {result['seq_length']} tokens, "
        f"window {result['window']}"
    )
    columns = list(result["rows"]["dms"])
    print(f"{'':12s}" + "".join(f"{name:>20s}" for name in columns))
    for name, row in result["rows"].items():
        print(f"{name:12s}" + "".join(f"{row[column]:20.4f}" for column in columns))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    args = _parse(arguments)

    def command() -> None:
        result = compare(args)
        _print(result)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    return run_main(command)


if __name__ == "__main__":
    sys.exit(main())
