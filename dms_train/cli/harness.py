"""`dms-eval harness`: tasks of lm-evaluation-harness on the inference engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from dms_train.cli.engine_arguments import add_engine, engine_options

_EPILOG = """\
examples:
  dms-eval harness EXPORT --tasks gsm8k,arc_challenge --num-fewshot 5 --device cuda
  dms-eval harness MODEL --tasks mmlu,hellaswag --limit 100 --policy window --window 1024
  dms-eval harness EXPORT --tasks my_task --include-path tasks --output outputs/harness/mine

Data sets are read from the local cache of the hub; only --download uses the network.
OUTPUT/results.json has the harness' results and a block `dms`: what the KV cache cost, versions,
the engine's options and the SHA-256 of the model.
"""


def evaluate_tasks(words: list[str]) -> None:
    """Run the command.

    Args:
        words: Arguments after `dms-eval harness`.

    Raises:
        EvaluationError: A task cannot be run.
    """
    args = _parser().parse_args(words)
    from dms_train.evaluation.harness import run
    from dms_train.hf.directory import resolve

    options = run.HarnessOptions(
        tasks=tuple(name for name in args.tasks.split(",") if name),
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        gen_kwargs=args.gen_kwargs,
        system_instruction=args.system_instruction,
        apply_chat_template=args.apply_chat_template,
        seed=args.seed,
        download=args.download,
    )
    engine = engine_options(args)
    resolve(args.model)  # the quick checks come before the tasks are read
    run.require_unused(args.output)
    tasks = run.load_tasks(options)
    results = run.evaluate(args.model, engine, tasks, options)
    run.write_results(results, args.output, samples=args.log_samples)
    print(run.table(results))
    kv = results["dms"]["kv"]
    if kv is not None:
        print(
            f"cr_factor {kv['cr_factor']:.2f}  KV reads {kv['kv_reads']:,.0f}  "
            f"of prompts {kv['prefill_reads']:,.0f}  peak tokens {kv['peak_live_tokens']:,.1f}"
        )
    print(args.output / run.RESULTS)


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
    add("--log-samples", action="store_true", help="also write every prompt, answer and score")
    return parser


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", required=True, metavar="A,B", help="names of tasks, groups or tags, YAML files")
    add("--include-path", type=Path, metavar="DIR", help="folder with further YAML files")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--limit", type=float, metavar="N", help="documents of each task, or their share below 1")
    add("--gen-kwargs", metavar="K=V,...", help="changes of the tasks' generation_kwargs")
    add("--apply-chat-template", action="store_true", help="apply the chat template to prompts")
    add("--system-instruction", metavar="TEXT", help="text before every prompt")
    add("--seed", type=int, default=1234, help="seed of examples and answers (%(default)s)")
    add("--download", action="store_true", help="fetch data sets that are not on this disk")
