"""Query statistics against transformers' projections, and the command that writes them."""

from __future__ import annotations

import pytest
import torch

from dms_train.cli import calibrate
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.models.loader import load_model
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.triattention import QueryStatistics
from dms_train.inference.query_statistics import measure_queries
from tests.unit.inference.conftest import random_ids, small_spec, tiny_architecture


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_mean_query_and_norms_are_those_of_transformers(folder, load, family):
    """Two samples of unequal lengths; queries are taken after their norm, where there is one."""
    directory = folder(family, None)
    samples = [torch.tensor(random_ids(n, seed=n)) for n in (17, 9)]
    found = measure_queries(load_model(directory), samples)
    a = tiny_architecture(family)
    seen = [[] for _ in range(a.num_layers)]
    model = load(directory)
    for queries, layer in zip(seen, model.model.layers, strict=True):
        attention = layer.self_attn
        last = attention.q_norm if family == "qwen3" else attention.q_proj
        last.register_forward_hook(lambda _, __, out, queries=queries: queries.append(out))
    with torch.no_grad():
        for ids in samples:
            model(ids[None], use_cache=False)
    for layer, queries in enumerate(seen):
        flat = torch.cat([q.reshape(-1, a.num_attention_heads, a.kv_channels) for q in queries])
        torch.testing.assert_close(found.mean[layer], flat.mean(0), rtol=1e-4, atol=1e-5)
        half = a.kv_channels // 2
        norms = (flat[..., :half] ** 2 + flat[..., half:] ** 2).sqrt().mean(0)
        torch.testing.assert_close(found.norm[layer], norms, rtol=1e-4, atol=1e-5)


def test_the_eviction_channel_of_a_trained_model_does_not_count(folder):
    directory = folder("llama", small_spec("dms"))
    found = measure_queries(load_model(directory), [torch.tensor(random_ids(20))])
    firsts = found.mean.view(2, 2, 2, 8)[:, :, 0, 0]
    assert not firsts.any()
    assert found.mean.view(2, 2, 2, 8)[:, :, 1, 0].all()


def test_linear_attention_is_refused(folder):
    model = load_model(folder("qwen3_5_text", None))
    with pytest.raises(InferenceError, match="models with linear attention; use another policy"):
        measure_queries(model, [torch.tensor(random_ids(20))])


def test_the_command_writes_a_file_that_the_engine_reads(stories, tmp_path, capsys):
    text, file = tmp_path / "text.txt", tmp_path / "queries.safetensors"
    text.write_text("Once upon a time, there was a little girl. " * 20)
    words = [str(stories), str(file), "--text", str(text)]
    assert calibrate.main([*words, "--max-tokens", "100", "--seq-length", "40"]) == 0
    assert "queries of 100 tokens" in capsys.readouterr().out
    own = {"budget": 16, "interval": 4, "statistics": str(file)}
    outputs = LLM(stories, policy="triattention", policy_options=own).generate(
        "Once upon a time, there was a little girl. She liked to play in the park."
    )
    assert outputs[0].kv.live_tokens < 16 + 4 + 1
    assert calibrate.main([*words, "--seq-length", "0"]) == 2
    text.write_text("")
    assert calibrate.main(words) == 2


def test_wrong_files_are_refused(folder, tmp_path):
    with pytest.raises(InferenceError, match="needs statistics"):
        build_policy("triattention", {"budget": 4}, None)
    missing = {"budget": 4, "statistics": str(tmp_path / "none.safetensors")}
    with pytest.raises(InferenceError, match=r"none.safetensors: no file of query statistics"):
        build_policy("triattention", missing, None)
    other = QueryStatistics(
        mean=torch.zeros(2, 4, 6), norm=torch.zeros(2, 4, 3), frequency=torch.zeros(3)
    )
    other.save(tmp_path / "other.safetensors")
    own = {"budget": 4, "statistics": str(tmp_path / "other.safetensors")}
    llm = LLM(folder("llama", None), policy="triattention", policy_options=own)
    with pytest.raises(InferenceError, match="4 query heads of size 6, but layer 0"):
        llm.generate(random_ids(9))
