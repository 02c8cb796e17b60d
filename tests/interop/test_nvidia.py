"""Exports in NVIDIA's own DMS code, and its checkpoints here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from dms_train.cli.config_source import compose
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method.losses import kl_student_teacher
from dms_train.method.spec import PRESETS
from dms_train.training.stages import build_stages
from tests.interop.conftest import LENGTH, TEXT, TOLERANCE, assert_same, difference, export, ours

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

WINDOW, BLOCK = 8, 4
PROMPTS = (1, WINDOW + 1, 40, LENGTH - 1)
CHUNKED = (1, 7)
EOS = 5
RATIOS = {"initial_cr": 1.0, "final_cr": 16.0, "final_step": 510}
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
    jobs["recipe"] = {"do": "recipe", "eos": EOS, **RATIOS}
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


def test_our_preset_trains_as_its_recipe(theirs):
    """The values of its configuration file, its loss and its schedule, one step earlier."""
    root = Path(os.environ["DMS_MODEL_OPTIMIZER"]) / "experimental/dms/configs/qwen3_8b.yaml"
    stated = yaml.safe_load(root.read_text())
    ours = compose(["experiment=qwen3_8b_nvidia", "model.path=x", "data.paths=[y]"])
    method, optim, dms, trainer = ours.method, ours.optim, stated["dms"], stated["hf_trainer"]
    assert {key: dms[key] for key in RATIOS} == RATIOS
    assert (method.alpha_scale, method.alpha_offset, method.window, method.tau) == tuple(
        dms[key] for key in ("alpha_scale", "initial_alpha_offset", "window_size", "tau")
    )
    rates = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm")
    assert [trainer[key] for key in rates] == [
        *(optim.lr, optim.weight_decay, optim.adam_beta1, optim.adam_beta2, optim.clip_grad)
    ]
    assert ours.data.seq_length == stated["data"]["max_length"]
    retrofit, hold, _ = build_stages(ours.stage, optim.lr_warmup_steps)
    assert retrofit.steps + hold.steps == trainer["max_steps"]
    ratios = [retrofit.plan(0, step).target_cr for step in range(retrofit.steps)]
    assert ratios[:-1] == pytest.approx(theirs["recipe"]["ratios"][1:].tolist())
    assert ours.loss.kl_direction == "student_teacher"
    recipe = theirs["recipe"]
    counts = recipe["tokens"] != EOS
    loss = kl_student_teacher(recipe["student"].double(), recipe["teacher"].double())[counts].mean()
    assert recipe["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
