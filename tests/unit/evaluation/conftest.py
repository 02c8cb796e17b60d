"""Tiny exports with the exam sheets' tokenizer, and the masked models to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dms_train.data.batches import Sample
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.evaluation.measure import EvaluationTarget
from dms_train.export.writer import write_export
from dms_train.families import LayerAttention
from dms_train.hf.formats import default_format
from dms_train.hf.selftest import SelfTest
from dms_train.method.base import MethodSpec
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    random_ids,
    small_spec,
    tiny_architecture,
    varied_weights,
)

load = hf.load
LENGTH, COUNT = 90, 3
SPEC = small_spec("dms")


def architecture():
    return replace(tiny_architecture("llama"), vocab_size=50)


def windowed_architecture():
    """A layer that reads 9 tokens, then one that reads all."""
    base = 1e4
    layers = LayerAttention(rotary_base=base, window=9), LayerAttention(rotary_base=base)
    return replace(tiny_architecture("qwen3"), vocab_size=50, num_layers=2, layers=layers)


def write_model(
    path: Path, spec: MethodSpec | None, seed: int, tokenizer: Path, selftest=None, a=None
):
    a = a or architecture()
    write_export(
        path,
        architecture=a,
        spec=spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms" if spec is None else default_format(spec),
        weights=varied_weights(a, seed).items(),
        source_dir=tokenizer,
        selftest=selftest,
        provenance={},
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_exam_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def target(tmp_path_factory, tokenizer, load) -> EvaluationTarget:
    """Return a specification of DMS."""
    return recorded_target(tmp_path_factory.mktemp("models"), SPEC, tokenizer, load)


def recorded_target(root: Path, spec: MethodSpec, tokenizer: Path, load) -> EvaluationTarget:
    """An export with the self-test of its own modelling code, and another model as teacher."""
    write_model(root / "teacher", None, 1, tokenizer)
    write_model(root / "plain", spec, 0, tokenizer)
    ids = torch.tensor(random_ids(80, vocabulary=50))
    model = load(root / "plain")
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    decisions = getattr(model, f"{spec.kind}_decision_logits")(ids[None])[:, 0]
    recorded = SelfTest(input_ids=ids, decision_logits=decisions, logits=logits, dtype="float32")
    write_model(root / "export", spec, 0, tokenizer, recorded)
    return EvaluationTarget(
        export=root / "export", teacher=root / "teacher", spec=spec, device="cpu"
    )


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    """Random text; the loss of some positions does not count."""
    drawn = []
    for seed in range(COUNT):
        ids = torch.tensor(random_ids(LENGTH + 1, seed=seed, vocabulary=50))
        mask = torch.ones(LENGTH)
        mask[: 7 * seed] = 0
        drawn.append(Sample(ids[:-1], ids[1:], mask))
    return drawn
