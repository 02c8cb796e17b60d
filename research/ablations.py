"""Evaluate the exports of the `ablation_*` experiments; print tables and draw figures.

    python -m research ablations solve FOLDER --problems PROBLEMS.jsonl
    python -m research ablations report FOLDER [--output outputs/ablations]

`solve` answers exam problems with every export below a folder and writes `accuracy.json` into its
run folder. Decoding is greedy through the export's hard-masked forward pass, whole sheets at a
time. The inference tests show that the compact cache gives the same tokens.

`report` prints one table for each ablation and draws accuracy against the compression ratio and
against training tokens.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.cli.errors import run_main
from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.problems import count_correct, greedy_params, prompt_text, read_problems
from dms_train.evaluation.tasks.base import Document
from dms_train.hf.tokenizer_files import read_chat_tokenizer
from dms_train.inference.texts import until
from dms_train.tables import markdown_table

_EXPORT = Path("exports") / "final" / "hf"
_RESULT = "accuracy.json"


def greedy(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Continue token lists greedily; every step recomputes the whole sequence.

    Rows are padded on the right, because later tokens do not affect earlier ones.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()) + max_tokens, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    rows = torch.arange(len(prompts), device=device)
    with torch.no_grad():
        for step in range(max_tokens):
            width = int(lengths.max()) + step
            logits: Tensor = model(tokens[:, :width], use_cache=False).logits
            tokens[rows, lengths + step] = logits[rows, lengths + step - 1].argmax(-1)
    ends = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [row[length : length + max_tokens] for row, length in ends]


def solve_run(run: Path, sheets: list[Document], max_tokens: int, device: str) -> dict[str, Any]:
    """Solve sheets with a run's final export; return the hits and its last evaluation."""
    from transformers import AutoModelForCausalLM

    export = run / _EXPORT
    tokenizer = read_chat_tokenizer(export)
    model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True).to(device).eval()
    prompts = [tokenizer.encode(prompt_text(sheet), add_special_tokens=False) for sheet in sheets]
    texts = [tokenizer.decode(ids) for ids in greedy(model, prompts, max_tokens)]
    stops = [greedy_params(sheet, max_tokens).stop for sheet in sheets]
    texts = [until(text, stop) for text, stop in zip(texts, stops, strict=True)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    valid = [row for row in rows if "eval/cr" in row][-1]
    return {
        "hits": count_correct(sheets, texts),
        "problems": [len(sheet.gold) for sheet in sheets],
        "kl": valid["eval/kl"],
        "cr_factor": valid["eval/cr"],
        "train_tokens": valid["tokens"],
    }


def _solve(args: argparse.Namespace) -> None:
    sheets = read_problems(args.problems, args.max_problems)
    runs = sorted(path.parents[2] for path in args.folder.glob(f"**/{_EXPORT}"))
    if not runs:
        raise EvaluationError(f"{args.folder}: no finished runs; make some with dms-train -m")
    mine = runs[args.part :: args.parts]
    for run in mine:
        if not (run / _RESULT).is_file():
            result = solve_run(run, sheets, args.max_tokens, args.device)
            (run / _RESULT).write_text(json.dumps(result) + "\n")
            print(f"{run}: {_accuracy([result])}", flush=True)


Results = dict[str, list[dict[str, Any]]]


def _accuracy(results: list[dict[str, Any]]) -> Estimate:
    """Estimate accuracy over sheets; resampling draws a sheet together with all of its seeds."""
    hits = [sum(column) for column in zip(*(f["hits"] for f in results), strict=True)]
    problems = [sum(column) for column in zip(*(f["problems"] for f in results), strict=True)]
    return ratio([float(h) for h in hits], [float(p) for p in problems])


def _results(folder: Path) -> dict[str, Results]:
    """Read results by ablation and setting; the last folder of a run is its seed."""
    results: dict[str, Results] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob(f"*/**/{_RESULT}")):
        ablation, *settings, _ = path.parent.relative_to(folder).parts
        results[ablation][" ".join(settings) or "-"].append(json.loads(path.read_text()))
    if not results:
        raise EvaluationError(f"{folder}: no {_RESULT} in any run; use `solve` first")
    return results


def table(name: str, results: Results) -> str:
    """Return one ablation as Markdown: means over seeds, and the range of the seeds' accuracy."""
    titles = ["seeds", "accuracy [95 % interval]", "least to most", "KL", "cr_factor", "tokens"]
    rows = []
    for setting, runs in results.items():
        each = [_accuracy([run]).value for run in runs]
        kl, cr, tokens = (
            sum(run[key] for run in runs) / len(runs) for key in ("kl", "cr_factor", "train_tokens")
        )
        spread = f"{min(each):.3f} to {max(each):.3f}"
        means = f"{kl:.4f}", f"{cr:.2f}", f"{tokens / 1e6:.2f} M"
        rows.append([setting, len(runs), _accuracy(runs), spread, *means])
    return markdown_table([name, *titles], rows)


def draw(curves: dict[str, Results], axis: Callable[[dict[str, Any]], float], where: Path) -> None:
    """Draw the accuracy of each curve's settings against `axis`, with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, results in curves.items():
        points = []
        for runs in results.values():
            a = _accuracy(runs)
            where_on_axis = sum(axis(run) for run in runs) / len(runs)
            points.append((where_on_axis, a.value, a.value - a.low, a.high - a.value))
        x, y, below, above = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=(below, above), marker="o", capsize=3, label=label)
    axes.set(ylabel="problems solved", ylim=(0, 1.02))
    axes.set_xlabel("cr_factor" if where.stem.endswith("cr") else "training tokens, millions")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(where, dpi=130)


def _report(args: argparse.Namespace) -> None:
    by_ablation = _results(args.folder)
    for name, results in by_ablation.items():
        print(f"\n{table(name, results)}")
    args.output.mkdir(parents=True, exist_ok=True)
    if "eviction" in by_ablation:
        curves = {
            kind: {k: v for k, v in by_ablation["eviction"].items() if k.split()[0] == kind}
            for kind in ("delayed", "immediate")
        }
        best = {kind: best_rate(results) for kind, results in curves.items() if results}
        draw(best, lambda run: run["cr_factor"], args.output / "ablation_cr.png")
    if "steps_per_cr" in by_ablation:
        curves = {"delayed, CR 4": by_ablation["steps_per_cr"]}
        draw(curves, lambda run: run["train_tokens"] / 1e6, args.output / "ablation_tokens.png")


def best_rate(results: Results) -> Results:
    """Return, for each ratio of settings `eviction ratio rate`, the rate with the best accuracy."""
    best: Results = {}
    for setting, runs in results.items():
        ratio_name = setting.split()[1]
        if ratio_name not in best or _accuracy(runs).value > _accuracy(best[ratio_name]).value:
            best[ratio_name] = runs
    return best


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    solve = commands.add_parser("solve", help="answer problems with every export")
    solve.add_argument("folder", type=Path, help="runs lie somewhere below it")
    solve.add_argument("--problems", type=Path, required=True, help="of dms-data exam-problems")
    solve.add_argument("--max-problems", type=int, default=400)
    solve.add_argument("--max-tokens", type=int, default=240)
    solve.add_argument("--device", default="cpu")
    solve.add_argument("--part", type=int, default=0, help="which of --parts this process takes")
    solve.add_argument("--parts", type=int, default=1)
    solve.set_defaults(run=_solve)
    report = commands.add_parser("report", help="print tables, draw figures")
    report.add_argument("folder", type=Path)
    report.add_argument("--output", type=Path, default=Path("outputs/ablations"))
    report.set_defaults(run=_report)
    args = parser.parse_args(arguments)
    return run_main(lambda: args.run(args))
