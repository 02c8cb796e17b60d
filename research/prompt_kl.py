r"""Measure how far exports are from their original on the prompts of a task.

    python -m research prompt-kl --models original=MODEL,cr4=EXPORT task.name=gsm8k \
        task.path=test.jsonl task.limit=50 model.prompt_format=template

answers each problem greedily with the first model. Each model then reads the prompts and these
answers through its cache. The table has the KL divergence from the first model in nats, for the
first token of an answer and for the later ones, and the probability of the token that the first
model begins with. Intervals are over problems. A first token with a high divergence suggests that
the text of the training lacks prompts of this form. All other arguments are options of `dms-eval`,
except those that have no effect here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import origin, show
from benchmarks.timing import device_name, versions
from dms_train.cli.config_source import compose_evaluation
from dms_train.cli.errors import run_main
from dms_train.evaluation.bootstrap import ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.run import CheckedRun, check
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method.losses import kl_teacher_student
from dms_train.tables import markdown_table
from research.lab.arguments import check_overrides, count, named_models, require_models_or_table

_OWN = ("model.path", "model.server", "model.cr", "policy.", "sampling.", "sweep.", "run.")
_TITLES = ("model", "KL, first token", "KL, later tokens", "probability of the first token")


class Reading(NamedTuple):
    """Answers that a model has read.

    Attributes:
        hidden: [tokens, hidden size] of each answer, at the positions that predict its tokens.
        head: [vocabulary, hidden size].
    """

    hidden: list[Tensor]
    head: Tensor

    def logits(self, index: int) -> Tensor:
        """Return float64 [tokens, vocabulary] of an answer."""
        return F.linear(self.hidden[index].to(self.head), self.head).double()


def checked_run(model: Path, overrides: list[str]) -> CheckedRun:
    """Read the problems with their prompts for a model.

    Raises:
        EvaluationError: The model, the task or an option cannot be used.
        FileNotFoundError: The model or a file is absent.
    """
    check_overrides(overrides, _OWN, "has no effect here")
    own = [f"model.path={model}", "sweep.lengths=[1]", "run.allow_code=unisolated"]
    return check(compose_evaluation([*overrides, *own]))  # no program is run here


def answers(llm: LLM, checked: CheckedRun, new_tokens: int) -> list[list[int]]:
    """Return the tokens of a greedy answer to each problem."""
    params = [
        SamplingParams(temperature=0, max_tokens=new_tokens, stop=checked.task.stop(document))
        for document in checked.documents
    ]
    outputs = llm.generate(checked.prompts, params)
    return [output.outputs[0].token_ids for output in outputs]


def read(llm: LLM, prompts: list[list[int]], texts: list[list[int]]) -> Reading:
    """Read prompts with their answers through the cache of a model."""
    states = llm.engine.hidden_states([[*p, *t] for p, t in zip(prompts, texts, strict=True)])
    hidden = [
        found.hidden[len(prompt) - 1 : -1] for found, prompt in zip(states, prompts, strict=True)
    ]
    return Reading(hidden, llm.engine.head.float())


def compared(first: Reading, other: Reading, texts: list[list[int]]) -> dict[str, Any]:
    """Return divergences from the first model, each with its interval over problems.

    Args:
        first: What the first model read.
        other: What another model read.
        texts: Answers of the first model.
    """
    kl, known = [], []
    for index, text in enumerate(texts):
        ours = other.logits(index)
        kl.append(kl_teacher_student(ours, first.logits(index)))
        known.append(ours[0].softmax(-1)[text[0]].item())
    ones = [1.0] * len(kl)
    later = [values[1:] for values in kl]
    estimates = {
        "first": ratio([values[0].item() for values in kl], ones),
        "probability": ratio(known, ones),
    }
    if any(len(values) for values in later):
        sums, numbers = [v.sum().item() for v in later], [float(len(v)) for v in later]
        estimates["later"] = ratio(sums, numbers)
    return {name: asdict(estimate) for name, estimate in estimates.items()}


def table(models: dict[str, Any]) -> str:
    """Return Markdown with a line for each model."""
    rows = [
        [name, *(_interval(found.get(key)) for key in ("first", "later", "probability"))]
        for name, found in models.items()
    ]
    return markdown_table(_TITLES, rows)


def _interval(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return "{value:.4f} [{low:.4f}, {high:.4f}]".format(**found)


def loaded(checked: CheckedRun, new_tokens: int) -> LLM:
    """Load a model whose sequences may be as long as the longest prompt with an answer."""
    longest = checked.longest + new_tokens + checked.engine.decode_steps
    return LLM(checked.directory, replace(checked.engine, max_model_len=longest))


def measure(runs: dict[str, CheckedRun], new_tokens: int) -> dict[str, Any]:
    """Return `compared` for each model; one model is in memory at a time."""
    (first_name, first), *others = runs.items()
    llm = loaded(first, new_tokens)
    texts = answers(llm, first, new_tokens)
    reference = read(llm, first.prompts, texts)
    found = {first_name: compared(reference, reference, texts)}
    for name, run in others:
        del llm
        llm = loaded(run, new_tokens)
        found[name] = compared(reference, read(llm, run.prompts, texts), texts)
    return found


def _run(args: argparse.Namespace) -> int:
    if args.output is not None and args.output.is_dir():
        raise EvaluationError(f"--output {args.output}: a folder; name a file")
    runs = {name: checked_run(path, args.overrides) for name, path in args.models.items()}
    first = next(iter(runs.values()))
    for name, run in runs.items():
        if run.prompts != first.prompts:
            raise EvaluationError(f"--models {name}: its prompts have other tokens than the first")
    models = measure(runs, args.new_tokens)
    print(table(models))
    if args.output is not None:
        record = _settings(first) | {"new_tokens": args.new_tokens, "models": models}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _settings(checked: CheckedRun) -> dict[str, Any]:
    """Return what was measured, for the record."""
    device = torch.device(checked.engine.device)
    return {
        "device": device_name(device),
        "versions": versions(device),
        **origin(),
        "task": checked.task.name,
        "problems": len(checked.prompts),
        "prompt_format": checked.prompt_format,
        "dtype": checked.engine.dtype,
        "cache_dtype": checked.engine.cache_dtype,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research prompt-kl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="options of dms-eval")
    add("--models", type=named_models, metavar="NAME=DIR,...", help="the original, then exports")
    add("--new-tokens", type=count, default=64, help="most tokens of an answer (%(default)s)")
    add("--output", type=Path, help="record to write")
    add("--table", type=Path, metavar="JSON", help="print a stored record and end")
    args = parser.parse_intermixed_args(arguments)
    require_models_or_table(parser, args)
    if args.table is not None:
        return run_main(lambda: show(args.table, lambda record: table(record["models"])))
    return run_main(lambda: _run(args))
