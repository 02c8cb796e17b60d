"""Show the tokens that an export keeps: cr_factor by position, tokens by KV head and by type.

    python -m research retention EXPORT PROBLEMS.jsonl [--output outputs/retention]
    python -m research retention EXPORT PROBLEMS.jsonl --task countdown --max-tokens 2048

The export continues the prompts of a problems file through the compact cache. After every pass the
engine reports the live slots of each sequence. After t tokens, the ratio of a sequence is
t / mean live slots. When a sequence ends, the cache states the positions that each KV head
holds (paper Figure 6).

For a task whose words have types (`research/retention/grammars`), the command counts held tokens
of each type at the end, among all tokens and among those that have left the window.
`kept_by_type.png` has a row for each KV head; `kept_in_trace.png` shows the words that heads hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from dms_train.cli.errors import run_main
from dms_train.data_prep.arguments import count as count_argument
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.registry import task
from dms_train.inference.heatmap import draw_heatmap
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from research.lab.tasks import TASKS
from research.retention.grammars import GRAMMARS
from research.retention.held import Curve, EndedSequence, count, decode, typed
from research.retention.pictures import Head, draw_curve, draw_trace, draw_types
from research.retention.table import stored, table


def _run(args: argparse.Namespace) -> None:
    prompts, params = _requests(args)
    llm = LLM(
        args.export,
        max_num_seqs=len(prompts),
        prefill_chunk=16,
        device=resolve_device(args.device),
        kernels="reference",  # the cache of the other kernels does not store positions
    )
    _check(args, llm, len(prompts))
    curve, ended = decode(llm, prompts, params)
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"sequences": len(prompts), **_by_head(llm, curve, args.output)}
    if args.task in GRAMMARS:
        record["types"] = _by_type(args, llm, ended)
    (args.output / "retention.json").write_text(json.dumps(record, indent=1) + "\n")


def _requests(args: argparse.Namespace) -> tuple[list[str], list[SamplingParams]]:
    """Return the prompts of the first documents, and their sampling parameters."""
    kind = task(args.task)
    options = TaskOptions(name=args.task, path=str(args.problems), limit=args.documents)
    documents = kind.documents(options, lambda messages: len(messages.user))
    params = [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            stop=kind.stop(document),
            seed=args.seed + number,
        )
        for number, document in enumerate(documents)
    ]
    return [kind.messages(document).user for document in documents], params


def _check(args: argparse.Namespace, llm: LLM, documents: int) -> None:
    """Refuse exports and options without countable types, before anything is decoded."""
    if args.task not in GRAMMARS:
        return
    if llm.spec is None or llm.spec.kind != "dms":
        raise EvaluationError(f"{args.export}: no export of DMS, whose tokens are kept or evicted")
    if not 0 <= args.sample < documents:
        raise EvaluationError(f"--sample {args.sample}: there are {documents} documents, from 0 on")
    sizes = llm.architecture.num_layers, llm.architecture.num_query_groups
    for layer, head in args.heads:
        if layer >= sizes[0] or head >= sizes[1]:
            raise EvaluationError(
                f"--heads {layer}.{head}: the model has {sizes[0]} layers and {sizes[1]} KV heads, "
                "from 0 on"
            )


def _by_head(llm: LLM, curve: Curve, output: Path) -> dict[str, Any]:
    """Draw and print the share that each KV head keeps, and the ratio by position."""
    total = llm.kv
    assert total is not None
    kept = 1.0 / total.cr_factors
    path = output / "retention_by_head.png"
    draw_heatmap(kept, path, "tokens kept", "share", (0.0, 1.0), total.layers)
    draw_curve(curve, output / "cr_by_position.png")
    medians = {p: statistics.median(v) for p, v in sorted(curve.items()) if len(v) >= 10}
    for position in list(medians)[:: max(1, len(medians) // 8)]:
        print(f"{position:5d} tokens seen: cr_factor {medians[position]:.2f}")
    for layer, heads in zip(total.layers, kept.tolist(), strict=True):
        print(f"layer {layer}: kept " + " ".join(f"{share:.2f}" for share in heads))
    return {"median_cr_factor": medians, "kept": kept.tolist()}


def _by_type(args: argparse.Namespace, llm: LLM, ended: list[EndedSequence]) -> dict[str, Any]:
    """Draw and print the kept share of the words of each type."""
    grammar = GRAMMARS[args.task]
    sequences = [typed(llm, each, grammar) for each in ended]
    everywhere, left = (count(sequences, grammar.types, left=each) for each in (False, True))
    if not any(type_count.tokens for type_count in left.values()):
        raise EvaluationError(
            f"--max-tokens {args.max_tokens}: no token has left the window; generate more"
        )
    draw_types(left, args.output / "kept_by_type.png")
    heads = args.heads or _spread(ended)
    draw_trace(sequences[args.sample], heads, args.output / "kept_in_trace.png")
    for line in table(everywhere, left):
        print(line)
    return {"all": stored(everywhere), "left_window": stored(left)}


def _spread(ended: list[EndedSequence]) -> list[Head]:
    """Return the heads that hold the most tokens, a median number and the fewest."""
    held = torch.stack([each.held.sum(-1) for each in ended]).sum(0)
    order = held.flatten().argsort(descending=True).tolist()
    chosen = dict.fromkeys(order[index] for index in (0, len(order) // 2, -1))
    return [divmod(number, held.shape[1]) for number in chosen]


def _head(text: str) -> Head:
    layer, _, head = text.partition(".")
    if not layer.isdecimal() or not head.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: LAYER.HEAD, such as 3.0")
    return int(layer), int(head)


def _heads(text: str) -> list[Head]:
    return [_head(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research retention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    tasks = ("exam_sheets", *TASKS)
    add("export", help="directory of a DMS export")
    add("problems", type=Path, help="file of exam-problems, countdown-problems, ...")
    add("--task", choices=tasks, default="exam_sheets", help="of the problems (%(default)s)")
    add("--documents", type=count_argument, default=100, help="the first of the file (%(default)s)")
    add("--max-tokens", type=count_argument, default=220, help="generated for each (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--seed", type=int, default=0, help="of the first document, the next has the next one")
    add("--heads", type=_heads, default=[], help="LAYER.HEAD,... of the trace (three of them)")
    add("--sample", type=int, default=0, help="document of the trace, from 0 on (%(default)s)")
    add("--device", default="cpu", help="auto, cpu or cuda (%(default)s)")
    add("--output", type=Path, default=Path("outputs/retention"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    args = _parser().parse_args(arguments)
    return run_main(lambda: _run(args))
