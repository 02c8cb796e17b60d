r"""Needles in prompts of several lengths, in one process.

    python -m research recipe-needles FOLDER --contexts 1024,2048 model.path=EXPORT \
        task.haystack=essays.txt

does what `dms-eval task.name=niah task.context_length=N run.dir=FOLDER/N` does for each length N.
One process imports everything once and compiles each kernel once. The same command continues.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from dms_train.cli import evaluate
from research.lab.arguments import count, list_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research recipe-needles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("--contexts", type=list_of(count), required=True, help="tokens of a prompt")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of dms-eval")
    args = parser.parse_intermixed_args(arguments)
    for context in args.contexts:
        folder = args.folder / str(context)
        words = ["task.name=niah", f"task.context_length={context}", f"run.dir={folder}"]
        if code := evaluate.main([*args.overrides, *words]):
            return code
        gc.collect()  # the engine is part of reference cycles and holds the GPU's memory
    return 0
