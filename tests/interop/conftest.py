"""Tiny exports for the other projects, and the same text through this project's compact cache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dms_train.export.writer import write_export
from dms_train.hf.formats import default_format
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache_builder import build_cache
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.loader import load_model
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.local_layers import with_windows
from dms_train.inference.policies.registry import build_policy
from dms_train.method.dms.spec import DMSSpec
from tests.unit.inference.conftest import random_ids, tiny_architecture, varied_weights

HERE = Path(__file__).parent
LENGTH = 70
TEXT = random_ids(LENGTH, seed=4)
TOLERANCE = 1e-5  # of the largest logit

Result = dict[str, Tensor]


def variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set; docs/results.md, 'Other projects' code', describes how")
    return value


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Result]]:
    """(worker file, variable of the clone, folder in it, {name: job}) -> {name: tensors}.

    All jobs run in one process of the other project's Python.
    """

    def _work(worker: str, clone: str, below: str, jobs: dict[str, dict]) -> dict[str, Result]:
        python, root = variable("DMS_INTEROP_PYTHON"), Path(variable(clone)).resolve() / below
        out = tmp_path_factory.mktemp("interop")
        listed = [{**job, "out": str(out / name)} for name, job in jobs.items()]
        (out / "jobs.json").write_text(json.dumps(listed))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "standins"), str(root)]),
            "TORCHDYNAMO_DISABLE": "1",
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [python, str(HERE / worker), str(out / "jobs.json")],
            env=environment,
            cwd=out,
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-1500:]
        return {name: load_file(out / name) for name in jobs}

    return _work


def export(path: Path, family: str, spec: DMSSpec | None, **sizes: Any) -> str:
    """A random model as the trainer would export it: bfloat16, half of all tokens evicted."""
    a = replace(tiny_architecture(family), **sizes)
    write_export(
        path,
        architecture=a,
        spec=spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.bfloat16,
        export_format="dms" if spec is None else default_format(spec),
        weights=varied_weights(a, 0).items(),
        source_dir=None,
        selftest=None,
        block_size=4,
        provenance={},
    )
    return str(path)


class _Recorder:
    """A cache that also records the decisions it receives."""

    def __init__(self, cache: Any, layers: int) -> None:
        self._cache = cache
        self.decisions: list[list[Tensor]] = [[] for _ in range(layers)]

    def step(self, layer: int, step: AttentionStep) -> Any:
        decisions = step.decisions()
        if decisions is not None:  # a layer with a window makes none
            self.decisions[layer].append(decisions[0])
        return self._cache.step(layer, step)


@torch.no_grad()
def ours(
    directory: str | Path,
    tokens: list[int],
    prompt: int,
    *,
    dtype: str = "float32",
    policy: str = "auto",
    **overrides: Any,
) -> Result:
    """Prefill and decode on the compact cache.

    Args:
        directory: The model.
        tokens: The text.
        prompt: Tokens of it that are prefilled.
        dtype: Compute dtype.
        policy: As in `EngineOptions`.
        **overrides: Values that replace the specification's.

    Returns:
        logits [T, vocab]; decisions [layers, kv_heads, T]; live [T - prompt + 1, layers, kv_heads].
    """
    model = load_model(Path(directory), dtype=dtype)
    assert model.spec is not None
    spec = model.spec.override(**overrides)
    layers = model.architecture.attention_layers
    for number in model.architecture.method_layers:
        model.decoder.layers[number].self_attn.spec = spec
    options = EngineOptions(max_num_seqs=1, page_slots=4, slab_pages=8)
    windows = [layer.window for layer in layers]
    cache = build_cache(
        model, with_windows(build_policy(policy, {}, spec), policy, windows), options
    )
    recorder = _Recorder(cache, model.architecture.num_layers)
    rows, logits, live, seen = torch.tensor([0]), [], [], 0
    for part in [tokens[:prompt], *([token] for token in tokens[prompt:])]:
        position = torch.arange(seen, seen + len(part))[None]
        batch = TokenBatch.rectangular(torch.tensor([part]), position, rows)
        hidden, _ = model.decoder(batch, recorder)
        logits.append(model.decoder.logits(hidden))
        live.append(cache.live(rows)[:, 0].clone())
        seen += len(part)
    return {
        "logits": torch.cat(logits),
        "decisions": torch.stack([torch.cat(part, -1) for part in recorder.decisions if part]),
        "live": torch.stack(live),
    }


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference of logits, of the largest logit."""
    assert found.shape == expected.shape
    return ((found.double() - expected.double()).abs().max() / expected.abs().max()).item()


def assert_same(theirs: Result, mine: Result, what: str, least: float = 0.3) -> None:
    """Logits, decisions and live tokens from the first one that both have; prints the distance.

    At least this share of all tokens must have been evicted at the end.
    """
    logits = difference(mine["logits"][-len(theirs["logits"]) :], theirs["logits"])
    evicted = 1 - (theirs["live"][-1].double().mean() / len(mine["logits"])).item()
    print(f"{what}: largest relative difference {logits:.1e}, evicted {evicted:.2f}")
    assert evicted >= least
    assert torch.equal(mine["decisions"], theirs["decisions"])
    assert torch.equal(mine["live"][-len(theirs["live"]) :], theirs["live"])
    assert logits <= TOLERANCE
