"""The real 260k-parameter Llama, with its eviction channel put to use."""

from __future__ import annotations

import json

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.json_files import read_config
from dms_train.hf.weight_reader import WeightReader
from dms_train.method.decisions import hard_decisions


@pytest.fixture
def weights(stories):
    reader = WeightReader(stories)
    return {name: reader.get(name) for name in reader.names()}


def write(out, stories, weights, spec, **overrides):
    write_export(
        out,
        architecture=from_hf_config(read_config(stories)),
        spec=spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms",
        weights=weights.items(),
        source_dir=stories,
        selftest=None,
        provenance={},
        **overrides,
    )
    return out


def test_dense_export_is_the_model(stories, weights, load, tmp_path):
    model = load(write(tmp_path / "dense", stories, weights, None), trust_remote_code=False)
    golden = json.loads((stories / "golden.json").read_text())
    for case in golden["logits"]:
        with torch.no_grad():
            last = model(torch.tensor([case["ids"]])).logits[0, -1]
        tokens, values = zip(*case["last_logits_top8"], strict=True)
        torch.testing.assert_close(last[list(tokens)], torch.tensor(values), atol=1e-3, rtol=0)
    greedy = torch.tensor([golden["greedy_from_bos_200"]["ids"][:60]])
    out = model.generate(greedy[:, :1], max_new_tokens=59, do_sample=False, eos_token_id=None)
    assert torch.equal(out, greedy)


def test_masked_model(stories, weights, load, spec, reference_forward, tmp_path):
    a, s = from_hf_config(read_config(stories)), spec("dms", window=16)
    model = load(write(tmp_path / "dms", stories, weights, s))
    ids = model.generate(torch.tensor([[1, 403, 407, 261, 378]]), max_new_tokens=90)[0]
    expected, decisions = reference_forward(weights, a, s, ids)
    assert 0.2 < hard_decisions(decisions).double().mean() < 0.8
    with torch.no_grad():
        found = model(ids[None]).logits[0].double()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_the_tokenizer_is_copied(stories, weights, spec, tmp_path):
    from transformers import AutoTokenizer

    directory = write(tmp_path / "dms", stories, weights, spec("dms"))
    text = "Once upon a time"
    ours = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)(text)
    assert ours["input_ids"] == AutoTokenizer.from_pretrained(stories)(text)["input_ids"]
