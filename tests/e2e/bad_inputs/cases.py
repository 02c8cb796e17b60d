"""A case of bad input, how it is run, and the changes that several topics share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import refusals
from tests.support.disks import CannotArrange
from tests.support.refusals import Runner, Workspace, run_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of bad input.

    Attributes:
        done: Action of the user, printed when the case fails.
        arrange: Damages a workspace and returns the command.
        kind: Beginning of the line on stderr that the case is about: the class of the error.
        facts: What this line must contain: key, value, and how to fix it.
        code: Exit code.
        lines: Lines on stderr that are no progress.
        runner: How the command is started.
        changes: Patterns of the paths that the command may change; nothing else may differ.
        starts: Whether the problem shows only after processes have met.
        after: Further checks.
    """

    done: str
    arrange: Callable[[Workspace], list[str]]
    kind: str
    facts: tuple[str, ...]
    code: int = 2
    lines: int = 1
    runner: Runner = run_here
    changes: tuple[str, ...] = ()
    starts: bool = False
    after: Callable[[Workspace], None] | None = None


def train(*overrides: str) -> Callable[[Workspace], list[str]]:
    return lambda workspace: workspace.train(*overrides)


def damaged(
    damage: Callable[[Workspace], object], *overrides: str, finished: bool = False
) -> Callable[[Workspace], list[str]]:
    """Damage an input, then train; overrides may name `{workspace.model}` and the like."""

    def arrange(workspace: Workspace) -> list[str]:
        if finished:
            workspace.finish_run()
        damage(workspace)
        return workspace.train(*(text.format(workspace=workspace) for text in overrides))

    return arrange


def command(
    *words: str, damage: Callable[[Workspace], object] | None = None, finished: bool = False
) -> Callable[[Workspace], list[str]]:
    """Damage an input, then run another command."""

    def arrange(workspace: Workspace) -> list[str]:
        if finished:
            workspace.finish_run()
        if damage is not None:
            damage(workspace)
        return [word.format(workspace=workspace) for word in words]

    return arrange


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def edit_weights(workspace: Workspace, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = workspace.model / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


VALIDATED = (
    "stage.run=[zero_neuron,retrofit,export,validate_export]",
    "stage.validate_export.samples=2",
)


def file_in_place_of_run(workspace: Workspace) -> None:
    workspace.run.write_text("a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one case: messages with named paths, and files touched without permission."""

    messages: list[str]
    code: int
    touched: list[str]
    started: bool
    stderr: str


def answer(case: Case, workspace: Workspace) -> Answer:
    """Arrange a case and run its command."""
    words = case.arrange(workspace)
    before = refusals.listing(workspace.folder)
    outcome = case.runner(words)
    return Answer(
        messages=[workspace.named(line) for line in outcome.messages],
        code=outcome.code,
        touched=refusals.touched(before, refusals.listing(workspace.folder), case.changes),
        started=outcome.started,
        stderr=outcome.stderr,
    )


def message_of(case: Case, found: Answer) -> str:
    """The message that the case is about; empty when there is none."""
    fitting = (
        line
        for line in found.messages
        if line.startswith(case.kind) and all(fact in line for fact in case.facts)
    )
    return next(fitting, "")


def check(case: Case, workspace: Workspace) -> None:
    """Run a case: one line with kind and facts, the exit code, and nothing lost."""
    try:
        found = answer(case, workspace)
    except CannotArrange as reason:
        pytest.skip(str(reason))
    assert message_of(case, found), f"{case.done}: {found.stderr}"
    assert found.code == case.code, found.stderr
    assert len(found.messages) == case.lines, found.stderr
    assert "Traceback" not in found.stderr
    assert found.touched == []
    assert found.started == case.starts
    if case.after is not None:
        case.after(workspace)
