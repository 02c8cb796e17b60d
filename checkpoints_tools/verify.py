"""`dms-verify DIR`: does an exported model compute what the trained model computed?

Loads the export the way a user would, with the code that ships in it, and replays the reference
in `dms_selftest/`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dms_train.app.failures import message
from dms_train.hf.directory import WeightReader
from dms_train.hf.formats import read_format, read_spec
from dms_train.hf.selftest import SelfTest
from dms_train.method.losses import kl_teacher_student

PASSED, MISMATCH, BAD_INPUT = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a loaded export is from its reference.

    Attributes:
        tokens: Length T of the reference sequence.
        decisions: Number of decisions compared, layers * KV heads * T.
        decision_difference: Largest absolute decision-logit difference of one token.
        head_drift: Mean absolute decision-logit difference of the worst KV head. A misplaced row
            moves all decisions of a head; rounding in bfloat16 moves single ones.
        decisions_flipped: Hard decisions that differ.
        logit_difference: Largest absolute logit difference.
        kl_per_token: Mean KL(reference || export) in nats.
        top1_agreement: Share of positions with the same most likely token.
        decision_tolerance: Largest `head_drift` that passes.
        kl_tolerance: Largest `kl_per_token` that passes.
    """

    tokens: int
    decisions: int
    decision_difference: float
    head_drift: float
    decisions_flipped: int
    logit_difference: float
    kl_per_token: float
    top1_agreement: float
    decision_tolerance: float
    kl_tolerance: float

    @property
    def passed(self) -> bool:
        """Whether both tolerances hold; not-a-number fails."""
        settled = self.head_drift <= self.decision_tolerance
        return settled and self.kl_per_token <= self.kl_tolerance


def compare(reference: SelfTest, decision_logits: Tensor, logits: Tensor) -> Report:
    """Compare what an export computed with its reference.

    Args:
        reference: The shipped self-test.
        decision_logits: [layers, kv_heads, T].
        logits: [T, vocab].

    Raises:
        ValueError: If the shapes are not those of the reference.
    """
    ours = (decision_logits.shape, logits.shape)
    if ours != (reference.decision_logits.shape, reference.logits.shape):
        raise ValueError(
            f"the export's decisions {tuple(ours[0])} and logits {tuple(ours[1])} do not have the "
            "shapes of its self-test; it belongs to another model"
        )
    theirs, found = reference.logits.double(), logits.double()
    expected, decided = reference.decision_logits.double(), decision_logits.double()
    difference = (decided - expected).abs()
    return Report(
        tokens=logits.shape[0],
        decisions=decided.numel(),
        decision_difference=difference.max().item(),
        head_drift=difference.mean(-1).max().item(),
        decisions_flipped=int(((decided > 0) != (expected > 0)).sum()),
        logit_difference=(found - theirs).abs().max().item(),
        kl_per_token=kl_teacher_student(found, theirs).mean().item(),
        top1_agreement=(found.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        decision_tolerance=reference.decision_tolerance,
        kl_tolerance=reference.kl_tolerance,
    )


def verify(directory: str | Path, *, dtype: str | None = None, device: str = "cpu") -> Report:
    """Load an export with its own code and replay its self-test.

    Args:
        directory: The export.
        dtype: Compute dtype, or None for the one of the reference.
        device: Where to run.

    Raises:
        FileNotFoundError: If the directory, its weights or its self-test are absent.
        ValueError: If it is not a DMS export or a file is damaged.
    """
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    if read_spec(directory) is None:
        raise ValueError(f"{directory}: a dense model; there are no decisions to verify")
    reference = SelfTest.load(directory)
    WeightReader(directory)  # complains about damaged shards in one line
    model = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, local_files_only=True, dtype=dtype or reference.dtype
    )
    model = model.to(device).eval()
    input_ids = reference.input_ids[None].to(device)
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits[0].cpu()
    return compare(reference, model.dms_decision_logits(input_ids)[:, 0].cpu(), logits)


def _show(directory: Path, report: Report, window: int) -> None:
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
    ]
    print(f"{directory} (format {read_format(directory)}), {report.tokens} tokens")
    for check, found, limit in rows:
        print(f"  {check:<36}{found:>18}{limit:>10}")
    if report.tokens <= window + 1:
        print(f"note: {report.tokens} tokens fit the window of {window}; nothing expired")
    print("PASS" if report.passed else "FAIL: the export is not the trained model")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-verify",
        description="Replay the self-test in a DMS export: load it as transformers would, and "
        "compare decisions and logits with those of the trained Megatron model. The code "
        "in the export is run: use it on exports you trust.",
        epilog="Exit status: 0 passed, 1 mismatch, 2 bad input.",
    )
    parser.add_argument("directory", type=Path, help="export directory (holds dms_selftest/)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="compute dtype (default: the one the reference was computed in)",
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        report = verify(arguments.directory, dtype=arguments.dtype, device=arguments.device)
        spec = read_spec(arguments.directory)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"dms-verify: {message(error)}", file=sys.stderr)
        return BAD_INPUT
    _show(arguments.directory, report, spec.window if spec else 0)
    return PASSED if report.passed else MISMATCH


if __name__ == "__main__":
    sys.exit(main())
