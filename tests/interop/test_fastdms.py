"""Exports in FastDMS' own engine, and what its trainer saves here.

The engine computes in the dtype of config.json. In float32 its RMSNorm overwrites the residual
stream, and bfloat16 rounds differently in each implementation; so exact comparisons give it
float64, where norms and attention still round to float32, and ours runs in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dms_train.hf.formats import read_spec
from dms_train.hf.tokenizer_files import read_tokenizer
from dms_train.method.spec import PRESETS
from tests.interop.conftest import TEXT, TOLERANCE, assert_same, difference, export, ours, variable

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "dms.md"
WINDOW = 8
PROMPTS = (1, WINDOW + 1)  # longer ones it prefills densely
LONG = 40
FAMILIES = ("llama", "qwen3")
# Its kernels rotate queries from head size 32 on; a small base shows the eviction channel after
# RoPE.
SIZES = {"hidden_size": 64, "kv_channels": 32, "rotary_base": 100.0}
SHORT = 30  # Triton's interpreter is slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: directory}; `trained` ones are written by its trainer."""
    root = tmp_path_factory.mktemp("models")
    spec = PRESETS["dms_fastdms"].override(window=WINDOW)
    found = {}
    for family in FAMILIES:
        sizes = {**SIZES, "tie_word_embeddings": family == "qwen3"}
        found[family] = export(root / family, family, spec, **sizes)
        found[f"dense {family}"] = export(root / f"dense_{family}", family, None, **sizes)
        found[f"trained {family}"] = str(root / f"trained_{family}" / "final")
    return found


@pytest.fixture(scope="module")
def theirs(work, folders):
    """Everything FastDMS computes for this file, in one process."""
    jobs = {}
    for family in FAMILIES:
        trained = folders[f"trained {family}"]
        jobs[f"train {family}"] = {
            "do": "train",
            "base": folders[f"dense {family}"],
            "output": str(Path(trained).parent),
            "window": WINDOW,
        }
        run = {"do": "run", "tokens": TEXT, "dtype": "float64", "prompt": 1, "kernels": False}
        jobs[f"trained {family}"] = {**run, "model": trained}
        run["model"] = folders[family]
        for prompt in PROMPTS:
            jobs[f"{family} {prompt}"] = {**run, "prompt": prompt}
        jobs[f"{family} kernels"] = {**run, "kernels": True, "expiry": "1"}
        jobs[f"{family} long"] = {**run, "prompt": LONG, "tokens": TEXT[:LONG]}
        run["tokens"] = TEXT[:SHORT]
        jobs[f"{family} auto"] = {**run, "expiry": "auto"}
        jobs[f"{family} bfloat16"] = {**run, "dtype": "bfloat16"}
    return work("fastdms_worker.py", "DMS_FASTDMS", ".", jobs)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_our_export_in_its_engine(theirs, folders, family, prompt):
    name = f"{family} {prompt}"
    assert_same(theirs[name], ours(folders[family], TEXT, prompt), name)


def test_a_trained_export_in_its_engine(work):
    """DMS_INTEROP_EXPORT, an export of a real model; the text is longer than its window."""
    model = variable("DMS_INTEROP_EXPORT")
    length = read_spec(model).window + 64
    text = read_tokenizer(Path(model)).encode(DOCUMENT.read_text(encoding="utf-8")).ids[:length]
    run = {"do": "run", "model": model, "tokens": text, "dtype": "float64", "kernels": False}
    theirs = work("fastdms_worker.py", "DMS_FASTDMS", ".", {"export": {**run, "prompt": 1}})
    assert_same(theirs["export"], ours(model, text, 1), model, least=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_its_trainer_saves(theirs, folders, family):
    name = f"trained {family}"
    assert_same(theirs[name], ours(folders[name], TEXT, 1), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_kernels(theirs, folders, family):
    """Decisions, packing and expiry in Triton too, not only attention."""
    assert_same(theirs[f"{family} kernels"], ours(folders[family], TEXT, 1), f"{family} kernels")


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_inside_a_long_prompt(theirs, folders, family):
    """Up to the prompt's end it is the model without eviction; then it drops what was marked."""
    dense = ours(folders[family], TEXT, LONG, policy="keep_all")
    masked = ours(folders[family], TEXT, LONG)
    first = theirs[f"{family} long"]["logits"][0]
    assert difference(dense["logits"][LONG - 1], first) <= TOLERANCE
    assert difference(masked["logits"][LONG - 1], first) > 100 * TOLERANCE
    # The first layer decides before any attention.
    assert torch.equal(masked["live"][0, 0], theirs[f"{family} long"]["live"][0, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_its_default_expires_late(theirs, folders, family):
    """By default the engine drops tokens only once per window."""
    live = theirs[f"{family} auto"]["live"]
    exact = ours(folders[family], TEXT[:SHORT], 1)["live"]
    assert (live[:, 0] >= exact[:, 0]).all()
    assert not torch.equal(live, exact)


@pytest.mark.parametrize(
    "change",
    [{"window": WINDOW + 1}, {"decision_shift": 1}, {"channel": 0}, {"clear_after_rope": True}],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_convention_disagrees(theirs, folders, family, change):
    mine = ours(folders[family], TEXT, 1, **change)
    assert difference(mine["logits"], theirs[f"{family} 1"]["logits"]) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_as_stored(theirs, folders, family):
    """In bfloat16 both round, each in its own places: nearly all decisions agree."""
    mine = ours(folders[family], TEXT[:SHORT], 1, dtype="bfloat16")
    alike = (mine["decisions"] == theirs[f"{family} bfloat16"]["decisions"]).double().mean().item()
    print(f"{family} bfloat16: decisions alike {alike:.3f}")
    assert alike > 0.95
