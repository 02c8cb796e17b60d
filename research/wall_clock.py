r"""Measure accuracy against seconds, with the same bytes of cache for every model.

    python -m research wall-clock --models original=MODEL,cr4=EXPORT --budgets 0.5-1,1-4 \
        task.name=gsm8k task.path=test.jsonl task.limit=100 sampling.temperature=0.7 \
        model.cache_bytes=128000000 model.max_num_seqs=512

answers the same problems with every model at each budget: tokens of a chain in units of 1,024, and
chains of a problem. Each model gets a cache of `model.cache_bytes`, in which as many chains run as
fit, at most `model.max_num_seqs`. Nothing else should use the GPU. The median time of the
repetitions and the accuracy over all of them, with a 95 % interval over problems, are printed and
written to `--output`. All other arguments are options of `dms-eval`, except those that this command
sets.

    python -m research wall-clock --table wall_clock.json --figure wall_clock.svg

prints a stored record and draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.records import origin, show
from benchmarks.timing import device_name, versions
from dms_train.cli.config_source import compose_evaluation
from dms_train.cli.errors import run_main
from dms_train.evaluation.analysis.charts import color
from dms_train.evaluation.bootstrap import ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.budgets import length_in_tokens
from dms_train.evaluation.scaling.results import STOPPED
from dms_train.evaluation.scaling.run import CheckedRun, check, most_tokens, prompted
from dms_train.evaluation.scaling.voting import ChainScore, score
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import scorer as find_scorer
from dms_train.evaluation.tasks.base import Document, Task
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.tables import markdown_table
from research.lab.arguments import (
    check_overrides,
    count,
    list_of,
    named_models,
    picture,
    require_models_or_table,
)

_WARM_UP_TOKENS = 64
_TITLES = ("model", "length-width", "accuracy", "seconds (least to most)", "tokens/s")
_OWN = ("model.path", "model.server", "sweep.", "run.dir", "run.shard")


def checked_run(model: Path, overrides: list[str], budgets: list[tuple[float, int]]) -> CheckedRun:
    """Read the problems with their prompts for a model.

    Args:
        model: Directory of the model.
        overrides: Options of `dms-eval`.
        budgets: Length of a chain in units of 1,024 tokens, and chains of a problem.

    Raises:
        EvaluationError: The model, the task or an option cannot be used.
        FileNotFoundError: The model or a file is absent.
    """
    check_overrides(overrides, _OWN, "--models and --budgets decide it")
    lengths, widths = ({budget[place] for budget in budgets} for place in (0, 1))
    sizes = ",".join(map(repr, sorted(lengths)))
    checked = check(
        compose_evaluation([*overrides, f"model.path={model}", f"sweep.lengths=[{sizes}]"])
    )
    if checked.engine.cache_bytes is None:
        raise EvaluationError("model.cache_bytes: state the size of the cache of every model")
    if checked.options.sampling.temperature == 0 and max(widths) > 1:
        raise EvaluationError(
            "sampling.temperature=0: all chains of a problem are alike; set a temperature, or give "
            "--budgets with one chain"
        )
    return checked


def measure(checked: CheckedRun, budgets: list[tuple[float, int]], repeats: int) -> dict[str, Any]:
    """Measure all budgets of one model, with one engine.

    Args:
        checked: From `checked_run`.
        budgets: Its budgets.
        repeats: Repetitions of each budget, with other seeds.

    Raises:
        EvaluationError: A chain does not fit.
    """
    llm = LLM(checked.directory, replace(checked.engine, max_model_len=most_tokens(checked)))
    llm.engine.capture()
    warm_up = [
        replace(params, max_tokens=_WARM_UP_TOKENS, ignore_eos=True, stop=())
        for params in sampled(checked, budgets[0], 0)
    ]
    llm.generate(checked.prompts, warm_up)
    return {
        "cr": checked.cr,
        "budgets": [measure_budget(llm, checked, b, repeats) for b in budgets],
    }


def sampled(checked: CheckedRun, budget: tuple[float, int], repeat: int) -> list[SamplingParams]:
    """Return the parameters of each problem, as `dms-eval` samples it with another seed."""
    options = checked.options
    options = replace(
        options,
        sampling=replace(options.sampling, seed=options.sampling.seed + repeat),
        sweep=replace(options.sweep, lengths=(budget[0],), widths=(budget[1],)),
    )
    return [
        prompted(checked.task, document, prompt, options).params
        for document, prompt in zip(checked.documents, checked.prompts, strict=True)
    ]


def measure_budget(
    llm: LLM, checked: CheckedRun, budget: tuple[float, int], repeats: int
) -> dict[str, Any]:
    """Measure time and accuracy of the problems.

    Returns:
        The budget, its median time and the spread, tokens per second, `scores` (of each problem,
        the mean over the repetitions), and their mean with its 95 % interval over problems.

    Raises:
        EvaluationError: A chain does not fit.
    """
    seconds, scores, tokens = list[float](), list[list[float]](), list[int]()
    for repeat in range(repeats):
        params = sampled(checked, budget, repeat)
        begin = time.perf_counter()
        outputs = llm.generate(checked.prompts, params)
        seconds.append(time.perf_counter() - begin)
        _require_room(checked, outputs, length_in_tokens(budget[0]))
        tokens.append(sum(len(c.token_ids) for output in outputs for c in output.outputs))
        scores.append(problem_scores(checked, outputs))
    means = [statistics.mean(of_problem) for of_problem in zip(*scores, strict=True)]
    accuracy = ratio(means, [1.0] * len(means))
    return {
        "length": budget[0],
        "width": budget[1],
        "accuracy": accuracy.value,
        "accuracy_low": accuracy.low,
        "accuracy_high": accuracy.high,
        "scores": means,
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "tokens_s": round(statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))),
    }


def _require_room(checked: CheckedRun, outputs: list[RequestOutput], most: int) -> None:
    """Refuse a chain that ended early because it did not fit."""
    chains = [chain for output in outputs for chain in output.outputs]
    if any(c.finish_reason != STOPPED and len(c.token_ids) < most for c in chains):
        raise EvaluationError(
            f"{checked.directory}: a chain of {most} tokens does not fit into the cache or the "
            "model's positions; raise model.cache_bytes or shorten --budgets"
        )


def problem_scores(checked: CheckedRun, outputs: list[RequestOutput]) -> list[float]:
    """Return the score of each problem by the rule of the task; a chain cut off is wrong."""
    run, free = checked.options.run, SimpleQueue[AnswerChecker]()
    with ExitStack() as stack:
        for _ in range(run.workers):
            free.put(stack.enter_context(AnswerChecker(allow_code=run.allow_code)))
        problems = stack.enter_context(ThreadPoolExecutor(run.workers))
        scored = partial(_score, checked.task, free)
        return list(problems.map(scored, checked.documents, outputs))


def _score(
    task: Task, free: SimpleQueue[AnswerChecker], document: Document, output: RequestOutput
) -> float:
    """Return the score of a problem, with a checker that no other problem uses meanwhile."""
    texts = [chain.text for chain in output.outputs]
    checker = free.get()
    try:
        scores = find_scorer(task.scorer).scores(document, texts, checker)
    finally:
        free.put(checker)
    chains = [
        ChainScore(each.answers, each.correct)
        if task.scores_truncated or chain.finish_reason == STOPPED
        else ChainScore((None,) * len(each.answers), (False,) * len(each.correct))
        for each, chain in zip(scores, output.outputs, strict=True)
    ]
    return score(chains, task.aggregate)


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
            seconds, shares = ([b[x] for b in some] for x in ("seconds", "accuracy"))
            label = name if width == budgets[0]["width"] else None
            axes.plot(seconds, shares, label=label, color=color(name, names), marker="o", ms=3)
            for budget in some if name == names[0] else ():  # the others are in the same order
                at = budget["seconds"], budget["accuracy"]
                text = f"{budget['length']:g}-{width}"
                axes.annotate(text, at, xytext=(3, -9), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", xlabel="seconds", ylabel="accuracy", ylim=(0, 1.03))
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
            rows.append([name, settings, _share(budget), *cost])
    return markdown_table(_TITLES, rows)


def _share(budget: dict[str, Any]) -> str:
    """Return an accuracy with its 95 % interval over problems, which older records lack."""
    share = f"{budget['accuracy']:.3f}"
    if "accuracy_low" not in budget:
        return share
    return f"{share} [{budget['accuracy_low']:.3f}, {budget['accuracy_high']:.3f}]"


def _run(args: argparse.Namespace) -> int:
    if args.output.is_dir():
        raise EvaluationError(f"--output {args.output}: a folder; name a file")
    checked = {
        name: checked_run(path, args.overrides, args.budgets) for name, path in args.models.items()
    }
    first = next(iter(checked.values()))
    device = torch.device(first.engine.device)
    record: dict[str, Any] = {
        "device": device_name(device),
        "versions": versions(device),
        **origin(),
        "settings": _settings(first) | {"repeats": args.repeats},
        "models": {},
    }
    print(table({}))
    for name, run in checked.items():
        record["models"][name] = measure(run, args.budgets, args.repeats)
        rows = table({name: record["models"][name]}).split("\n", 2)[2]  # the header is printed
        print(rows, flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {args.output}")
    _draw(record, args.figure)
    return 0


def _settings(checked: CheckedRun) -> dict[str, Any]:
    """Return what was measured, for the record."""
    engine = checked.engine
    return {
        "task": checked.task.name,
        "problems": len(checked.prompts),
        "prompt_format": checked.prompt_format,
        "sampling": asdict(checked.options.sampling),
        "policy": {"name": engine.policy, **engine.policy_options},
        "dtype": engine.dtype,
        "cache_dtype": engine.cache_dtype,
        "cache_bytes": engine.cache_bytes,
        "max_num_seqs": engine.max_num_seqs,
    }


def _show(args: argparse.Namespace) -> int:
    """Print a stored record."""
    code = show(args.table, lambda record: table(record["models"]))
    _draw(json.loads(args.table.read_text(encoding="utf-8")), args.figure)
    return code


def _draw(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn(record).savefig(path)


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
        prog="python -m research wall-clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="options of dms-eval")
    add("--models", type=named_models, metavar="NAME=DIR,...", help="models and exports")
    budgets = list_of(_budget_of)
    add(
        "--budgets",
        type=budgets,
        default=budgets("0.5-1,1-1,2-1,0.5-4"),
        help="LENGTH-WIDTH, ... (0.5-1,1-1,2-1,0.5-4)",
    )
    add("--repeats", type=count, default=3, help="repetitions of each budget (%(default)s)")
    add(
        "--output", type=Path, default=Path("wall_clock.json"), help="record to write (%(default)s)"
    )
    add("--table", type=Path, metavar="JSON", help="print a stored record and end")
    add("--figure", type=picture, help=".svg or .png file to write")
    args = parser.parse_intermixed_args(arguments)
    require_models_or_table(parser, args)
    return run_main(lambda: _show(args) if args.table else _run(args))
