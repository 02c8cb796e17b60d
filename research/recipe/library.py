"""Code as text to train on: Python's standard library.

    python -m research recipe-code code.jsonl [--folder /usr/lib/python3.13]

writes a document for each of its modules, without tests, IDLE, encodings and installed packages.
The library of the running Python is the default. Its licence is PSF-2.0.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError

SOURCE, LICENCE = f"Python {platform.python_version()}'s standard library", "PSF-2.0"
_SHORTEST = 200  # characters of a document: most shorter modules only mark a package
_SKIPPED = frozenset(
    ("test", "tests", "idlelib", "encodings", "ensurepip", "site-packages", "dist-packages")
)


def modules(library: Path) -> list[str]:
    """Return the text of each module of a standard library, in the order of their paths.

    Args:
        library: Its folder.

    Raises:
        EvaluationError: The folder has no modules, or one is not UTF-8.
    """
    paths = sorted(library.rglob("*.py"))
    kept = [path for path in paths if _SKIPPED.isdisjoint(path.relative_to(library).parts)]
    texts = [text for path in kept if len(text := _text(path)) >= _SHORTEST]
    if not texts:
        raise EvaluationError(
            f"{library}: no modules of Python; name the folder of its standard library (--folder)"
        )
    return texts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise EvaluationError(
            f"{path}: not UTF-8; name the folder of a standard library (--folder)"
        ) from None


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
