"""Loading of models: tied heads, export formats, decision projections, refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.hf.config_json import to_hf_config
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method.visibility import visible
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    WINDOW,
    random_ids,
    small_spec,
    tiny_architecture,
    varied_weights,
)


def projection_folder(path, family="qwen3", *, flag=True, tensors=True):
    """Write a folder in NVIDIA's layout whose decisions come from `dms_proj_alpha`."""
    a = tiny_architecture(family)
    weights = varied_weights(a, 0)
    draw = torch.Generator().manual_seed(7)
    for layer in range(a.num_layers if tensors else 0):
        at = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        weights[f"{at}.weight"] = torch.randn(2, a.hidden_size, generator=draw) * 0.3
        weights[f"{at}_norm.weight"] = 1 + 0.2 * torch.randn(a.hidden_size, generator=draw)
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    config = {**to_hf_config(a), "dms_window_size": WINDOW, "dms_separate_alpha": flag}
    (path / "config.json").write_text(json.dumps(config))
    return path, a, weights


def projection_forward(a, weights, ids, monkeypatch):
    """Compute the dense model in float64, independently, masked by its decision projection."""
    spec = small_spec("dms_nvidia")
    residual, decided = [], []

    def norm(x, weight, a, inner=hf._norm):
        if weight.shape[0] == a.hidden_size:
            residual.append(x)
        return inner(x, weight, a)

    def attention(x, w, a, s):
        scale, bias = w("dms_proj_alpha_norm.weight"), w("dms_proj_alpha.weight")
        source = residual[-1]
        source = source * (source.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
        decision = 100.0 * (source @ bias.T).T - 5.0
        decided.append(decision)
        states = []
        for n, heads in (("q", 4), ("k", 2), ("v", 2)):
            y = (x @ w(f"{n}_proj.weight").T).view(len(x), heads, 8)
            y = y if n == "v" else hf._rotate(norm(y, w(f"{n}_norm.weight"), a), a)
            states.append(y.transpose(0, 1).repeat_interleave(4 // heads, 0))
        q, k, v = states
        hidden = ~visible(decision > 0, spec).repeat_interleave(2, 0)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w("o_proj.weight").T, decision

    monkeypatch.setattr(hf, "_norm", norm)
    monkeypatch.setattr(hf, "_attention", attention)
    logits, decisions = hf._forward(weights, a, spec, torch.tensor(ids))
    monkeypatch.undo()
    return logits, decisions


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_decision_projection(tmp_path, monkeypatch, chunk):
    directory, a, weights = projection_folder(tmp_path / "decision_projection")
    ids = random_ids(70, seed=4)
    expected, decisions = projection_forward(a, weights, ids, monkeypatch)
    assert 0.3 < (decisions > 0).double().mean() < 0.7
    llm = LLM(directory, prefill_chunk=chunk)
    torch.testing.assert_close(llm.logits(ids).double(), expected, atol=1e-4, rtol=1e-4)
    assert llm.kv.cr_factor > 1.2


def test_decision_projection_weights_and_flag_go_together(tmp_path):
    with pytest.raises(ValueError, match="dms_separate_alpha"):
        LLM(projection_folder(tmp_path / "a", flag=False)[0])
    with pytest.raises(ValueError, match=r"no tensor .*dms_proj_alpha"):
        LLM(projection_folder(tmp_path / "b", tensors=False)[0])


def test_tied_head(folder, assert_greedy):
    directory = folder("qwen3", small_spec("dms"), tied=True)
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    output = LLM(directory).generate(random_ids(20), greedy)[0]
    assert_greedy(directory, random_ids(20), output.outputs[0].token_ids)


def test_a_missing_tensor(folder, tmp_path):
    copy = shutil.copytree(folder("llama", None), tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor model\.norm\.weight"):
        LLM(copy)
