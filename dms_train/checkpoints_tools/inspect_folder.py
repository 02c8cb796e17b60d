"""`dms-inspect PATH`: describe a folder or GGUF file from its metadata, without its weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dms_train.app.failures import message

BAD_INPUT = 2


def _rows(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested mappings to pairs (dotted key, text)."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            rows += _rows(value, f"{prefix}{key}.")
        else:
            text = f"{value:,}" if key in ("parameters", "bytes") else str(value)
            rows.append((f"{prefix}{key}", text))
    return rows


def _show(path: Path, facts: dict[str, Any]) -> None:
    rows = _rows(facts)
    width = max(len(key) for key, _ in rows) + 2
    print(path)
    for key, text in rows:
        print(f"  {key:<{width}}{text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-inspect",
        description="Print what a folder is: a Hugging Face model (dense or retrofitted), a "
        "Megatron checkpoint, a run or one export of a run; or a GGUF file. For an export, also "
        "format, compression ratio and constants of the method. Reads metadata only, no weights.",
        epilog="Exit status: 0, or 2 if the folder is damaged or unknown.",
    )
    parser.add_argument("path", type=Path, help="model, checkpoint or run folder, or a GGUF file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        from dms_train.app.inspection import describe

        facts = describe(arguments.path)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"dms-inspect: {message(error)}", file=sys.stderr)
        return BAD_INPUT
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(arguments.path, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
