"""Cache policies and the merge of DMC beside the code of their authors, and of kvpress.

    DMS_RKV=R-KV DMS_D2O=D2O DMS_KVPRESS=kvpress DMS_DMC=Megatron-LM DMS_H2O=H2O DMS_TOVA=TOVA \\
        DMS_QUEST=Quest DMS_KVCACHE_FACTORY=KVCache-Factory pytest tests/interop/test_policies.py

The variables name clones: Zefan-Cai/R-KV at d15c976, AIoT-MLSys-Lab/D2O at 12c99d8,
NVIDIA/kvpress at 8bb29b9, NVIDIA/Megatron-LM at d36bf8d (branch `dmc`), FMInference/H2O at ac75c2a,
schwartz-lab-NLP/TOVA at 9c7d09b, mit-han-lab/Quest at 01c1623 and Zefan-Cai/KVCache-Factory at
c97f9d7. Only the classes and functions named below are run, in this process.
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

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.policy_hooks import merged
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import NewTokens, RequestSizes, Sequences, Slots
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.rotation import moved_by
from dms_train.method.dmc.merge import merge

pytestmark = pytest.mark.interop

D2O_FILE = "LLM_merge_new/LMEval_kv_token_merge/modeling_llama3_7b_13b_d2o.py"
FACTORY_FILE = "pyramidkv/pyramidkv_utils.py"
SIZE = 16  # of a head


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
    evicted = policy.evict_mask(slots, torch.tensor([[tokens - 1]]))[0, :, 0]
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
        evicted = policy.evict_mask(slots, torch.tensor([[t]]))[:, :, 0]
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
    assert torch.equal((~policy.evict_mask(slots, at)[0, 0, 0]).nonzero().flatten(), kept)
    moved, query = policy.position_shift(slots, at), moved_by(own, at[0], frequency)
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


def drawn(seed, *, heads, group, tokens):
    """Queries [1, heads * group, tokens, SIZE] and keys [1, heads, tokens, SIZE]."""
    draw = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(1, heads * group, tokens, SIZE, generator=draw)
    return query, torch.randn(1, heads, tokens, SIZE, generator=draw)


def held(name, options, layers, prompt, tokens):
    """Positions that the compact cache holds, [layer][KV head], at the end of the prompt and later.

    Args:
        layers: Queries and keys of each layer.
        prompt: Tokens of the prompt.
        tokens: All of them; those behind the prompt enter one by one.
    """
    policy, heads = build_policy(name, options, None), layers[0][1].shape[1]
    cpu = torch.device("cpu")
    width = policy.state_width
    pool = PagePool(head_size=SIZE, state_width=width, dtype=torch.float32, device=cpu)
    cache = CompactCache(pool, policy, layers=len(layers), rows=1, heads=heads)
    request, done, found = RequestSizes(prompt, tokens, 0), 0, []
    cache.assign(0, request)
    while done < tokens:
        left = max(1, prompt - done)
        part = slice(done, done + min(policy.max_tokens(request, done) or left, left))
        position = torch.arange(part.start, part.stop)[None]
        for number, (query, key) in enumerate(layers):
            arrival = NewTokens(position, key[:, :, part], key[:, :, part], None)
            cache.attend(number, torch.tensor([0]), query[:, :, part], arrival)
        done = part.stop
        if done >= prompt:
            found.append([[head.tolist() for head in layer] for layer in cache.positions(0)])
    return found


def attention(query, key, seen=None):
    """Softmax of queries [..., q, SIZE] over keys [..., s, SIZE]; `seen` is bool [q, s]."""
    logits = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
    return (logits if seen is None else logits.masked_fill(~seen, -math.inf)).softmax(-1)


def causal(query, key):
    """Attention of a prompt, [1, query heads, tokens, tokens]."""
    group, tokens = query.shape[1] // key.shape[1], key.shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return attention(query, key.repeat_interleave(group, 1), seen)


def names_of(tokens, heads):
    """Positions in the place of keys or values, [1, heads, tokens, SIZE]."""
    return torch.arange(tokens).float().view(1, 1, -1, 1).expand(1, heads, -1, SIZE)


def listed(names):
    """Positions from `names_of` by head, ascending."""
    return [sorted(head) for head in names[0, :, :, 0].long().tolist()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [8, 13])
def test_h2o_keeps_the_same_tokens_while_it_decodes(seed, budget):
    """The class of FMInference/H2O at ac75c2a; it has as many query heads as KV heads."""
    file, heads, prompt, tokens = "h2o_hf/utils_real_drop/modify_llama.py", 3, 40, 60
    (theirs,) = defined("DMS_H2O", file, "H2OKVCache_LayerWise")
    query, key = drawn(seed, heads=heads, group=1, tokens=tokens)
    cache = theirs(hh_size=budget // 2, recent_size=budget - budget // 2)
    part = slice(0, prompt)
    past = cache((names_of(prompt, heads),) * 2, causal(query[:, :, part], key[:, :, part]))
    expected = [listed(past[0])]
    for t in range(prompt, tokens):
        names = torch.cat([past[0], torch.full((1, heads, 1, SIZE), float(t))], 2)
        places = names.long()
        past = cache((names, names), attention(query[:, :, t : t + 1], key.gather(2, places)))
        expected.append(listed(past[0]))
    found = held("h2o", {"budget": budget, "prefill": "dense"}, [(query, key)], prompt, tokens)
    assert [layers[0] for layers in found] == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefill", ["dense", "stream"])
def test_tova_keeps_the_same_tokens_while_it_decodes(seed, prefill):
    """`reduce` of schwartz-lab-NLP/TOVA at 9c7d09b, after the prompt and each token behind it."""
    (reduce,) = defined("DMS_TOVA", "src/tova_cache.py", "reduce")
    heads, group, budget, prompt, tokens = 2, 3, 11, 30, 50
    query, key = drawn(seed, heads=heads, group=group, tokens=tokens)
    first = prompt if prefill == "dense" else budget
    names = names_of(first, heads)
    cache = SimpleNamespace(cache_size=budget, key_cache=[names], value_cache=[names])
    expected = []
    for t in range(first - 1, tokens):
        if t >= first:
            new = torch.full((1, heads, 1, SIZE), float(t))
            names = torch.cat([cache.key_cache[0], new], 2)
            cache.key_cache, cache.value_cache = [names], [names]
        kept = key.gather(2, cache.key_cache[0].long()).repeat_interleave(group, 1)
        reduce(cache, 0, attention(query[:, :, t : t + 1], kept))
        if t >= prompt - 1:
            expected.append(listed(cache.key_cache[0]))
    found = held("tova", {"budget": budget, "prefill": prefill}, [(query, key)], prompt, tokens)
    assert [layers[0] for layers in found] == expected


@pytest.mark.parametrize("seed", range(10))
def test_quest_reads_the_same_pages(seed):
    """`local_heavy_hitter_mask` of mit-han-lab/Quest at 01c1623: three pages at least."""
    (mask,) = defined("DMS_QUEST", "evaluation/quest_attention.py", "local_heavy_hitter_mask")
    heads, group, page, tokens = 2, 3, 8, 90 + seed
    query, key = drawn(seed, heads=heads, group=group, tokens=tokens)
    budget = page * (1 + seed % 6)
    own = {"budget": budget, "page": page, "min_pages": 3, "include_last_page": False}
    policy, lists = build_policy("quest", own, None), {}
    position = torch.arange(tokens)
    for part in (slice(0, 70), slice(70, tokens - 1), slice(tokens - 1, tokens)):
        whole = sequences(part.start, part.stop, tokens - 1, lists)
        places = position[: part.stop].expand(1, heads, -1)
        slots = Slots(0, places, torch.zeros(*places.shape, 0), sequences=whole)
        new = key[:, :, part]
        policy.on_store(slots, NewTokens(position[part][None], new, new, None))
    last = query[:, :, -1].view(1, heads, group, SIZE)
    found = policy.select(slots, last)
    bounds = []
    for begin in range(0, tokens, page):  # the largest product with a key in the page's box
        box = key[:, :, None, begin : begin + page]
        bound = torch.where(last > 0, last * box.amax(3), last * box.amin(3)).sum(-1)
        bounds += [bound] * box.shape[3]
    expected = mask(torch.stack(bounds, -1).flatten(1, 2)[:, :, None], budget, page)
    assert torch.equal(found.flatten(1, 2), expected[:, :, 0])


FACTORY_PARTS = (
    "_debug_print",
    "repeat_kv",
    "_gqa_groups",
    "_reduce_group_scores",
    "_grouped_window_attn_cache",
    "_select_topk_kv",
)


def factory(cluster, seed, *, layers=1, **options):
    """Return what a cluster of KVCache-Factory keeps of a prompt by layer, and its layers."""
    known = {"math": math, "_KVCACHE_FACTORY_DEBUG": False}
    *_, theirs = defined("DMS_KVCACHE_FACTORY", FACTORY_FILE, *FACTORY_PARTS, cluster, **known)
    heads, tokens = 2, 64
    drawn_layers = [
        drawn(100 * seed + n, heads=heads, group=3, tokens=tokens) for n in range(layers)
    ]
    kept = []
    for number, (query, key) in enumerate(drawn_layers):
        own = {"num_hidden_layers": layers, "layer_idx": number} if layers > 1 else {}
        names = names_of(tokens, heads)
        _, values = theirs(**options, **own).update_kv(key, query, names, None, 3)
        kept.append(listed(values))
    return kept, drawn_layers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_snapkv_keeps_the_same_tokens(seed, reduce):
    """`SnapKVCluster` of Zefan-Cai/KVCache-Factory at c97f9d7, with pooling by the mean."""
    sizes = {"window_size": 8, "max_capacity_prompt": 24, "kernel_size": 5}
    kept, layers = factory("SnapKVCluster", seed, gqa_score_agg=reduce, **sizes)
    own = {"budget": 24, "window": 8, "kernel": 5, "pool": "avg", "group_reduce": reduce}
    assert held("snapkv", own, layers, 64, 64) == [kept]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_snapkv_has_the_same_scores_with_maxima(seed, reduce):
    """`_grouped_window_attn_cache` of Zefan-Cai/KVCache-Factory at c97f9d7.

    Neighbours have equal maxima, of which its `topk` takes any and this project the first ones.
    """
    known = {"math": math, "_KVCACHE_FACTORY_DEBUG": False}
    parts = ("repeat_kv", "_reduce_group_scores", "_grouped_window_attn_cache")
    *_, pooled = defined("DMS_KVCACHE_FACTORY", FACTORY_FILE, *parts, **known)
    query, key = drawn(seed, heads=2, group=3, tokens=64)
    scores = pooled(query, key, 3, 8, 5, "maxpool", reduce)[0]
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :16]
    kept = [sorted([*head, *range(56, 64)]) for head in order.tolist()]
    own = {"budget": 24, "window": 8, "kernel": 5, "pool": "max", "group_reduce": reduce}
    assert held("snapkv", own, [(query, key)], 64, 64) == [[kept]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("budget", "beta"), [(24, 4), (30, 20), (44, 3)])
def test_pyramidkv_keeps_the_same_tokens_in_every_layer(seed, budget, beta):
    """`PyramidKVCluster` of Zefan-Cai/KVCache-Factory at c97f9d7."""
    sizes = {"window_size": 8, "max_capacity_prompt": budget, "kernel_size": 5, "beta": beta}
    kept, layers = factory("PyramidKVCluster", seed, layers=4, **sizes)
    own = {"budget": budget, "window": 8, "kernel": 5, "beta": beta}
    assert held("pyramidkv", own, layers, 64, 64) == [kept]
    assert len({len(heads[0]) for heads in kept}) == (1 if budget == 44 else 4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_h2o_keeps_the_same_tokens_of_a_prompt_with_shared_kv_heads(seed, reduce):
    """`H2OKVCluster` of Zefan-Cai/KVCache-Factory at c97f9d7."""
    sizes = {"window_size": 10, "max_capacity_prompt": 20, "gqa_score_agg": reduce}
    kept, layers = factory("H2OKVCluster", seed, **sizes)
    own = {"budget": 20, "prefill": "dense", "group_reduce": reduce}
    assert held("h2o", own, layers, 64, 64) == [kept]


@pytest.mark.parametrize("sinks", [1, 4])
def test_streaming_llm_keeps_the_same_tokens(sinks):
    """`StreamingLLMKVCluster` of Zefan-Cai/KVCache-Factory at c97f9d7."""
    sizes = {"window_size": 20 - sinks, "max_capacity_prompt": 20}
    kept, layers = factory("StreamingLLMKVCluster", 0, **sizes)
    assert held("streaming_llm", {"budget": 20, "sinks": sinks}, layers, 64, 64) == [kept]


PRESSES = [
    ("knorm", "knorm", {}, {}),
    ("keydiff", "keydiff", {}, {}),
    ("streaming_llm", "streaming_llm", {"compression_ratio": 0.75, "n_sink": 3}, {"sinks": 3}),
    (
        "snapkv",
        "snapkv",
        {"window_size": 8, "kernel_size": 5},
        {"window": 8, "kernel": 5, "pool": "avg"},
    ),
    ("tova", "tova", {}, {"prefill": "dense", "protect_last": True}),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("press", "name", "theirs", "own"), PRESSES, ids=lambda x: str(x)[:20])
def test_the_presses_of_kvpress_keep_the_same_tokens(press, name, theirs, own, seed):
    """`score` of each press of NVIDIA/kvpress at 8bb29b9, 16 of 64 tokens of a prompt."""
    (score,) = defined("DMS_KVPRESS", f"kvpress/presses/{press}_press.py", "score")
    heads, group, tokens, budget = 2, 3, 64, 16
    query, key = drawn(seed, heads=heads, group=group, tokens=tokens)
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads * group))
    hidden = torch.zeros(1, tokens, 1)
    scores = score(SimpleNamespace(**theirs), module, hidden, key, key, causal(query, key), {})
    expected = [sorted(head) for head in scores.topk(budget, -1).indices[0].tolist()]
    assert held(name, {"budget": budget, **own}, [(query, key)], tokens, tokens) == [[expected]]


@pytest.mark.parametrize("seed", range(10))
def test_cam_merges_the_same_values(seed, monkeypatch):
    """`compress` of `CAMPress` of NVIDIA/kvpress at 8bb29b9, with the probabilities of merges.

    Twelve tokens behind a prompt, each with the attention that all tokens received so far; the
    base policy of the press is H2O.
    """
    (compress,) = defined("DMS_KVPRESS", "kvpress/presses/cam_press.py", "compress")
    monkeypatch.setattr(torch, "bernoulli", lambda probability: probability)
    draw, budget, targets = torch.Generator().manual_seed(seed), 14, 4
    score = torch.rand(1, 1, budget + 1, generator=draw)
    value = torch.randn(1, 1, budget + 1, SIZE, generator=draw)
    position = torch.arange(budget + 1)[None, None]

    def base(module, hidden, keys, values, attentions, kwargs):
        recent = torch.arange(keys.shape[2]) >= keys.shape[2] - (budget - budget // 2)
        return score.masked_fill(recent, torch.inf)

    press = SimpleNamespace(
        target_size=budget,
        merge_budget=targets,
        layer_step_counts=[1],
        base_press=SimpleNamespace(score=base, compression_ratio=0.0),
        _find_target_compression_ratio=lambda tokens, target: 0.0,
        _running_attn_sum={0: score},
    )
    own = {"budget": budget, "prefill": "dense", "expected": True, "targets": targets}
    policy, module = build_policy("cam", own, None), SimpleNamespace(layer_idx=0)
    for t in range(budget, budget + 12):
        names = position.float()[..., None].expand(-1, -1, -1, SIZE)
        kept, expected = compress(press, module, None, names, value.clone(), score, {})
        whole = sequences(t, t + 1, budget)
        slots = Slots(0, position, score[..., None], names, value, whole)
        evicted = policy.evict_mask(slots, torch.tensor([[t]]))[:, :, 0]
        slots = merged(slots, policy.merge(slots, evicted))[0]
        left = ~evicted[0, 0]
        value, position, score = slots.value[:, :, left], position[:, :, left], score[:, :, left]
        assert position[0].tolist() == listed(kept)
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
        new = torch.randn(1, 1, 1, SIZE, generator=draw)
        value, position = torch.cat([value, new], 2), F.pad(position, (0, 1), value=t + 1)
        score = F.pad(score, (0, 1)) + torch.rand(1, 1, budget + 1, generator=draw)
        press._running_attn_sum[0] = score
