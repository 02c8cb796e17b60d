"""Exports, checkpoints and run folders of earlier versions load, and compute what they computed.

`tests/fixtures/format_1/README.md` states how the files were made. The expected logits come from
float64 models that share no code with this project.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dms_train import LLM, SamplingParams
from dms_train.app.start_point import described_model
from dms_train.app.verification import verify
from dms_train.checkpoints_tools import inspect_folder
from dms_train.mcore.checkpoints.state import read_state
from dms_train.mcore.errors import CheckpointError
from dms_train.method.base import SPEC_VERSION
from tests.support import launch

FIXTURE = launch.ROOT / "tests" / "fixtures" / "format_1"
EXPORTS = {"dms": FIXTURE / "dms/exports/final/hf", "dmc": FIXTURE / "dmc/exports/final/hf"}
CHECKPOINTS = {
    "dms": FIXTURE / "dms/checkpoints/step_00000005",
    "dmc": FIXTURE / "dmc/exports/final/megatron",
}
RESUMED_STEPS = (6, 7, 8)
MEASURED = ("loss", "kl", "aux_loss", "alpha", "cr", "grad_norm", "lr")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((FIXTURE / "expected.json").read_text())


def command(folder: Path, module: str, *arguments: str) -> str:
    """Run a command in `folder`; its messages."""
    done = launch.module(module, *arguments, folder=folder)
    launch.checked(done)
    return done.stderr


@pytest.mark.parametrize("method", EXPORTS)
def test_the_code_in_an_export_computes_the_stored_logits(
    method: str, expected: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        EXPORTS[method], trust_remote_code=True, dtype=torch.float32
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([expected["input_ids"]])).logits[0]
    torch.testing.assert_close(logits, torch.tensor(expected[method]["logits"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", EXPORTS)
def test_the_engine_generates_the_stored_tokens(method: str, expected: dict[str, Any]) -> None:
    llm = LLM(str(EXPORTS[method]), dtype="float32", device="cpu")
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": expected["input_ids"]}], greedy)[0]
    assert list(output.outputs[0].token_ids) == expected[method]["greedy"]


@pytest.mark.parametrize("method", EXPORTS)
def test_the_self_test_of_an_export_passes(method: str) -> None:
    report = verify(EXPORTS[method])
    assert report.passed
    assert report.decisions_flipped == 0
    assert report.logit_difference < 1e-4


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_checkpoint_is_exported(method: str, tmp_path: Path) -> None:
    out = tmp_path / "export"
    words = (str(CHECKPOINTS[method]), str(out), "--tokenizer-from", str(FIXTURE / "model"))
    command(tmp_path, "dms_train.checkpoints_tools.megatron_to_hf", *words)
    assert verify(out).passed
    if method == "dmc":  # the export of the same step
        before, now = (load_file(d / "model.safetensors") for d in (EXPORTS[method], out))
        assert before.keys() == now.keys()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_a_run_resumes_with_the_steps_and_weights_of_the_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "format_1"
    shutil.copytree(FIXTURE, folder)
    shutil.rmtree(folder / "dms" / "exports")
    (folder / "dms" / "metrics.jsonl").unlink()
    messages = command(folder, "dms_train", "--frozen", "dms/config.yaml")
    assert "resuming from dms/checkpoints/step_00000005" in messages
    before, now = (steps(root / "dms" / "metrics.jsonl") for root in (FIXTURE, folder))
    assert tuple(now) == RESUMED_STEPS
    for step in RESUMED_STEPS:
        for name in MEASURED:
            assert now[step][f"train/{name}"] == pytest.approx(
                before[step][f"train/{name}"], rel=1e-4
            ), (step, name)
    weights = load_file(folder / "dms/exports/final/hf/model.safetensors")
    for name, tensor in load_file(EXPORTS["dms"] / "model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)


def test_an_export_of_a_newer_version_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "newer"
    shutil.copytree(EXPORTS["dms"], export)
    config = json.loads((export / "config.json").read_text())
    config["dms"]["spec"] = {**config["dms"]["spec"], "version": 99, "unheard_of": 1}
    (export / "config.json").write_text(json.dumps(config))
    assert inspect_folder.main([str(export)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert str(export) in line
    assert "version 99" in line
    assert f"reads up to {SPEC_VERSION}; install a newer dms-train" in line


def test_a_checkpoint_of_a_newer_version_is_refused_in_one_line() -> None:
    path = CHECKPOINTS["dms"]
    state = read_state(path)
    assert described_model(path, state)[1].window == 8
    with pytest.raises(CheckpointError) as refused:
        described_model(path, {**state, "spec": {**state["spec"], "version": 99}})
    (line,) = str(refused.value).splitlines()
    assert str(path) in line
    assert line.endswith("install a newer dms-train")


def steps(metrics: Path) -> dict[int, dict[str, float]]:
    """The rows of training steps, by step."""
    rows = (json.loads(line) for line in metrics.read_text().splitlines())
    return {row["step"]: row for row in rows if "train/loss" in row}
