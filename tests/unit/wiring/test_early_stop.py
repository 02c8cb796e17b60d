"""A run that stops at its KL limit exports the weights of the ratio that it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dms_train.evaluation.run_report import read_run, render
from dms_train.hf.formats import read_target_cr
from dms_train.training import loop
from tests.support import launch
from tests.support.wiring import Built

SHORT = {
    "model.path": str(launch.ROOT / "dms_train" / "assets" / "exam_teacher"),
    "data.seq_length": 96,
    "stage.run": ["zero_neuron", "retrofit", "export"],
    "optim.lr": 1e-3,
    "run.eval_samples": 4,
}


def finished(run: Built) -> Path:
    """Run all stages; the folder of the exports."""
    loop.run(run.prepared.stages, replace(run.prepared.start.state), run.components)
    return run.prepared.folder / "exports"


def evaluated(folder: Path) -> list[float]:
    """KL of the evaluations of the annealing, one at each ratio."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/kl"] for row in rows if "eval/target_cr" in row]


def test_the_final_export_has_the_weights_of_the_kept_ratio(built: Callable[..., Built]) -> None:
    whole = built(**SHORT, **{"run.eval_interval": 4})
    exports = finished(whole)
    within, above = evaluated(whole.prepared.folder)
    assert within < above
    limit: dict[str, Any] = {"stage.retrofit.max_kl": (within + above) / 2}
    run = built(**SHORT, **limit)
    stopped = finished(run)
    assert sorted(path.name for path in stopped.iterdir()) == ["cr2", "final"]
    assert evaluated(run.prepared.folder) == [within, above]
    expected = load_file(exports / "cr2/hf/model.safetensors")
    found = load_file(stopped / "final/hf/model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read_target_cr(stopped / "final/hf") == 2.0
    sentence = f"the validation KL {above:.4g} nats/token at ratio 3 was above the limit of"
    assert sentence in (stopped / "final/hf/README.md").read_text()
    assert sentence not in (stopped / "cr2/hf/README.md").read_text()
    assert sentence in render(read_run(run.prepared.folder))
