"""`generate` of an export through the kernels of this package.

The truth is a forward pass over the whole text in which evicted tokens are masked.
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference import export_pages
from dms_train.inference.export_pages import ExportPages
from dms_train.kernels import dispatch
from tests.unit.inference.conftest import small_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)


@pytest.fixture
def model(folder, load):
    """(family, preset) -> float32 model whose `generate` uses the kernels."""

    def _model(family, preset, kernels="triton", **overrides):
        m = load(folder(family, small_spec(preset, **overrides))).to(DEVICE)
        m.dms_kernels = kernels
        return m

    return _model


def ids(rows, length, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 61, (rows, length), generator=draw).to(DEVICE)


def left_padded(rows, length, padding):
    """Tokens and their mask; row i starts with padding[i] tokens of padding."""
    tokens, mask = ids(rows, length), torch.ones(rows, length, dtype=torch.int64, device=DEVICE)
    for row, count in enumerate(padding):
        tokens[row, :count], mask[row, :count] = 0, 0
    return tokens, mask


def masked(m, prompt, **options):
    """The same with the masked cache of full length."""
    return m.generate(prompt, past_key_values=DynamicCache(), **{**OPTIONS, **options})


def code(m):
    return sys.modules[type(m).__mro__[1].__module__]


def new_cache(m, kernels="triton"):
    numbers = m.model.layers[0].self_attn.dms.numbers
    return code(m).DMSCache(numbers, len(m.model.layers), kernels)


def uses_kernels(cache):
    return all(isinstance(layer.store, ExportPages) for layer in cache.layers)


@torch.no_grad()
def logits(m, tokens, cache=None, mask=None):
    return m(tokens, past_key_values=cache, attention_mask=mask, use_cache=cache is not None).logits


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


CASES = [
    (1, "llama", "dms", {}),
    (19, "qwen3", "dms_nvidia", {}),
    (19, "llama", "dms_fastdms", {}),
    (19, "qwen2", "dms", {"eviction": "immediate"}),
    (19, "gpt_oss", "dms", {}),
]


@pytest.mark.parametrize(("length", "family", "preset", "overrides"), CASES)
def test_the_masked_models_tokens(model, length, family, preset, overrides):
    m, prompt = model(family, preset, **overrides), ids(1, length)
    done = m.generate(prompt, return_dict_in_generate=True, **OPTIONS)
    cache = done.past_key_values
    assert uses_kernels(cache)
    assert torch.equal(done.sequences, masked(m, prompt))
    m.dms_kernels = "reference"
    other = m.generate(prompt, return_dict_in_generate=True, **OPTIONS).past_key_values
    assert not uses_kernels(other)
    assert torch.equal(cache.live(), other.live())


def test_left_padding(model):
    m = model("llama", "dms")
    tokens, mask = left_padded(3, 18, (0, 4, 9))
    options = {"attention_mask": mask, "max_new_tokens": 3}
    assert torch.equal(m.generate(tokens, **{**OPTIONS, **options}), masked(m, tokens, **options))


def test_rows_that_start_later(model):
    """The second and the third row have no token in the first forward passes."""
    m = model("llama", "dms")
    tokens, mask = left_padded(3, 22, (0, 6, 9))
    whole, cache = logits(m, tokens, mask=mask), new_cache(m)
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 20), (20, 21), (21, 22)):
        found = logits(m, tokens[:, start:end], cache, mask[:, :end])
        real = mask[:, start:end] > 0
        assert torch.isfinite(found).all()
        assert_same(found[real], whole[:, start:end][real])


def test_sampling_and_another_turn(model):
    m = model("qwen3", "dms_nvidia")
    options = {"do_sample": True, "top_k": 5, "num_return_sequences": 2, "max_new_tokens": 3}
    torch.manual_seed(0)
    first = m.generate(ids(1, 10), return_dict_in_generate=True, **{**OPTIONS, **options})
    torch.manual_seed(0)
    assert torch.equal(first.sequences, masked(m, ids(1, 10), **options))
    prompt = torch.cat([first.sequences, ids(2, 9, seed=2)], 1)
    greedy = {**OPTIONS, "max_new_tokens": 3, "attention_mask": torch.ones_like(prompt)}
    again = m.generate(prompt, past_key_values=first.past_key_values, **greedy)
    assert uses_kernels(first.past_key_values)
    assert torch.equal(again, masked(m, prompt, **greedy))


def test_beams(model):
    m = model("llama", "dms")
    options = {"num_beams": 2, "max_new_tokens": 4}
    done = m.generate(ids(1, 14), return_dict_in_generate=True, **{**OPTIONS, **options})
    assert uses_kernels(done.past_key_values)
    assert torch.equal(done.sequences, masked(m, ids(1, 14), **options))


CHANGES = {
    "select": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "copy": (copy.deepcopy, [0, 1, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_move_with_all_they_hold(model, monkeypatch, change):
    """While the pool grows; a copy of the cache has a pool of its own."""
    monkeypatch.setattr(export_pages, "_PAGES", 5)
    monkeypatch.setattr(export_pages, "_STEPS", 1)
    m = model("llama", "dms")
    change, rows = CHANGES[change]
    tokens, mask = left_padded(3, 20, (0, 6, 0))
    after, longer = ids(3, 3, seed=5), torch.nn.functional.pad(mask, (0, 3), value=1)
    cache = new_cache(m)
    logits(m, tokens, cache, mask)
    changed = change(cache) or cache
    pools = {id(layer.store.pool) for layer in (*changed.layers, *cache.layers)}
    assert len(pools) == (1 if changed is cache else 2)
    assert changed.layers[0].store.pool.max_pages > 5
    for which, kept in ((changed, rows), (cache, [0, 1, 2])):
        parts = [logits(m, after[:, i : i + 1], which, longer[kept, : 21 + i]) for i in range(3)]
        whole = logits(m, torch.cat([tokens[kept], after], 1), mask=longer[kept])
        assert_same(torch.cat(parts, 1), whole[:, 20:])
        if changed is cache:
            break


def test_pages_go_back(model):
    m = model("llama", "dms")
    cache = new_cache(m)
    logits(m, ids(2, 40), cache)
    pool = cache.layers[0].store.pool
    for rows in (2, 1):
        assert cache.live().shape[1] == rows
        held = int((-(-cache.live() // 16)).sum())
        assert (int(pool.free.left), pool.used_pages) == (pool.max_pages - held, held)
        cache.batch_select_indices(torch.tensor([rows - 1]))
        logits(m, ids(1, 1), cache)
    cache.reset()
    assert cache.allocated_bytes == 0


def test_padding_between_tokens_takes_torch_operations_or_is_refused(model):
    m = model("llama", "dms")
    prompt, mask = left_padded(1, 16, (0,))
    mask[0, 6:8] = 0
    done = m.generate(prompt, attention_mask=mask, return_dict_in_generate=True, **OPTIONS)
    assert not uses_kernels(done.past_key_values)
    cache = new_cache(m)
    logits(m, prompt[:, :5], cache)
    with pytest.raises(ValueError, match="padding only before a sequence"):
        logits(m, prompt[:, 5:], cache, mask)


def test_a_crop_is_refused(model):
    m = model("llama", "dms")
    cache = new_cache(m)
    logits(m, ids(1, 12), cache)
    with pytest.raises(ValueError, match="dms_kernels='reference'"):
        cache.crop(-1)
    cache.crop(-12)
    assert_same(logits(m, ids(1, 9), cache), logits(m, ids(1, 9)))


def test_a_window_without_end(model):
    """`dms_disable_eviction` of the flat layout."""
    m = model("qwen3", "dms_fastdms")
    for layer in m.model.layers:
        numbers = layer.self_attn.dms.numbers
        layer.self_attn.dms.numbers = type(numbers)(**{**vars(numbers), "window": 2**62})
    done = m.generate(ids(1, 15), return_dict_in_generate=True, **OPTIONS)
    assert uses_kernels(done.past_key_values)
    assert torch.equal(done.sequences, masked(m, ids(1, 15)))


def test_kernels_are_used_where_they_are(model, monkeypatch):
    """`auto` takes them on GPUs; an export without this package has its own code."""
    m = model("llama", "dms", kernels="auto")
    cache = m.generate(ids(1, 9), return_dict_in_generate=True, **OPTIONS).past_key_values
    assert uses_kernels(cache) == (DEVICE.type == "cuda")
    generation = sys.modules[code(m).DMSCache.__module__]
    monkeypatch.setattr(generation, "_PACKAGE", "dms_train.inference.absent")
    cache = m.generate(ids(1, 9), return_dict_in_generate=True, **OPTIONS).past_key_values
    assert not uses_kernels(cache)
    m.dms_kernels = "triton"
    with pytest.raises(ValueError, match="no kernels here"):
        m.generate(ids(1, 9), **OPTIONS)


def test_kernels_of_a_package_without_sinks_are_not_taken_for_them(model, monkeypatch):
    """Older packages have kernels for the keys, but their method takes no sinks."""
    m = model("llama", "dms", kernels="triton")
    cache = m.generate(ids(1, 9), return_dict_in_generate=True, **OPTIONS).past_key_values
    generation = sys.modules[code(m).DMSCache.__module__]
    key, sinks = torch.zeros(1, 2, 3, 16, device=DEVICE), torch.zeros(4)
    assert generation._kernels_for("triton", key, sinks) is not None
    monkeypatch.setattr(export_pages.ExportPages, "attend", lambda self, layer: None)
    assert uses_kernels(cache)
    assert generation._kernels_for("triton", key, None) is not None
    with pytest.raises(ValueError, match="install its newest version"):
        generation._kernels_for("triton", key, sinks)


@pytest.mark.parametrize(("kernels", "dtype"), [("triton", torch.float64), ("flex", torch.float32)])
def test_unsupported_tensors_are_refused(model, kernels, dtype):
    m = model("llama", "dms", kernels=kernels).to(dtype)
    with pytest.raises(ValueError, match="kernels="):
        m.generate(ids(1, 9), **OPTIONS)
