"""`dms-verify DIR`: check that an export computes what the trained model computed.

Loads the export the way a user would, with the code that ships in it, and replays the reference
in `dms_selftest/`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dms_train.app.failures import message
from dms_train.hf.formats import read_format, read_spec

if TYPE_CHECKING:
    from dms_train.app.verification import Report

PASSED, MISMATCH, BAD_INPUT = 0, 1, 2


def _show(directory: Path, report: Report, window: int, dtype: str) -> None:
    rows = [
        ("check", "found", "limit"),
        ("largest decision-logit difference", f"{report.decision_difference:.4g}", ""),
        (
            "mean of it in the worst KV head",
            f"{report.head_drift:.4g}",
            f"{report.decision_tolerance:.4g}",
        ),
        ("hard decisions that differ", f"{report.decisions_flipped} of {report.decisions}", ""),
        ("largest logit difference", f"{report.logit_difference:.4g}", ""),
        (
            "KL(reference || export), nats/token",
            f"{report.kl_per_token:.4g}",
            f"{report.kl_tolerance:.4g}",
        ),
        ("top-1 agreement", f"{report.top1_agreement:.2%}", ""),
        (
            "KL(one pass || generate with a cache)",
            f"{report.generated_kl_per_token:.4g}",
            f"{report.kl_tolerance:.4g}",
        ),
    ]
    print(f"{directory} (format {read_format(directory)}), {report.tokens} tokens")
    for check, measured, limit in rows:
        print(f"  {check:<38}{measured:>18}{limit:>10}")
    if window and report.tokens <= window + 1:
        print(f"note: {report.tokens} tokens fit the window of {window}; nothing expired")
    print(_verdict(report, dtype))


def _verdict(report: Report, dtype: str) -> str:
    if report.passed:
        return "PASS"
    if not report.replayed:
        return "FAIL: the export is not the trained model"
    if dtype != "float32":
        return f"FAIL: generate() computes something else in {dtype}; try --dtype float32"
    return (
        "FAIL: the weights are right, but generate() computes something else with this version of "
        "transformers; export the model again, or take another version"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-verify",
        description="Replay the self-test in an export: load it as transformers would, compare "
        "decisions and logits with those of the trained Megatron model, and compute the end of "
        "the text again with generate() and its cache. The code in the export is run: use it on "
        "exports you trust.",
        epilog="Exit status: 0 passed, 1 mismatch, 2 bad input.",
    )
    parser.add_argument("directory", type=Path, help="export directory (holds dms_selftest/)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="compute dtype (%(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        from dms_train.app.verification import verify

        report = verify(arguments.directory, dtype=arguments.dtype, device=arguments.device)
        spec = read_spec(arguments.directory)
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"dms-verify: {message(error)}", file=sys.stderr)
        return BAD_INPUT
    _show(arguments.directory, report, spec.window if spec else 0, arguments.dtype)
    return PASSED if report.passed else MISMATCH


if __name__ == "__main__":
    sys.exit(main())
