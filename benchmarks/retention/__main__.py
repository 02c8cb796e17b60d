"""cr_factor of an export against position, and the share of tokens that each KV head keeps.

    python -m benchmarks.retention EXPORT PROBLEMS.jsonl [--output outputs/retention]

The export continues the prompts of a problems file through the compact cache. After every pass the
engine reports what each sequence's cache holds; a sequence that has seen t tokens has the ratio
t / mean live slots there. The heatmap is the share kept when sequences end (paper Figure 6).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.measure import greedy
from dms_train.evaluation.problems import Sheet, read_problems
from dms_train.inference.heatmap import draw_heatmap
from dms_train.inference.llm import LLM

Curve = dict[int, list[float]]


def ratios(llm: LLM, sheets: list[Sheet], max_tokens: int) -> Curve:
    """cr_factor of every sequence, by the number of tokens it had seen."""
    params = [greedy(sheet, max_tokens) for sheet in sheets]
    found: Curve = defaultdict(list)
    for batch in llm.stream([sheet.prompt for sheet in sheets], params):
        for output in batch:
            if output.kv.tokens and output.kv.live_tokens:
                found[output.kv.tokens].append(output.kv.tokens / output.kv.live_tokens)
    return found


def draw_curve(curve: Curve, path: Path) -> None:
    """Median and the middle 80 % of the sequences at each position."""
    from matplotlib.figure import Figure

    positions = sorted(p for p, values in curve.items() if len(values) >= 10)
    deciles = [statistics.quantiles(curve[p], n=10) for p in positions]
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(positions, [d[0] for d in deciles], [d[-1] for d in deciles], alpha=0.25)
    axes.plot(positions, [d[4] for d in deciles])
    axes.set(xlabel="tokens seen", ylabel="cr_factor", ylim=(1, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _run(args: argparse.Namespace) -> None:
    sheets = read_problems(args.problems, args.max_problems)
    llm = LLM(args.export, max_num_seqs=len(sheets), prefill_chunk=16, device=args.device)
    curve = ratios(llm, sheets, args.max_tokens)
    total = llm.kv
    assert total is not None
    kept = 1.0 / total.cr_factors
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "retention_by_head.png"
    draw_heatmap(kept, path, "tokens kept", label="share", limits=(0.0, 1.0))
    draw_curve(curve, args.output / "cr_by_position.png")
    medians = {p: statistics.median(v) for p, v in sorted(curve.items()) if len(v) >= 10}
    record = {"median_cr_factor": medians, "kept": kept.tolist(), "sequences": len(sheets)}
    (args.output / "retention.json").write_text(json.dumps(record, indent=1) + "\n")
    for position in list(medians)[:: max(1, len(medians) // 8)]:
        print(f"{position:5d} tokens seen: cr_factor {medians[position]:.2f}")
    for layer, heads in enumerate(kept.tolist()):
        print(f"layer {layer}: kept " + " ".join(f"{share:.2f}" for share in heads))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", help="directory of a DMS export")
    parser.add_argument("problems", type=Path, help="of dms-data exam-problems")
    parser.add_argument("--max-problems", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/retention"))
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))


if __name__ == "__main__":
    sys.exit(main())
