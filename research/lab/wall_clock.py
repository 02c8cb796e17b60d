"""Measure accuracy against seconds, with the same bytes of cache for every model.

    python -m research lab-wall-clock outputs/lab/s --models teacher,cr4,cr8 --cache-mb 128

takes the models of a finished lab: the teacher and exports of the first seed. Each gets a cache of
this size, in which as many chains run as fit. It answers the same problems at each budget: tokens
of a chain in units of 1,024, and chains of a problem. The median time of the repetitions and the
accuracy over all of them are printed and written into the folder of the device.

    python -m research lab-wall-clock --table wall_clock.json --figure wall_clock.svg

prints a stored record and draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import origin, show
from benchmarks.timing import device_name, versions
from dms_train.cli.config_source import compose_evaluation
from dms_train.cli.errors import run_main
from dms_train.evaluation.analysis.charts import color
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.budgets import length_in_tokens
from dms_train.evaluation.scaling.run import CheckedRun, check
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import scorer as find_scorer
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.tables import markdown_table
from research.folders import RESULTS
from research.lab.arguments import count, list_of, picture, seed
from research.lab.steps import HF

_WARM_UP_TOKENS = 64
_MEBIBYTE = 2**20
_TITLES = ("model", "length-width", "solved", "seconds (least to most)", "tokens/s")


def model_path(folder: Path, name: str, seed: int) -> Path:
    """Return the model directory of `teacher`, or of a retrofit such as `cr8`."""
    return folder / ("teacher" if name == "teacher" else f"retrofit/seed{seed}/{name}") / HF


def measure(checked: CheckedRun, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all budgets of one model, with one engine.

    Raises:
        EvaluationError: A chain does not fit.
    """
    llm = LLM(
        checked.directory,
        device=resolve_device(args.device),
        cache_bytes=args.cache_mb * _MEBIBYTE,
        max_num_seqs=args.rows,
    )
    llm.engine.capture()
    warm_up = SamplingParams(
        temperature=_temperature(checked), max_tokens=_WARM_UP_TOKENS, ignore_eos=True
    )
    llm.generate(checked.prompts, warm_up)
    budgets = [_budget(llm, checked, *budget, repeats=args.repeats) for budget in args.budgets]
    return {"cr": checked.cr, "budgets": budgets}


def checked_problems(
    model: Path, folder: Path, problems: int, lengths: Iterable[float]
) -> CheckedRun:
    """Read the first problems of the lab, with their prompts for a model."""
    within = ",".join(f"{length:g}" for length in sorted(set(lengths)))
    return check(
        compose_evaluation(
            [
                f"model.path={model}",
                "task.name=countdown",
                f"task.path={folder / 'problems.jsonl'}",
                f"task.limit={problems}",
                f"sweep.lengths=[{within}]",
            ]
        )
    )


def _temperature(checked: CheckedRun) -> float:
    """Return the task's temperature; `check` has put it into the options."""
    temperature = checked.options.sampling.temperature
    assert temperature is not None
    return temperature


def _budget(
    llm: LLM, checked: CheckedRun, length: float, width: int, *, repeats: int
) -> dict[str, Any]:
    """Measure time and accuracy of the problems, with other seeds in each repetition."""
    seconds, scores, tokens = list[float](), list[float](), list[int]()
    for repeat in range(repeats):
        params = [
            SamplingParams(
                n=width,
                seed=repeat * len(checked.prompts) + number,
                temperature=_temperature(checked),
                max_tokens=length_in_tokens(length),
            )
            for number in range(len(checked.prompts))
        ]
        begin = time.perf_counter()
        outputs = llm.generate(checked.prompts, params)
        seconds.append(time.perf_counter() - begin)
        chains = [chain for output in outputs for chain in output.outputs]
        most = length_in_tokens(length)
        if any(c.finish_reason != "stop" and len(c.token_ids) < most for c in chains):
            raise EvaluationError(
                f"{checked.directory}: a chain of {most} tokens does not fit into the cache or the "
                "model's positions; raise --cache-mb or shorten --budgets"
            )
        texts = [[chain.text for chain in output.outputs] for output in outputs]
        tokens.append(sum(len(chain.token_ids) for chain in chains))
        scores.append(solved(checked, texts))
    return {
        "length": length,
        "width": width,
        "accuracy": statistics.mean(scores),
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "tokens_s": round(statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))),
    }


def solved(checked: CheckedRun, texts: list[list[str]]) -> float:
    """Return the share of the problems with a right chain."""
    scorer = find_scorer(checked.task.scorer)
    with AnswerChecker() as checker:
        scores = [
            scorer.scores(document, chains, checker)
            for document, chains in zip(checked.documents, texts, strict=True)
        ]
    return statistics.mean(any(each.share == 1 for each in chains) for chains in scores)


def drawn(record: dict[str, Any]) -> Any:
    """Draw accuracy over seconds, with a line for the budgets of a width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes, names = figure.add_subplot(), list(record["models"])
    for name, model in record["models"].items():
        budgets = sorted(model["budgets"], key=lambda b: b["length"])
        for width in sorted({b["width"] for b in budgets}):
            some = [b for b in budgets if b["width"] == width]
            seconds, solved = ([b[x] for b in some] for x in ("seconds", "accuracy"))
            label = name if width == budgets[0]["width"] else None
            axes.plot(seconds, solved, label=label, color=color(name, names), marker="o", ms=3)
            for budget in some if name == names[0] else ():  # the others are in the same order
                at = budget["seconds"], budget["accuracy"]
                text = f"{budget['length']:g}-{width}"
                axes.annotate(text, at, xytext=(3, -9), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", xlabel="seconds", ylabel="solved", ylim=(0, 1.03))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    return figure


def table(models: dict[str, Any]) -> str:
    """Return Markdown with a line for each budget of each model."""
    rows = []
    for name, model in models.items():
        for budget in model["budgets"]:
            spread = f"{budget['seconds_least']:.2f} to {budget['seconds_most']:.2f}"
            cost = f"{budget['seconds']:.2f} ({spread})", f"{budget['tokens_s']:,}"
            settings = f"{budget['length']:g}-{budget['width']}"
            rows.append([name, settings, f"{budget['accuracy']:.3f}", *cost])
    return markdown_table(_TITLES, rows)


def _run(args: argparse.Namespace) -> int:
    device = torch.device(resolve_device(args.device))
    lengths = [length for length, _ in args.budgets]
    checked = {
        name: checked_problems(
            model_path(args.folder, name, args.seed), args.folder, args.problems, lengths
        )
        for name in args.models
    }
    settings = {name: getattr(args, name) for name in ("cache_mb", "rows", "repeats", "seed")}
    record: dict[str, Any] = {
        "device": device_name(device),
        "versions": versions(device),
        **origin(),
        "settings": settings | {"problems": len(checked[args.models[0]].prompts)},
        "models": {},
    }
    print(table({}))
    for name, checked_run in checked.items():
        record["models"][name] = measure(checked_run, args)
        rows = table({name: record["models"][name]}).split("\n", 2)[2]  # the header is printed
        print(rows, flush=True)
    folder = args.output / re.sub(r"\W+", "_", record["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wall_clock.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {folder / 'wall_clock.json'}")
    _draw(record, args.figure)
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print a stored record."""
    code = show(args.table, lambda record: table(record["models"]))
    _draw(json.loads(args.table.read_text(encoding="utf-8")), args.figure)
    return code


def _draw(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        drawn(record).savefig(path)


def _name(text: str) -> str:
    if not re.fullmatch(r"\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give teacher, or a retrofit such as cr8")
    return text


def _budget_of(text: str) -> tuple[float, int]:
    length, _, width = text.partition("-")
    try:
        budget = float(length), count(width)
    except (ValueError, argparse.ArgumentTypeError):
        budget = 0.0, 1
    if not 0 < budget[0] < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give LENGTH-WIDTH, such as 2-4")
    return budget


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research lab-wall-clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="of a finished lab on Countdown")
    add("--models", type=list_of(_name), default=("teacher", "cr4", "cr8"), help="teacher,cr4,cr8")
    add("--seed", type=seed, default=1234, help="of the retrofits (%(default)s)")
    budgets = list_of(_budget_of)
    add(
        "--budgets",
        type=budgets,
        default=budgets("0.5-1,1-1,2-1,0.5-4"),
        help="LENGTH-WIDTH, ... (0.5-1,1-1,2-1,0.5-4)",
    )
    add("--problems", type=count, default=400, help="the first ones (%(default)s)")
    add("--repeats", type=count, default=3, help="of each budget (%(default)s)")
    add("--cache-mb", type=count, default=128, help="MiB of keys and values (%(default)s)")
    add("--rows", type=count, default=1024, help="most chains in it (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--output", type=Path, default=RESULTS)
    add("--table", type=Path, metavar="JSON", help="print a stored record and end")
    add("--figure", type=picture, help=".svg or .png file to write")
    args = parser.parse_args(arguments)
    if (args.folder is None) == (args.table is None):
        parser.error("give the folder of a lab, or --table with a stored record")
    return run_main(lambda: _show(args) if args.table else _run(args))
