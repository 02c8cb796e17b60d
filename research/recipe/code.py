"""Code as text to train on: Python's standard library.

    python -m research recipe-code code.jsonl [--folder /usr/lib/python3.13]

writes a document for each of its modules, without tests and tables of encodings. The library of the
running Python is the default. Its licence is PSF-2.0.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError

SOURCE, LICENCE = "Python's standard library", "PSF-2.0"
_SHORTEST = 200  # characters of a document: shorter modules only import others
_SKIPPED = frozenset(
    ("test", "tests", "idlelib", "encodings", "ensurepip", "site-packages", "dist-packages")
)


def modules(library: Path) -> list[str]:
    """Return the text of each module of a standard library, in the order of their paths.

    Args:
        library: Its folder.

    Raises:
        EvaluationError: The folder has no modules.
    """
    found = []
    for path in sorted(library.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(library).parts):
            text = path.read_text(encoding="utf-8")
            if len(text) >= _SHORTEST:
                found.append(text)
    if not found:
        raise EvaluationError(
            f"{library}: no modules of Python; name the folder of its standard library (--folder)"
        )
    return found


def _run(args: argparse.Namespace) -> int:
    lines = [json.dumps({"text": text}) + "\n" for text in modules(args.folder)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(lines), encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research recipe-code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help=".jsonl file to write")
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--folder", type=Path, default=library, help="library (%(default)s)")
    return run_main(lambda: _run(parser.parse_args(arguments)))
