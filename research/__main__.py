"""Run an experiment.

    python -m research NAME ARGUMENTS

`python -m research NAME --help` explains one. Training needs no command of its own: `dms-train
--config-dir research/conf experiment=lab_teacher_s` finds the experiments of this folder.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NamedTuple

from research.registration import register


class Command(NamedTuple):
    """Command of an experiment.

    Attributes:
        module: Module with a function `main(arguments)`, which returns the exit code.
        help: One line for the list of commands.
    """

    module: str
    help: str


COMMANDS = {
    "data": Command("research.data.command", "make training data and problems of synthetic tasks"),
    "eval": Command("dms_train.cli.evaluate", "dms-eval with the tasks of the experiments"),
    "lab": Command("research.lab.run", "pretrain a teacher, retrofit it and evaluate all models"),
    "lab-card": Command("research.lab.card", "write the model card of a teacher"),
    "lab-differences": Command("research.lab.differences", "compare retrofits with their teacher"),
    "lab-ratios": Command("research.lab.ratios", "compare methods at equal compression ratios"),
    "recipe": Command("research.recipe.run", "retrofit a real model, from download to report"),
    "recipe-code": Command("research.recipe.library", "write Python's standard library as text"),
    "recipe-needles": Command("research.recipe.needles", "hide needles in prompts of each length"),
    "recipe-prompts": Command("research.recipe.prompts", "write instructions for a model"),
    "recipe-sweep": Command("research.recipe.sweep", "compare settings of a retrofit"),
    "retention": Command("research.retention.run", "show which tokens each KV head keeps"),
    "policies": Command("research.policies.run", "compare all cache policies at equal ratios"),
    "ablations": Command("research.ablations", "evaluate the ablation experiments"),
    "prompt-kl": Command("research.prompt_kl", "compare exports on the prompts of a task"),
    "wall-clock": Command("research.wall_clock", "measure accuracy against seconds"),
    "exam": Command("research.exam", "solve exam problems greedily"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    lines = [f"  {name:<16} {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m research",
        description=__doc__,
        epilog="\n".join(["commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help="command, listed below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    args = parser.parse_args(arguments)
    register()
    code: int = import_module(COMMANDS[args.name].module).main(args.arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
