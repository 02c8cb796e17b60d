"""Runs cases of `parity_worker` and compares what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from tests.support import launch


class Outcome(NamedTuple):
    """Totals and gradients, by Hugging Face name, of one step."""

    totals: dict[str, float]
    gradients: dict[str, Tensor]

    @property
    def loss(self) -> float:
        return self.totals["token_loss"] + self.totals["aux_loss"]


def run(processes: int, cases: list[dict[str, Any]], folder: Path, timeout: float) -> None:
    """All cases in one launch."""
    listing = folder / f"cases{processes}.json"
    listing.write_text(json.dumps(cases))
    words = ("tests.support.parity_worker", str(listing), str(folder))
    launch.checked(launch.workers(processes, *words, timeout=timeout))


def read(folder: Path, name: str) -> Outcome:
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Outcome(json.loads(file.metadata()["totals"]), tensors)


def loss_difference(found: Outcome, expected: Outcome) -> float:
    """Relative."""
    return abs(found.loss - expected.loss) / abs(expected.loss)


def largest_difference(found: Outcome, expected: Outcome) -> float:
    """Of any element of a gradient, relative to the largest one of that gradient."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(
        ((found.gradients[name] - g).abs().max() / g.abs().max().clamp_min(1e-30)).item()
        for name, g in expected.gradients.items()
        if g.abs().max() > 0 or found.gradients[name].abs().max() > 0
    )


def largest_distance(found: Outcome, expected: Outcome) -> float:
    """Of any gradient, relative to its norm."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(
        ((found.gradients[name] - g).norm() / g.norm().clamp_min(1e-30)).item()
        for name, g in expected.gradients.items()
    )
