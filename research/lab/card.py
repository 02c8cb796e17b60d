"""Write the model card of a teacher: its shape, its training and its accuracy.

    python -m research lab-card outputs/lab/s --experiment lab_teacher_s

writes `teacher/README.md`. Accuracy is given for one chain with a 95 % interval over the
problems: at temperature 0, and with the task's sampling, estimated from all chains of a problem.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.budgets import length_in_tokens
from dms_train.evaluation.scaling.results import RunResult, load
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture
from dms_train.planning.parameters import parameter_count
from dms_train.tables import markdown_table
from research.lab.differences import chain_scores, over_seeds
from research.lab.tasks import TASKS, named

TEACHER = "teacher"
GREEDY = f"{TEACHER}_greedy"
_HEAD = """\
---
library_name: transformers
tags: [toy-model]
---
"""


def evaluations(root: Path, base: str) -> Iterator[RunResult]:
    """Yield the run of a model on every task that it was evaluated on."""
    for task in TASKS:
        folder = root / "eval" / named(base, task)
        if (folder / "summary.json").exists():
            yield load([folder])


def accuracy(run: RunResult) -> dict[tuple[str, int], str]:
    """Return the accuracy of one chain, by the title of the task and the tokens of the chain."""
    accuracies = {}
    for index, length in enumerate(run.header["config"]["sweep"]["lengths"]):
        mean, _ = over_seeds([chain_scores(run, index)])
        accuracies[run.title, length_in_tokens(length)] = (
            f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]"
        )
    return accuracies


def _accuracies(root: Path) -> str:
    greedy: dict[tuple[str, int], str] = {}
    sampled: dict[tuple[str, int], str] = {}
    for run in [*evaluations(root, TEACHER), *evaluations(root, GREEDY)]:
        temperature = run.header["config"]["sampling"]["temperature"]
        (sampled if temperature else greedy).update(accuracy(run))
    if not greedy and not sampled:
        raise EvaluationError(f"{root}: the teacher has not been evaluated")
    rows = [
        (task, f"{tokens:,}", greedy.get((task, tokens), ""), sampled.get((task, tokens), ""))
        for task, tokens in sorted({*greedy, *sampled})
    ]
    return markdown_table(["task", "tokens", "temperature 0", "sampled"], rows)


def _properties(a: Architecture, config: dict[str, Any]) -> str:
    data, pretrain = config["data"], config["stage"]["pretrain"]
    tokens = pretrain["steps"] * data["global_batch_size"] * data["seq_length"]
    rows = {
        "architecture": f"{a.num_layers} layers, hidden {a.hidden_size}, {a.num_attention_heads} "
        f"query and {a.num_query_groups} KV heads of size {a.kv_channels}, SwiGLU "
        f"{a.ffn_hidden_size}, RoPE base {a.rotary_base:,.0f}, context "
        f"{a.max_position_embeddings:,}",
        "weights": f"{parameter_count(a):,}, {config['parallel']['params_dtype']} in training",
        "data": f"{', '.join(Path(path).parent.name for path in data['paths'])}: documents of "
        "`python -m research data`, without the problems of the evaluation",
        "training": f"{pretrain['steps']:,} steps of {data['global_batch_size']} x "
        f"{data['seq_length']:,} tokens ({tokens / 1e6:,.0f} M), learning rate "
        f"{pretrain['lr']:g}, weight decay {config['optim']['weight_decay']:g}, "
        f"seed {config['run']['seed']}",
    }
    return markdown_table(["", ""], rows.items())


def card(root: Path, experiment: str) -> str:
    """Return the card as Markdown.

    Args:
        root: Folder of the lab.
        experiment: Experiment of the teacher.

    Raises:
        EvaluationError: The teacher has not been trained or evaluated.
    """
    model, file = root / TEACHER / "exports" / "final" / "hf", root / TEACHER / "config.yaml"
    if not file.exists():
        raise EvaluationError(f"{file}: no such file; give the folder of a finished lab")
    try:
        properties = _properties(
            read_architecture(model), yaml.safe_load(file.read_text(encoding="utf-8"))
        )
    except (yaml.YAMLError, KeyError, TypeError):
        raise EvaluationError(f"{file}: not the configuration of a training") from None
    lines = [
        _HEAD,
        f"# {experiment}",
        "",
        "A model that was trained from nothing on generated problems, to be retrofitted.",
        "",
        properties,
        "",
        "## Accuracy",
        "",
        "One chain of a problem; in brackets the 95 % interval over the problems.",
        "",
        _accuracies(root),
        "",
        "## Reproduce",
        "",
        f"`python -m research lab` with the scale of `{experiment}` makes the data and runs",
        f"`dms-train experiment={experiment}`.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research lab-card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of a lab")
    parser.add_argument("--experiment", required=True, help="of its teacher")
    args = parser.parse_args(arguments)
    return run_main(lambda: _write(args.folder, args.experiment))


def _write(root: Path, experiment: str) -> int:
    text, path = card(root, experiment), root / TEACHER / "README.md"
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0
