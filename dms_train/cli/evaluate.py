"""Evaluate a model on a task: accuracy against KV reads and tokens in memory.

`dms-eval key=value ...` generates W chains of at most L x 1,024 tokens for each document. It scores
them, and measures all lengths and widths from the same chains. One JSON line for each
chain goes to run.dir; the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.cli.harness import evaluate_tasks, write_benchmarks
from dms_train.cli.perplexity import measure_perplexity
from dms_train.evaluation.tasks.registry import all_tasks

_EPILOG = """\
other words:
  dms-eval tasks                lists the tasks and where their documents come from
  dms-eval harness MODEL        runs tasks of lm-evaluation-harness on the engine
  dms-eval data                 writes the documents of public benchmarks as JSON lines
  dms-eval perplexity MODEL     measures the perplexity of a text through the KV cache
  dms-eval needles RUNS         draws accuracy of task.name=niah by context length and depth
  dms-eval report RUNS          writes tables and figures of runs of one original model

servers:
  model.server=http://HOST:PORT/v1 takes the chains from `vllm serve` or `dms-serve`, with the
  documents, prompts and scores of this command. It sends the key of OPENAI_API_KEY, if there is
  one. model.path names the served model, for its tokenizer. Costs are not known.

budgets:
  sweep.lengths=[0.5,1,2]       most generated tokens of a chain, in units of 1,024 (L)
  sweep.widths=[1,4]            chains of a document (W)
  The compression ratio (CR) is the export's, or policy.cr with policy=window, policy=h2o
  and other policies that need no training (docs/concepts/policies.md). policy.KEY=VALUE sets
  any option of the policy.

costs:
  KV reads are those of decoding, summed over the chains of a document. Peak tokens are what its
  chains hold at the same time. Both are means over layers and KV heads. A chain that is cut off
  counts as wrong.

examples:
  dms-eval model.path=EXPORT task.name=exam_sheets task.path=problems.jsonl \\
      'sweep.lengths=[0.25]' 'sweep.widths=[1,2,4]' run.dir=outputs/eval/cr4
  dms-eval model.path=EXPORT task.name=math500 task.path=test.jsonl 'sweep.lengths=[8,16]' \\
      'sweep.widths=[1,4]' run.dir=outputs/eval/math run.shard=$SLURM_ARRAY_TASK_ID run.shards=16
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_main(lambda: _main(words))


def _main(words: list[str]) -> None:
    if words[:1] == ["tasks"]:
        _parser("dms-eval tasks").parse_args(words[1:])
        print(_tasks())
        return
    if words[:1] == ["report"]:
        _report(words[1:])
        return
    commands = {
        "needles": _needles,
        "harness": evaluate_tasks,
        "data": write_benchmarks,
        "perplexity": measure_perplexity,
    }
    if words and words[0] in commands:
        commands[words[0]](words[1:])
        return
    parser = _parser("dms-eval")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see conf/eval.yaml")
    parser.add_argument(
        "--allow-code", action="store_true", help="run programs that the model wrote, in bubblewrap"
    )
    args = parser.parse_intermixed_args(words)
    _evaluate([*args.overrides, *(["run.allow_code=sandbox"] if args.allow_code else [])])


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=name,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _tasks() -> str:
    lines = []
    for name, task in all_tasks().items():
        count = f"{task.source.rows} documents; " if task.source is not None else ""
        lines.append(f"{name:18} {task.title}: {count}{task.where}")
    return "\n".join(lines)


def _report(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dms-eval report",
        description="Write accuracy against KV reads and peak tokens, margins of Pareto frontiers "
        "and tables in the form of the DMS paper, beside what the paper prints.",
        epilog="example: dms-eval report outputs/eval --output outputs/eval/report.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders above them")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="page; Markdown goes beside it"
    )
    parser.add_argument("--figures", type=Path, help="folder for the figures as separate files")
    args = parser.parse_args(words)
    if args.output.suffix == ".md":
        parser.error(f"--output {args.output}: the page; its Markdown goes beside it as .md")
    from dms_train.evaluation.analysis.comparison import Comparison
    from dms_train.evaluation.analysis.page import figures, markdown, page
    from dms_train.evaluation.scaling.results import load_all

    comparison = Comparison(load_all(args.runs))
    files = {args.output: page(comparison), args.output.with_suffix(".md"): markdown(comparison)}
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        for name, svg in figures(comparison, links=False):
            files[args.figures / f"{name}.svg"] = f"{svg}\n"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        print(path)


def _needles(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dms-eval needles",
        description="Draw how often needles are found, by context length and depth. The runs are "
        "of task.name=niah with one task.context_length each.",
        epilog="example: dms-eval needles outputs/eval/niah --output outputs/eval/needles.svg",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders above them")
    parser.add_argument("--bands", type=int, default=5, help="bands of depths (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("needles.svg"), help="figure; JSON goes beside it"
    )
    args = parser.parse_args(words)
    if not 1 <= args.bands <= 40:
        parser.error(f"--bands {args.bands}: 1 to 40, the number of depths")
    from dms_train.evaluation.analysis.needles import needle_cells
    from dms_train.evaluation.scaling.results import load_all

    cells = needle_cells(load_all(args.runs), args.bands)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    numbers = args.output.with_suffix(".json")
    rows = json.dumps([asdict(cell) for cell in cells], indent=1)
    numbers.write_text(f"{rows}\n", encoding="utf-8")
    print(numbers)
    from dms_train.evaluation.analysis.charts import needle_chart

    figure = needle_chart("Needles found, percent", cells)
    args.output.write_text(f"{figure}\n", encoding="utf-8")
    print(args.output)


def _evaluate(overrides: list[str]) -> None:
    from dms_train.cli.config_source import compose_evaluation

    options = compose_evaluation(overrides)
    from dms_train.app import launcher
    from dms_train.evaluation.scaling.run import evaluate, prepare
    from dms_train.observe import log

    log.configure(0)
    key = launcher.client_key()
    result = evaluate(prepare(options), log.logger().info, launcher.job(), key)
    for point in result.points():
        print(point)


if __name__ == "__main__":
    sys.exit(main())
