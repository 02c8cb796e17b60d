"""Tiny exports that evict about half of all tokens, and the masked model to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.hf.formats import read_spec
from dms_train.inference import prompt_graphs
from dms_train.method.base import MethodSpec
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.spec import PRESETS
from tests.unit.hf import conftest as hf

WINDOW = 8
stories = hf.stories
load = hf.load


def small_spec(preset: str, **overrides) -> DMSSpec:
    return PRESETS[preset].override(window=WINDOW, **overrides).spec


def tiny_architecture(family: str, tied: bool = False):
    a = hf._architecture(family)
    return replace(a, max_position_embeddings=1024, tie_word_embeddings=tied)


def varied_weights(a, seed: int):
    """Draw random weights that keep greedy continuations from repeating one token."""
    # with these all families evict a third to a half
    drawn = {"glm4": 3, "gpt_oss": 8, "qwen3_moe": 4}.get(a.family, 2)
    weights = hf._weights(a, seed + drawn)
    weights["model.embed_tokens.weight"] *= 0.25
    if not a.tie_word_embeddings:
        weights["lm_head.weight"] -= 4 * weights["model.embed_tokens.weight"] * a.hidden_size**-0.5
    return weights


def write_folder(path: Path, a, spec: MethodSpec | None, weights) -> None:
    """Write an export in float32, of a dense model if there is no method."""
    write_export(
        path,
        architecture=a,
        spec=spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms" if spec is None else spec.kind,
        weights=weights.items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )


@pytest.fixture(params=["chunk after chunk", "one pass"])
def prompts_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with both ways in which the kernels compute the prompts of a step."""
    if request.param == "one pass":
        monkeypatch.setattr(prompt_graphs, "_MOST", 0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, spec or None, seed=0, tied=False) -> export directory, written once."""
    known: dict[tuple, Path] = {}

    def _folder(family: str, spec: MethodSpec | None, seed: int = 0, tied: bool = False) -> Path:
        key = (family, spec, seed, tied)
        if key not in known:
            a = tiny_architecture(family, tied)
            known[key] = tmp_path_factory.mktemp("model") / "export"
            write_folder(known[key], a, spec, varied_weights(a, seed))
        return known[key]

    return _folder


@pytest.fixture(scope="session")
def oracle(load) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """(directory, ids) -> logits [T, vocab] and decisions bool [L, H, T] of one masked forward."""
    models: dict[Path, object] = {}

    @torch.no_grad()
    def _oracle(directory: Path, ids: list[int]):
        if directory not in models:
            models[directory] = load(directory)
        model, tokens = models[directory], torch.tensor([ids])
        logits = model(tokens, use_cache=False).logits[0]
        if read_spec(directory) is None:
            return logits, None
        return logits, model.dms_decision_logits(tokens)[:, 0] > 0

    return _oracle


@pytest.fixture(scope="session")
def compared():
    """Counts cases and tokens, printed at the end."""
    counts = {"cases": 0, "tokens": 0, "near_ties": 0}
    yield counts
    print(f"\ngreedy parity: {counts}")


@pytest.fixture(scope="session")
def assert_greedy(oracle, compared):
    """(directory, prompt, output) checks each token against the masked model's choice."""

    def _assert(directory: Path, prompt: list[int], output: list[int]):
        logits, decisions = oracle(directory, prompt + output)
        best = logits[len(prompt) - 1 : -1].topk(2)
        for step, token in enumerate(output):
            if token == int(best.indices[step, 0]):
                continue
            gap = (best.values[step, 0] - best.values[step, 1]).item()
            assert gap < 1e-4, f"token {step}: {token}, masked {best.indices[step, 0]}, gap {gap}"
            compared["near_ties"] += 1
        compared["cases"] += 1
        compared["tokens"] += len(output)
        return decisions

    return _assert


def random_ids(length: int, seed: int = 0, vocabulary: int = 61) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=draw).tolist()
