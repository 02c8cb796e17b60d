"""Prompts of an export attend in blocks: the same logits, and no tensor of [T, T]."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    small_spec,
    tiny_architecture,
    varied_weights,
)

HEADS, BLOCK = 4, 16


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        sizes = (x.untyped_storage().nbytes() // x.itemsize for x in tensors)
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.fixture
def model(folder, load, monkeypatch):
    """(family, preset, blocks=True) -> model whose prompts attend BLOCK queries at once."""

    def _model(family, preset, blocks=True, **overrides):
        m = load(folder(family, small_spec(preset, **overrides)))
        if blocks:
            pages = sys.modules[modelling(m).block_queries.__module__]
            monkeypatch.setattr(pages, "BLOCK_SCORES", 1)
            monkeypatch.setattr(pages, "BLOCK_QUERIES", BLOCK)
        return m

    return _model


def modelling(m):
    """Module `modeling_dms` of the export that a model comes from."""
    return sys.modules[type(m).__mro__[1].__module__]


def caches(m):
    numbers = [layer.self_attn.dms.numbers for layer in m.model.layers]
    return {"none": None, "masked": DynamicCache(), "freed": modelling(m).DMSCache(numbers, 2)}


def ids(length, rows=1, seed=1):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(m, tokens, cache=None, **options):
    return m(tokens, past_key_values=cache, use_cache=cache is not None, **options).logits


def assert_same(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), atol=2e-4, rtol=1e-4)


CASES = [
    ("llama", "dms", {}),
    ("qwen3", "dms_nvidia", {}),
    ("llama", "dms_fastdms", {}),
    ("qwen2", "dms", {"eviction": "immediate"}),
    ("gpt_oss", "dms", {}),
]


@pytest.mark.parametrize(("family", "preset", "overrides"), CASES)
@pytest.mark.parametrize("cache", ["none", "masked", "freed"])
def test_blocks_equal_an_independent_forward(model, family, preset, overrides, cache):
    m, a, tokens = model(family, preset, **overrides), tiny_architecture(family), ids(150)
    spec = small_spec(preset, **overrides)
    expected, decisions = hf._forward(varied_weights(a, 0), a, spec, tokens[0])
    assert decisions.abs().min() > 1e-4  # no decision hangs on rounding
    assert_same(logits(m, tokens, caches(m)[cache])[0], expected)


@pytest.mark.parametrize("cache", ["none", "masked", "freed"])
def test_no_tensor_of_all_queries_and_keys(model, cache):
    """The bound is the scores of one block; whole scores would have 60 times as many elements."""
    m, length = model("llama", "dms"), 1000
    with LargestTensor() as spy:
        logits(m, ids(length), caches(m)[cache], logits_to_keep=1)
    assert spy.elements <= HEADS * BLOCK * length


def test_generation_keeps_to_the_bound(model):
    m, length = model("llama", "dms"), 1000
    with LargestTensor() as spy:
        m.generate(ids(length), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert spy.elements <= HEADS * BLOCK * (length + 2)


@pytest.mark.parametrize("holes", [False, True])
def test_padding(model, holes):
    """Before the texts for every cache; between tokens where the masked tokens stay."""
    tokens, mask = ids(90, rows=3), torch.ones(3, 90, dtype=torch.int64)
    mask[0, :20], mask[1, :33] = 0, 0
    if holes:
        mask[2, 40:47] = 0
    expected = logits(model("llama", "dms", blocks=False), tokens, attention_mask=mask)
    assert torch.isfinite(expected).all()
    m = model("llama", "dms")
    for name, cache in caches(m).items():
        if not (holes and name == "freed"):
            found = logits(m, tokens, cache, attention_mask=mask)
            assert_same(found[mask > 0], expected[mask > 0])


def test_attention_weights_on_request(model):
    m, tokens = model("llama", "dms"), ids(40)
    with torch.no_grad():
        done = m(tokens, use_cache=False, output_attentions=True)
    assert_same(done.logits, logits(m, tokens))
    decisions = m.dms_decision_logits(tokens)[:, 0] > 0
    late = torch.arange(40)[:, None] - torch.arange(40) > 8
    for weights, decided in zip(done.attentions, decisions, strict=True):
        assert_same(weights.sum(-1), torch.ones(1, HEADS, 40))
        evicted = torch.nn.functional.pad(decided[:, 1:], (0, 1)).repeat_interleave(2, 0)
        assert weights[0][late & evicted[:, None]].max() == 0
        assert weights[0, :, 39].count_nonzero() < HEADS * 40


def test_packed_texts_do_not_see_each_other(model):
    m, texts = model("llama", "dms"), (ids(30), ids(25, seed=2))
    places = torch.cat([torch.arange(30), torch.arange(25)])[None]
    packed = logits(m, torch.cat(texts, 1), position_ids=places)
    assert_same(packed, torch.cat([logits(m, text) for text in texts], 1))


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_a_mask_of_the_caller(model, family):
    m, tokens = model(family, "dms"), ids(40)
    free = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)
    assert_same(logits(m, tokens, attention_mask=free[None, None]), logits(m, tokens))
    free[20:, :5] = torch.finfo(torch.float32).min
    restricted = logits(m, tokens, attention_mask=free[None, None])
    assert (restricted - logits(m, tokens)).abs()[:, 20:].max() > 1e-2


def test_blocks_by_their_scores(model):
    """A short prompt is one block; a long one gets fewer queries the more keys there are."""
    block_queries = modelling(model("llama", "dms", False)).block_queries
    assert block_queries(32, 1024) == 1024
    assert block_queries(32, 32768) == 32
    assert block_queries(32 * 64, 32768) == 16
