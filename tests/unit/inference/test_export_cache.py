"""Cache operations of transformers beyond attention, and models that draft for each other.

The truth is a forward pass over the whole text in which evicted tokens are masked.
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import DynamicCache

from tests.unit.inference.conftest import WINDOW, small_spec

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SPECS = [
    ("llama", "dms", {}),
    ("llama", "dms_fastdms", {}),
    ("llama", "dms", {"eviction": "immediate"}),
]


@pytest.fixture(scope="module")
def model(folder, load):
    """(family, preset or None, seed=0, **overrides) -> float32 model."""
    known = {}

    def _model(family, preset, seed=0, **overrides):
        key = (family, preset, seed, tuple(overrides.items()))
        if key not in known:
            spec = None if preset is None else small_spec(preset, **overrides)
            known[key] = load(folder(family, spec, seed))
        return known[key]

    return _model


def ids(rows, length, seed=1):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def new_cache(m):
    code = sys.modules[type(m).__mro__[1].__module__]
    return code.DMSCache(m.model.layers[0].self_attn.dms.numbers, len(m.model.layers))


@torch.no_grad()
def logits(m, tokens, cache=None, mask=None):
    return m(tokens, past_key_values=cache, attention_mask=mask, use_cache=cache is not None).logits


def remove(cache, count):
    """crop: transformers 5 counts what goes."""
    cache.crop(-count)


def pages_in_use(cache):
    return cache.layers[0].store.pool.used_pages


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def needed_and_gone(m, tokens, stay):
    """Return True if a token is evicted after all, and readable or undecided after `stay`."""
    numbers = m.model.layers[0].self_attn.dms.numbers
    decisions = m.dms_decision_logits(tokens)[:, 0] > 0
    length, found = tokens.shape[1], False
    for j in range(length):
        decided = j + numbers.shift
        evicted = decided < length and length - 1 - j > numbers.window
        open_again = stay - j <= numbers.window or decided >= stay
        if evicted and open_again and j < stay:
            found |= bool(decisions[..., decided].any())
    return found


@pytest.mark.parametrize(("family", "preset", "overrides"), SPECS)
def test_crop_is_exact_or_refused(model, family, preset, overrides):
    m = model(family, preset, **overrides)
    after, outcomes = ids(1, 12, seed=5), set()
    for length in (6, 9, 26):
        tokens = ids(1, length, seed=length)
        for count in (*range(1, 6), 8, 14, 25):
            stay = max(0, length - count)
            cache = new_cache(m)
            logits(m, tokens, cache)
            refused = needed_and_gone(m, tokens, stay)
            outcomes.add(refused)
            if refused:
                with pytest.raises(ValueError, match="evicted since"):
                    remove(cache, count)
                stay = length
            else:
                remove(cache, count)
            assert cache.get_seq_length() == stay
            whole = torch.cat([tokens[:, :stay], after], 1)
            assert_same(logits(m, after, cache), logits(m, whole)[:, stay:])
    assert outcomes == {True, False}


def test_crop_of_a_padded_batch_token_by_token(model):
    m = model("llama", "dms")
    tokens, after = ids(2, 30), ids(2, 11, seed=5)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :7] = 0
    cache = new_cache(m)
    logits(m, tokens, cache, mask[:, :30])
    remove(cache, 1)
    parts = [
        logits(m, after[:, i : i + 1], cache, mask[:, : 30 + i]) for i in range(after.shape[1])
    ]
    whole = logits(m, torch.cat([tokens[:, :29], after], 1), mask=mask)
    assert_same(torch.cat(parts, 1), whole[:, 29:])


def test_crop_of_everything_and_of_nothing(model):
    m = model("llama", "dms")
    tokens, cache = ids(1, 30), new_cache(m)
    remove(cache, 3)
    logits(m, tokens, cache)
    cache.crop(-1000)
    assert (cache.get_seq_length(), cache.allocated_bytes) == (0, 0)
    assert_same(logits(m, tokens, cache), logits(m, tokens))
    cache.crop(0)
    assert cache.get_seq_length() == 30
    with pytest.raises(ValueError, match="must be negative"):
        cache.crop(5)


def test_reset_takes_another_batch(model):
    m = model("llama", "dms")
    cache = new_cache(m)
    logits(m, ids(1, 30), cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.allocated_bytes) == (0, 0)
    tokens = ids(3, 20, seed=4)
    assert_same(logits(m, tokens, cache), logits(m, tokens))


SELECTIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "indices": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        [0, 2],
    ),
    "none": (lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])), [0, 1, 2]),
    "copy": (copy.deepcopy, [0, 1, 2]),
}


@pytest.mark.parametrize("operation", SELECTIONS)
def test_rows_move_with_all_they_hold(model, operation):
    """Rows differ in text and padding; copies of a row continue independently of each other."""
    m = model("llama", "dms")
    change, rows = SELECTIONS[operation]
    tokens, after = ids(3, 25), ids(len(rows), 15, seed=5)
    mask = torch.ones(3, 40, dtype=torch.int64)
    mask[1, :6] = 0
    cache = new_cache(m)
    logits(m, tokens, cache, mask[:, :25])
    changed = change(cache) or cache
    expected = logits(m, torch.cat([tokens[rows], after], 1), mask=mask[rows])
    assert_same(logits(m, after, changed, mask[rows]), expected[:, 25:])
    assert pages_in_use(changed) == int((-(-changed.live() // 16)).sum())
    if changed is not cache:
        assert_same(logits(m, after, cache, mask), expected[:, 25:])


def test_an_empty_cache_can_be_rearranged(model):
    m = model("llama", "dms")
    cache = new_cache(m)
    for change, _ in SELECTIONS.values():
        change(cache)
    cache.reset()
    assert_same(logits(m, ids(1, 12), cache), logits(m, ids(1, 12)))


def test_another_batch_size_is_refused(model):
    m = model("llama", "dms")
    cache = new_cache(m)
    logits(m, ids(1, 12), cache)
    with pytest.raises(ValueError, match=r"holds 1 sequence\(s\), 3 arrive"):
        logits(m, ids(3, 4), cache)


DRAFTS = [
    (("llama", "dms"), ("llama", None)),
    (("llama", None), ("llama", "dms")),
    (("llama", "dms"), ("llama", "dms")),
    (("llama", "dms_fastdms"), ("qwen2", "dms")),
]


def greedy_with_draft(main, draft, prompt):
    """Tokens with an assistant, and how many candidates each round brought and kept."""
    rounds = []
    draft.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    update = type(main)._update_model_kwargs_for_generation

    def counted(outputs, kwargs, *rest, num_new_tokens=1, **more):
        rounds.append((outputs.logits.shape[1] - 1, num_new_tokens - 1))
        return update(main, outputs, kwargs, *rest, num_new_tokens=num_new_tokens, **more)

    main._update_model_kwargs_for_generation = counted
    try:
        return main.generate(prompt, assistant_model=draft, **OPTIONS), rounds
    finally:
        del main._update_model_kwargs_for_generation


@pytest.mark.parametrize(("main", "draft"), DRAFTS)
@pytest.mark.parametrize("length", [1, 2 * WINDOW])
def test_an_assistant_changes_no_token(model, main, draft, length):
    main, draft = model(*main), model(*draft, seed=1)
    prompt = ids(1, length)
    tokens, rounds = greedy_with_draft(main, draft, prompt)
    assert torch.equal(tokens, main.generate(prompt, **OPTIONS))
    assert any(kept < offered - 1 for offered, kept in rounds)  # several were taken back


def test_a_model_drafts_for_itself(model):
    """Every candidate is accepted, so that caches grow by several tokens a round."""
    m = model("llama", "dms")
    prompt = ids(1, 20)
    tokens, rounds = greedy_with_draft(m, copy.deepcopy(m), prompt)
    assert torch.equal(tokens, m.generate(prompt, **OPTIONS))
    assert len(rounds) < 10


def test_candidates_from_the_prompt(model):
    m = model("llama", "dms")
    prompt = ids(1, 10).repeat(1, 4)
    with_lookup = m.generate(prompt, prompt_lookup_num_tokens=4, **OPTIONS)
    assert torch.equal(with_lookup, m.generate(prompt, **OPTIONS))


def test_a_dms_cache_for_assisted_generation_is_refused(model):
    m = model("llama", "dms")
    with pytest.raises(ValueError, match="takes tokens back"):
        m.generate(
            ids(1, 9),
            assistant_model=model("llama", None),
            past_key_values=new_cache(m),
            **OPTIONS,
        )
    given = m.generate(
        ids(1, 9), assistant_model=model("llama", None), past_key_values=DynamicCache(), **OPTIONS
    )
    assert torch.equal(given, m.generate(ids(1, 9), **OPTIONS))
