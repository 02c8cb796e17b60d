"""Perplexity through the cache is that of a loop in float64 with the same evictions."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dms_train.cli.evaluate import main
from dms_train.data_prep.exam_sheets import problem
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.evaluation.tasks.prompts import load_tokenizer
from tests.unit.evaluation.conftest import (
    SPEC,
    architecture,
    windowed_architecture,
    write_model,
)
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import varied_weights

LENGTH, PROMPT, WINDOWS = 70, 41, 3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("perplexity")
    write_exam_tokenizer(root / "tokenizer")
    write_model(root / "export", SPEC, 0, root / "tokenizer")
    write_model(root / "original", None, 0, root / "tokenizer")
    draw = random.Random(0)
    lines = [problem(draw, "held_out").question for _ in range(20)]
    (root / "text.txt").write_text("\n".join(lines)[: LENGTH * WINDOWS + 20])
    return root


def words(workspace: Path, model: str, *further: str) -> list[str]:
    return [
        *("perplexity", str(workspace / model), "--text", str(workspace / "text.txt")),
        *("--length", str(LENGTH), "--prompt", str(PROMPT), "--prefill-chunk", "16"),
        *("--output", str(workspace / "out" / f"{model}.json"), *further),
    ]


def exact(workspace: Path, model: str) -> list[list[float]]:
    """Negative log-likelihoods of the tokens of each window, without the first."""
    a, spec = architecture(), SPEC if model == "export" else None
    ids = load_tokenizer(workspace / model).encode((workspace / "text.txt").read_text())
    values = []
    for start in range(0, LENGTH * WINDOWS, LENGTH):
        window = torch.tensor(ids[start : start + LENGTH])
        logits = (
            hf._forward(varied_weights(a, 0), a, spec, window)[0]
            if spec is not None
            else AutoModelForCausalLM.from_pretrained(workspace / model)(window[None])
            .logits[0]
            .double()
        )
        scores = logits[:-1].log_softmax(-1).gather(1, window[1:, None])[:, 0]
        values.append((-scores).tolist())
    return values


def test_perplexity_is_that_of_a_loop_in_float64(workspace, capsys):
    assert main(words(workspace, "export", "--original", str(workspace / "original"))) == 0
    printed = capsys.readouterr().out
    found = json.loads((workspace / "out" / "export.json").read_text())
    for name, model in (("model", "export"), ("original", "original")):
        with torch.no_grad():
            values = exact(workspace, model)
        for part, first in (("window", 0), ("continuation", PROMPT - 1)):
            given = found[name][part]
            per_window = [sum(row[first:]) / len(row[first:]) for row in values]
            assert given["per_window"] == pytest.approx(per_window, abs=1e-5)
            assert given["tokens"] == WINDOWS * (LENGTH - 1 - first)
            assert given["perplexity"] == pytest.approx(
                math.exp(sum(per_window) / WINDOWS), rel=1e-5
            )
    assert found["model"]["window"]["cr_factor"] > 1.3
    assert found["original"]["window"]["cr_factor"] == pytest.approx(1)
    above = found["model"]["window"]["nats"] - found["original"]["window"]["nats"]
    assert abs(above) > 0.001, "eviction changes nothing here"
    assert f"nats above {above:+.4f}" in printed


def test_progress_is_shown_in_a_terminal_only(workspace, monkeypatch):
    for terminal in (True, False):
        stderr = io.StringIO()
        stderr.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(words(workspace, "original", "--limit", "2")) == 0
        for part in ("window", "continuation"):
            assert (f"{part}: 100%" in stderr.getvalue()) == terminal


def test_a_policy_acts_on_the_model_only(workspace):
    given = ("--limit", "1", "--policy", "window", "--window", "8")
    assert main(words(workspace, "original", *given, "--original", f"{workspace}/original")) == 0
    found = json.loads((workspace / "out" / "original.json").read_text())
    assert found["original"]["windows"] == found["model"]["windows"] == 1
    assert found["original"]["continuation"]["cr_factor"] == pytest.approx(1)
    assert found["model"]["continuation"]["cr_factor"] > 3


def test_layers_with_a_window_do_not_count_as_compressed(workspace):
    tokenizer = workspace / "tokenizer"
    write_model(workspace / "windowed", None, 0, tokenizer, a=windowed_architecture())
    assert main(words(workspace, "windowed", "--limit", "1")) == 0
    found = json.loads((workspace / "out" / "windowed.json").read_text())["model"]
    assert found["window"]["cr_factor"] == found["continuation"]["cr_factor"] == 1.0


@pytest.mark.parametrize(
    ("further", "fact"),
    [
        (("--prompt", "70"), "--prompt 70: 1 to 69"),
        (("--limit", "0"), "--limit 0: at least 1"),
        (("--length", "1000"), "tokens, and a window has 1000; lower --length"),
    ],
)
def test_refusals(workspace, further, fact, capsys):
    assert main(words(workspace, "export", *further)) == 2
    assert fact in capsys.readouterr().err
