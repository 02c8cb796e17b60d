"""Exports in NVIDIA's own DMS code, and its checkpoints here."""

from __future__ import annotations

import pytest
import torch

from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method.spec import PRESETS
from tests.interop.conftest import LENGTH, TEXT, TOLERANCE, assert_same, difference, export, ours

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

WINDOW, BLOCK = 8, 4
PROMPTS = (1, WINDOW + 1, 40, LENGTH - 1)
CHUNKED = (1, 7)
WRITTEN = ("borrowed", "decision_projection")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: directory}; the first two are ours, the others are for NVIDIA's code to write."""
    root = tmp_path_factory.mktemp("models")
    spec = PRESETS["dms_nvidia"].override(window=WINDOW)
    return {
        "exported": export(root / "exported", "qwen3", spec),
        "tied": export(root / "tied", "qwen3", spec, tie_word_embeddings=True),
        **{name: str(root / name) for name in WRITTEN},
    }


@pytest.fixture(scope="module")
def theirs(work, folders):
    """Everything NVIDIA's code computes for this file, in one process."""
    exact = {"do": "run", "tokens": TEXT, "dtype": "float32"}
    jobs = {
        f"write {name}": {
            "do": "write",
            "directory": folders[name],
            "separate": name == "decision_projection",
            "window": WINDOW,
            "block": BLOCK,
        }
        for name in WRITTEN
    }
    for name, directory in folders.items():
        for prompt in PROMPTS:
            jobs[f"{name} {prompt}"] = {**exact, "model": directory, "prompt": prompt}
    stored = {"model": folders["exported"], "prompt": 40}
    for chunk in CHUNKED:
        jobs[f"chunk {chunk}"] = {**exact, **stored, "dms_chunked_prefill": chunk}
    jobs["bfloat16"] = {**exact, **stored, "dtype": "bfloat16"}
    jobs["wider"] = {**exact, **stored, "dms_window_size": WINDOW + 1}
    jobs["greedy"] = {
        "do": "generate",
        "model": folders["exported"],
        "tokens": TEXT[:20],
        "dtype": "float32",
        "count": 40,
    }
    return work("nvidia_worker.py", "DMS_MODEL_OPTIMIZER", "experimental/dms", jobs)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["exported", "tied", *WRITTEN])
def test_same_computation(theirs, folders, name, prompt):
    """Our export in its code; its checkpoint, eviction channel or decision projection, in ours."""
    assert_same(theirs[f"{name} {prompt}"], ours(folders[name], TEXT, prompt), f"{name} {prompt}")


@pytest.mark.parametrize("chunk", CHUNKED)
def test_its_chunked_prefill(theirs, folders, chunk):
    assert_same(theirs[f"chunk {chunk}"], ours(folders["exported"], TEXT, 40), f"chunk {chunk}")


def test_greedy(theirs, folders):
    llm = LLM(folders["exported"], dtype="float32")
    done = llm.generate(TEXT[:20], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert done[0].outputs[0].token_ids == theirs["greedy"]["tokens"].tolist()
    assert len(set(done[0].outputs[0].token_ids)) >= 5


@pytest.mark.parametrize(
    "change",
    [{"window": WINDOW + 1}, {"decision_shift": 0}, {"channel": 0}, {"clear_after_rope": False}],
    ids=str,
)
def test_another_convention_disagrees(theirs, folders, change):
    mine = ours(folders["exported"], TEXT, 40, **change)
    assert difference(mine["logits"], theirs["exported 40"]["logits"]) > 100 * TOLERANCE


def test_its_other_window_is_our_other_window(theirs, folders):
    assert_same(theirs["wider"], ours(folders["exported"], TEXT, 40, window=WINDOW + 1), "wider")


def test_as_stored(theirs, folders):
    """In bfloat16 both round, each in its own places: nearly all decisions agree."""
    mine = ours(folders["exported"], TEXT, 40, dtype="bfloat16")
    alike = (mine["decisions"] == theirs["bfloat16"]["decisions"]).double().mean().item()
    print(f"bfloat16: decisions alike {alike:.3f}")
    assert alike > 0.95
    assert torch.isfinite(theirs["bfloat16"]["logits"]).all()
