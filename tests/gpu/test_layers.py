"""Transformer Engine's layers against megatron's own: same step, and checkpoints that move."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.families import FAMILIES

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine"),
]
ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "tests" / "golden" / "layer_names.json"
# Layers that wrote a checkpoint and layers that load it; `torch` is without Transformer Engine.
MOVES = (
    ("torch", "transformer_engine"),
    ("transformer_engine", "torch"),
    ("local", "transformer_engine"),
)


@pytest.fixture(scope="module")
def view() -> Iterator[object]:
    from dms_train.mcore import groups
    from dms_train.mcore.options import ParallelOptions

    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_local_layers(view, family: str) -> None:
    from dms_train.method.plan import StepPlan
    from tests.support import layers_worker, tiny

    found = []
    for layers in ("local", "transformer_engine"):
        engine = layers_worker.build(layers, family, view)
        plan = StepPlan(step=3, loss="lm", eviction="soft", channel_scale=0.0, target_cr=4.0)
        totals = engine.forward_backward(plan, tiny.microbatches(0, 1))
        found.append((totals.token_loss, engine.hf_gradients()))
    (loss, gradients), (te_loss, te_gradients) = found
    assert te_loss == pytest.approx(loss, rel=2e-3)
    for name, gradient in gradients.items():
        # its products of fp32 run on the tensor cores, with 10 bits of mantissa
        assert (te_gradients[name] - gradient).norm() <= 3e-2 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", json.loads(NAMES.read_text()))
def test_parameters_and_checkpoints_are_named_as_recorded(view, family: str) -> None:
    from tests.support import layers_worker

    engine = layers_worker.build("transformer_engine", family, view)
    assert layers_worker.recorded(engine) == json.loads(NAMES.read_text())[family]


def test_auto_takes_transformer_engine_and_logs_it(view) -> None:
    from tests.support import layers_worker

    described = layers_worker.build("auto", "llama", view).describe_layers()
    assert described.startswith("transformer_engine (version 2.")
    assert described.endswith("optimizer transformer_engine FusedAdam")


def run(kind: str, checkpoint: Path, out: Path, *more: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    out.mkdir()
    command = [sys.executable, "-m", "tests.support.layers_worker", kind, str(checkpoint), str(out)]
    done = subprocess.run(
        [*command, *more], cwd=ROOT, env=dict(os.environ), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    outcome = json.loads((out / "outcome.json").read_text())
    files = [load_file(out / f"{name}.safetensors") for name in ("before", "after")]
    stripped = [{n.partition(".")[2]: t for n, t in file.items()} for file in files]
    return {**outcome, "before": stripped[0], "after": stripped[1]}


@pytest.mark.timeout(600)
def test_a_checkpoint_resumes_with_other_layers(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:  # of processes, most of whose time is spent on imports
        sources = [source for source, _ in MOVES]
        written = list(pool.map(lambda k: run(k, tmp_path / k, tmp_path / f"{k}_out"), sources))
        read = pool.map(
            lambda m: run(m[1], tmp_path / m[0], tmp_path / "_to_".join(m), "--load"), MOVES
        )
    for move, wrote, goes_on in zip(MOVES, written, read, strict=True):
        assert goes_on["loss"] == pytest.approx(wrote["loss"], rel=5e-3), move
        moved = apart = 0.0
        for name, before in wrote["before"].items():
            assert torch.equal(goes_on["before"][name], before), (move, name)
            moved += (wrote["after"][name] - before).double().square().sum().item()
            apart += (goes_on["after"][name] - wrote["after"][name]).double().square().sum().item()
        # Adam without its moments would take a step of another size in every direction
        assert apart**0.5 <= 0.1 * moved**0.5, move
