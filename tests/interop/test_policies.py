"""Cache policies and the merge of DMC beside the code of their authors, and of kvpress.

    DMS_RKV=R-KV DMS_D2O=D2O DMS_KVPRESS=kvpress DMS_DMC=Megatron-LM \\
        pytest tests/interop/test_policies.py

The variables name clones: Zefan-Cai/R-KV at d15c976, AIoT-MLSys-Lab/D2O at 12c99d8,
NVIDIA/kvpress at 8bb29b9 and NVIDIA/Megatron-LM at d36bf8d (branch `dmc`). Only the classes and
functions named below are run, in this process.
"""

from __future__ import annotations

import ast
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dms_train.inference.cache.compact import merged
from dms_train.inference.policies.base import Sequences, Slots
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.rotation import moved_by
from dms_train.method.dmc.merge import merge

pytestmark = pytest.mark.interop

D2O_FILE = "LLM_merge_new/LMEval_kv_token_merge/modeling_llama3_7b_13b_d2o.py"


def defined(variable, file, *names, **known):
    """Classes and functions of a file in a clone, without its imports, bases and decorators."""
    source = (Path(clone_of(variable)) / file).read_text(encoding="utf-8")
    nodes = [n for n in ast.walk(ast.parse(source)) if getattr(n, "name", None) in names]
    for node in nodes:
        node.decorator_list = []
    scope = {"torch": torch, "nn": nn, "F": F, **known}
    exec(compile(ast.Module(nodes, []), file, "exec"), scope)
    return [scope[name] for name in names]


def clone_of(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set; the head of {Path(__file__).name} describes how")
    return os.environ[variable]


def sequences(start, end, prompt, lists=None, query=None):
    one = [torch.tensor([x]) for x in (start, end, prompt, 10_000, 0)]
    return Sequences(8, *one, {} if lists is None else lists, query)


@pytest.mark.parametrize("seed", range(20))
def test_r_kv_keeps_the_same_tokens(seed):
    scores, similarity = defined(
        "DMS_RKV",
        "rkv/utils.py",
        "compute_attention_scores",
        "cal_similarity",
        math=math,
    )
    known = {"compute_attention_scores": scores, "cal_similarity": similarity}
    (cluster,) = defined("DMS_RKV", "rkv/compression/r1_kv.py", "R1KV", **known)
    draw = torch.Generator().manual_seed(seed)
    heads, group, tokens, size, window, budget = 2, 3, 60 + 3 * seed, 16, 8, 40
    key = torch.randn(1, heads, tokens, size, generator=draw) + seed % 2
    key[:, :, 30:36] = key[:, :, :6] + 0.1 * torch.randn(1, heads, 6, size, generator=draw)
    query = 2 * torch.randn(1, heads * group, window, size, generator=draw)
    names = torch.arange(tokens).float().view(1, 1, -1, 1).expand(1, heads, -1, size)
    _, kept = cluster(budget=budget, window_size=window).update_kv(key, query, names)
    policy = build_policy("r_kv", {"budget": budget}, None)
    recent = query.view(1, heads, group, window, size).transpose(2, 3)
    position = torch.arange(tokens).expand(1, heads, -1)
    state, whole = torch.zeros(1, heads, tokens, 0), sequences(0, tokens, tokens, query=recent)
    slots = Slots(0, position, state, key, key, whole)
    evicted = policy.expired(slots, torch.tensor([[tokens - 1]]))[0, :, 0]
    for head in range(heads):
        assert (~evicted[head]).nonzero().flatten().tolist() == kept[0, head, :, 0].sort()[
            0
        ].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_d2o_merges_the_same_states(seed):
    """Its 32 heads are one head 32 times. Nine tokens after a prompt of 60."""
    (theirs,) = defined("DMS_D2O", D2O_FILE, "D2O_LayerKVCache")
    cache = theirs(hh_ratio=0.2, recent_ratio=0.2)
    draw, prompt = torch.Generator().manual_seed(seed), 60
    keys, values = torch.randn(2, prompt + 10, 128, generator=draw)
    keys = keys + torch.randn(5, 128, generator=draw).repeat(14, 1)
    policy = build_policy("d2o", {"cr": 2.5, "reference_compat": True}, None)
    lists = {"share of the layer": torch.ones(1, 1, 1, dtype=torch.float64)}
    position = torch.arange(prompt + 1)[None, None]
    key, value = (x[None, None, : prompt + 1] for x in (keys, values))
    score = torch.rand(1, 1, prompt + 1, generator=draw)
    past = tuple(x.repeat(1, 32, 1, 1) for x in (key, value))
    added = score[0].expand(32, -1).clone()
    for t in range(prompt, prompt + 9):
        past = cache(past, added, 0.2, 0.2, prompt)
        slots = Slots(3, position, score[..., None], key, value, sequences(t, t + 1, prompt, lists))
        evicted = policy.expired(slots, torch.tensor([[t]]))[:, :, 0]
        merge = policy.merge(slots, evicted)
        slots, left = (slots if merge is None else merged(slots, merge)[0]), ~evicted[0, 0]
        key, value, position, score = (
            x[:, :, left] for x in (slots.key, slots.value, position, score)
        )
        torch.testing.assert_close(key, past[0][:, :1], atol=1e-5, rtol=0)
        torch.testing.assert_close(value, past[1][:, :1], atol=1e-5, rtol=0)
        threshold = lists["merge threshold"][0, 0, 0].float()
        torch.testing.assert_close(threshold, cache.threshold, atol=1e-5, rtol=0)
        new = [x[t + 1].view(1, 1, 1, -1) for x in (keys, values)]
        key, value = torch.cat([key, new[0]], 2), torch.cat([value, new[1]], 2)
        position = torch.cat([position, torch.tensor([[[t + 1]]])], 2)
        attention = torch.rand(1, 1, key.shape[2], generator=draw)
        score = torch.cat([score, torch.zeros(1, 1, 1)], 2) + attention
        past = tuple(
            torch.cat([x, y.expand(1, 32, 1, -1)], 2) for x, y in zip(past, new, strict=True)
        )
        added = attention[0].expand(32, -1).clone()


@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_streaming_llm_reads_keys_at_their_places_in_the_cache(sinks):
    """kvpress turns the keys that it keeps to 0, 1, and so on."""
    press = SimpleNamespace()
    turn, press.rerotate_keys = defined(
        "DMS_KVPRESS",
        "kvpress/presses/key_rerotation_press.py",
        "_rerotate_cos_sin",
        "rerotate_keys",
        KeyRerotationPress=press,
        rotate_half=rotate_half,
    )
    press._rerotate_cos_sin = turn
    draw = torch.Generator().manual_seed(sinks)
    tokens, budget, frequency = 90, 20, 1 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    plain, own = (
        torch.randn(1, 2, tokens, 16, generator=draw),
        torch.randn(1, 2, 1, 16, generator=draw),
    )
    key = moved_by(plain, torch.arange(tokens), frequency)
    module = SimpleNamespace(rotary_emb=SimpleNamespace(inv_freq=frequency), head_dim=16)
    kept = torch.cat([torch.arange(sinks), torch.arange(tokens - budget + sinks, tokens)])
    turned = press.rerotate_keys(module, kept.expand(1, 2, -1), key)
    expected = (moved_by(own, torch.tensor([budget - 1]), frequency) * turned).sum(-1)
    options = {"budget": budget, "sinks": sinks, "positions": "cache"}
    policy, at = build_policy("streaming_llm", options, None), torch.tensor([[tokens - 1]])
    position = torch.arange(tokens).expand(1, 2, -1)
    slots = Slots(0, position, torch.zeros(1, 2, tokens, 0))
    slots = slots._replace(sequences=sequences(tokens - 1, tokens, tokens))
    assert torch.equal((~policy.expired(slots, at)[0, 0, 0]).nonzero().flatten(), kept)
    moved, query = policy.moved(slots, at), moved_by(own, at[0], frequency)
    back = moved_by(query, -moved.by[:, None], frequency)
    found = torch.where(moved.slots, (back * key).sum(-1), (query * key).sum(-1))[..., kept]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize("length", [2, 11, 12, 13, 60])
@pytest.mark.parametrize("decisions", ["soft", "hard"])
def test_dmc_merges_the_same_keys(decisions, length):
    """In float64; without importance as well."""
    (theirs,) = defined("DMS_DMC", "megatron/contrib/dmc/dmc.py", "_poolsum")
    draw = torch.Generator().manual_seed(length)
    key = torch.randn(3, length, 8, generator=draw, dtype=torch.float64)
    alpha = torch.rand(3, length, generator=draw, dtype=torch.float64)
    if decisions == "hard":
        alpha = alpha.round()
    importance = torch.rand(3, length, generator=draw, dtype=torch.float64) + 1e-3
    for weight in (None, importance):
        ours = torch.ones_like(alpha) if weight is None else weight
        found, _ = merge(key.transpose(0, 1), key.transpose(0, 1), alpha.t(), ours.t(), 12)
        expected = theirs(key, alpha[:, 1:], weight, ws=12)
        torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-10, atol=1e-10)
