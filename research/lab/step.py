"""One command of the project, as a step of a lab or a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

# Options that do not change results, at any value.
_SAME_RESULTS = (
    *("--workers=", "--config-dir=", "model.max_num_seqs=", "data.micro_batch_size="),
    *("parallel.cuda_graph=", "model.cache_bytes=", "--cache-bytes="),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of this project.

    Attributes:
        name: Name of its log and its mark.
        words: Arguments of python; called when the steps that it needs have finished.
        needs: Names of those steps.
        ranks: Processes, one for each GPU that it takes; 1 shares a GPU with other commands.
        repeats: True if every call runs it.
    """

    name: str
    words: Callable[[], list[str]]
    needs: tuple[str, ...] = ()
    ranks: int = 1
    repeats: bool = False


def as_text(words: list[str]) -> str:
    """Return a command as the marks store it: without options that do not change its results."""
    return json.dumps([word for word in words if not word.startswith(_SAME_RESULTS)])
