"""`dms-import`: a Hugging Face model into a Megatron checkpoint that any TP x PP can load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkpoints_tools.single_process import open_engine
from dms_train.cli.errors import run_main
from dms_train.cli.exporter import run_provenance
from dms_train.hf import formats
from dms_train.hf.directory import WeightReader, read_architecture, resolve
from dms_train.method.spec import PRESETS
from dms_train.training.state import TrainState


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-import",
        description=__doc__,
        epilog="Start a run from the result with: dms-train run.load=OUT model.path=MODEL ...",
    )
    parser.add_argument("model", help="Hugging Face directory or hub id, dense or a DMS export")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--download", action="store_true", help="allow asking the hub")
    return parser.parse_args(arguments)


def convert(model: str, out: Path, *, dtype: str, revision: str | None, download: bool) -> None:
    """Write the checkpoint `out`.

    Raises:
        FileExistsError: `out` exists.
        ValueError: The model is absent, damaged or not supported.
    """
    if out.exists():
        raise FileExistsError(17, "exists; choose another folder", str(out))
    directory = resolve(model, revision=revision, local_files_only=not download)
    architecture = read_architecture(directory)
    spec = formats.read_spec(directory)
    state = TrainState(lane_borrowed=spec is not None, target_cr=formats.read_target_cr(directory))
    source = WeightReader(directory)
    source.require(architecture)
    with open_engine(architecture, spec or PRESETS["dms"], dtype, source) as engine:
        engine.save_weights(out, {**state.to_dict(), **run_provenance(architecture, model)})


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    args = _parse(arguments)

    def command() -> None:
        convert(
            args.model,
            args.out,
            dtype=args.dtype,
            revision=args.revision,
            download=args.download,
        )
        print(f"wrote {args.out}")

    return run_main(command)


if __name__ == "__main__":
    sys.exit(main())
