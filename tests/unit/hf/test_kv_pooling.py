"""dms-gqa: the mean of key and value heads, against brute force and transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dms_train.checkpoints_tools import pool_kv_heads
from dms_train.export.card import CARD_FILE
from dms_train.export.kv_pooling import mean_of_groups
from dms_train.export.writer import write_export
from dms_train.families import FAMILIES
from dms_train.hf.json_files import read_config
from dms_train.hf.safetensors_files import INDEX_FILE, SINGLE_FILE
from dms_train.hf.weight_reader import WeightReader
from dms_train.hf.weight_writer import WeightWriter

HEADS = 4


@pytest.fixture
def multi_head(tmp_path, architecture, random_weights):
    """(family, changed=identity, **architecture) -> a dense model, 4 KV heads of 4 query heads."""

    def _write(family, changed=lambda weights: weights, dtype=torch.float32, **sizes):
        a = replace(architecture(family), num_query_groups=HEADS, **sizes)
        out = tmp_path / "original"
        write_export(
            out,
            architecture=a,
            spec=None,
            cr_factor=None,
            target_cr=1.0,
            dtype=dtype,
            export_format="dms",
            weights=changed(random_weights(a)).items(),
            source_dir=None,
            selftest=None,
            provenance={},
        )
        return out

    return _write


def is_of_kv_heads(name, tensor):
    joint_norm = ".k_norm." in name and len(tensor) > 8  # over all heads, as in OLMo 3
    return joint_norm or ".k_proj." in name or ".v_proj." in name


def alike_in_pairs(weights):
    """Heads 0 and 1 are the same, and 2 and 3."""
    changed = {}
    for name, tensor in weights.items():
        if is_of_kv_heads(name, tensor):
            heads = tensor.unflatten(0, (HEADS, -1))
            tensor = heads[[0, 0, 2, 2]].flatten(0, 1)
        changed[name] = tensor
    return changed


def convert(source, out, kv_heads):
    return pool_kv_heads.main([str(source), str(out), "--kv-heads", str(kv_heads)])


def tensors(directory):
    reader = WeightReader(directory)
    return {name: reader.get(name) for name in reader.names()}


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_the_worked_example():
    rows = torch.tensor([[1.0], [3.0], [10.0], [20.0]])  # four heads of size 1
    assert mean_of_groups(rows, 4, 2).tolist() == [[2.0], [15.0]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_whose_heads_are_alike_computes_the_same(multi_head, load, tmp_path, family):
    source, out = multi_head(family, alike_in_pairs), tmp_path / "pooled"
    assert convert(source, out, 2) == 0
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = load(source), load(out)
    assert after.config.num_key_value_heads == 2
    torch.testing.assert_close(logits(after, ids), logits(before, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_are_the_mean_of_their_group(multi_head, tmp_path, family, kv_heads):
    source, out = multi_head(family), tmp_path / "pooled"
    assert convert(source, out, kv_heads) == 0
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    size = 8
    per_group = HEADS // kv_heads
    for name, tensor in before.items():
        if not is_of_kv_heads(name, tensor):
            assert torch.equal(after[name], tensor), name
            continue
        assert after[name].shape[0] == kv_heads * size
        for row in range(kv_heads * size):
            group, channel = divmod(row, size)
            first = group * per_group
            rows = [tensor[head * size + channel] for head in range(first, first + per_group)]
            mean = sum(r.double() for r in rows) / per_group
            torch.testing.assert_close(after[name][row].double(), mean, rtol=1e-6, atol=1e-7)


def test_a_model_in_shards_gives_the_same_weights_in_its_own_dtype(multi_head, tmp_path):
    whole = multi_head("qwen2", dtype=torch.bfloat16)
    assert convert(whole, tmp_path / "pooled", 2) == 0
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_bytes((whole / "config.json").read_bytes())
    (sharded / "tokenizer.json").write_text("{}")
    with WeightWriter(sharded, max_shard_bytes=4000) as writer:
        for name, tensor in tensors(whole).items():
            writer.add(name, tensor)
    assert (sharded / INDEX_FILE).is_file()
    assert convert(sharded, tmp_path / "of-shards", 2) == 0
    expected, found = tensors(tmp_path / "pooled"), tensors(tmp_path / "of-shards")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert read_config(tmp_path / "of-shards")["dtype"] == "bfloat16"
    assert (tmp_path / "of-shards" / "tokenizer.json").is_file()


def test_keys_of_the_configuration_are_kept_and_the_card_says_what_was_done(multi_head, tmp_path):
    source = multi_head("llama")
    config = read_config(source)
    (source / "config.json").write_text(json.dumps({**config, "bos_token_id": 7}))
    assert convert(source, tmp_path / "pooled", 1) == 0
    assert read_config(tmp_path / "pooled") == {
        **config,
        "bos_token_id": 7,
        "num_key_value_heads": 1,
    }
    card = (tmp_path / "pooled" / CARD_FILE).read_text()
    assert "Each KV head is the mean of 4 of the base model's." in card


@pytest.mark.parametrize(
    ("kv_heads", "named"),
    [
        (3, "--kv-heads 3: the model has 4 KV heads; use 2 or 1"),
        (4, "--kv-heads 4: the model has 4 KV heads; use 2 or 1"),
        (0, "--kv-heads 0: the model has 4 KV heads; use 2 or 1"),
        (-2, "--kv-heads -2: the model has 4 KV heads; use 2 or 1"),
    ],
)
def test_impossible_numbers_are_refused_in_one_line(multi_head, tmp_path, capsys, kv_heads, named):
    assert convert(multi_head("llama"), tmp_path / "out", kv_heads) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_used_are_refused(multi_head, export, spec, tmp_path, capsys):
    source = multi_head("llama")
    retrofitted = export("llama", spec("dms"))
    for model, out, named in (
        (source, source, "exists; choose another folder"),
        (retrofitted, tmp_path / "out", "give the original model"),
        (tmp_path / "absent", tmp_path / "out", "no such directory"),
    ):
        assert convert(model, out, 2) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1
    (source / SINGLE_FILE).write_bytes((source / SINGLE_FILE).read_bytes()[:-3])
    assert convert(source, tmp_path / "out", 2) == 2
    assert SINGLE_FILE in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_kv_head_cannot_become_fewer(architecture, multi_head, tmp_path, capsys):
    assert convert(multi_head("llama"), tmp_path / "one", 1) == 0
    assert convert(tmp_path / "one", tmp_path / "none", 1) == 2
    assert "the model has 1 KV heads; there is nothing to pool" in capsys.readouterr().err
