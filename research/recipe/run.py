"""Retrofit a real model on one GPU, from the download to the report and the model cards.

    python -m research recipe smollm2_135m --minutes 9

downloads the model and samples training text from it; the rest of the text is Python's standard
library. It runs `dms-train experiment=smollm2_135m`, which exports the model at CR 2, 3, 4, 6 and
8. It compares each export with the original on text that was not trained on and on public
benchmarks, and in the time of the engine with the same bytes of cache. Then it writes
FOLDER/report.md and adds the results to the model card of each export. Every step is a command of
this project; its output goes to FOLDER/logs.

A finished step leaves a mark in FOLDER/state, and the next call skips it. After `--minutes` the
running command is told to stop, the report has what is finished, and the exit code is 3; the same
command continues. Training,
sampling and needles keep their progress, and benchmarks the tasks that have finished. Other
measurements start over.

`--policies` evaluates the original with other cache policies too. `--dmc` trains with DMC too, and
`--control` without eviction: what the control loses is not due to eviction.

`toy` takes a few steps with the embedded model on a CPU. It shows the procedure and says nothing
about quality.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import show
from dms_train.cli.errors import run_main
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from research.lab.arguments import count, duration, list_of
from research.lab.run import UNFINISHED, run_steps
from research.recipe.evaluations import steps
from research.recipe.figures import write_figures
from research.recipe.report import report_text, write_report
from research.recipe.steps import FILES, RECIPES, Settings, check_policies, trainings

_CACHES = 0.6  # share of a GPU's memory that the caches of concurrent evaluations take


def _settings(args: argparse.Namespace) -> Settings:
    single = (args.prompts, args.model, args.benchmarks, args.held_out, args.haystack)
    for path in (*args.text, *filter(None, single)):
        if not path.exists():
            raise EvaluationError(f"{path}: no such file or folder; correct the path")
    recipe = RECIPES[args.name]
    for file in FILES.values() if recipe.timed and args.benchmarks else ():
        if not (args.benchmarks / file).is_file():
            raise EvaluationError(
                f"--benchmarks {args.benchmarks}: no {file}; `dms-eval data` writes it"
            )
    settings = Settings(
        recipe=recipe,
        root=args.folder or Path("outputs") / args.name,
        model=args.model,
        prompts=args.prompts,
        column=args.column,
        text=tuple(args.text),
        device=resolve_device(args.device),
        rows=args.rows,
        limit=args.limit,
        benchmarks=args.benchmarks,
        held_out=args.held_out,
        haystack=args.haystack,
        cache_bytes=_cache_bytes(args.jobs, resolve_device(args.device)),
        policies=args.policies,
        ratios=args.policy_ratios,
        dmc=args.dmc,
        control=args.control,
        allow_code=args.allow_code,
    )
    check_policies(settings)
    if settings.allow_code and not settings.recipe.chains:
        raise EvaluationError(f"--allow-code: {args.name} runs no programs; leave it out")
    return settings


def _cache_bytes(jobs: int, device: str) -> int | None:
    """Return the size of the cache of each of several evaluations on one GPU."""
    if device == "cpu" or jobs == 1:
        return None
    return int(_CACHES * torch.cuda.get_device_properties(device).total_memory / jobs)


def _run(args: argparse.Namespace) -> int:
    if args.figures is not None and args.table is None:
        raise EvaluationError("--figures: give --table too; a run writes its figures to its folder")
    if args.table is not None:
        return _show(args.table, args.figures)
    if args.name is None:
        raise EvaluationError(f"NAME: choose from {', '.join(RECIPES)}")
    settings = _settings(args)
    how = {"jobs": args.jobs, "device": settings.device, "minutes": args.minutes}
    finished = run_steps(settings.root, steps(settings), **how)
    if all((settings.root / "state" / f"{name}.done").is_file() for name in trainings(settings)):
        print(write_report(settings), flush=True)
    if not finished:
        print("the time is over; the same command continues", flush=True)
        return UNFINISHED
    return 0


def _show(table: Path, folder: Path | None) -> int:
    """Print a stored report, and draw its figures."""

    def text(numbers: Mapping[str, Any]) -> str:
        shown = report_text(numbers)
        if folder is not None and not write_figures(numbers, folder):
            raise EvaluationError(
                f"{table}: no needles, chains or seconds to draw; leave out --figures"
            )
        return shown

    if folder is not None and folder.is_file():
        raise EvaluationError(f"--figures {folder}: a file; name a folder")
    return show(table, text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", choices=RECIPES, help="recipe")
    add("--folder", type=Path, help="default outputs/NAME")
    add("--minutes", type=duration, help="stop then; the same command continues")
    add("--model", type=Path, help="directory of the model, in place of a download")
    add("--prompts", type=Path, help="file of prompts to answer, in place of instructions")
    add("--column", default="prompt", help="column of the prompts (%(default)s)")
    more = "text files to train on, in place of Python's standard library"
    add("--text", type=Path, nargs="+", default=(), help=more)
    add("--benchmarks", type=Path, help="folder of `dms-eval data`, in place of a download")
    add("--held-out", type=Path, help="text for the perplexity, such as WikiText-2's test set")
    add("--haystack", type=Path, help="text that hides needles, such as essays")
    add("--limit", type=count, default=1000, help="documents of each task (%(default)s)")
    kinds = ("auto", "cpu", "cuda")
    add("--device", choices=kinds, default="auto", help="auto takes a GPU if there is one")
    add("--jobs", type=count, default=1, help="evaluations at the same time (%(default)s)")
    policies = "cache policies for the original, such as h2o,tova:prefill=dense"
    add("--policies", type=list_of(str), default=(), metavar="A,B", help=policies)
    ratios = "their compression ratios (4,8)"
    add("--policy-ratios", type=list_of(count), default=(4, 8), metavar="N,M", help=ratios)
    add("--dmc", action="store_true", help="also train with Dynamic Memory Compression")
    add("--control", action="store_true", help="also train as long without eviction")
    code = "run the programs of HumanEval, which is left out otherwise"
    add("--allow-code", choices=("sandbox", "unisolated"), help=code)
    add("--table", type=Path, metavar="FILE", help="print the report of a report.json instead")
    add("--figures", type=Path, metavar="FOLDER", help="draw the record of --table there")
    add("--rows", type=count, default=512, help="sequences in the cache (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 with one line, or 3 if the time is over."""
    return run_main(lambda: _run(_parser().parse_args(arguments)))
