"""`generate` of an export frees what is evicted and still gives the masked model's tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.unit.inference.conftest import small_spec

NEW = 20
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def model(folder, load):
    """(family, preset) -> float32 model of an export."""

    def _model(family, preset, **overrides):
        return load(folder(family, small_spec(preset, **overrides)))

    return _model


def ids(length, seed=1, low=1):
    return torch.randint(low, 61, (1, length), generator=torch.Generator().manual_seed(seed))


def masked(model, prompt, **options):
    """The same with the masked cache of full length."""
    return model.generate(prompt, past_key_values=DynamicCache(), **{**OPTIONS, **options})


CASES = [
    ("llama", "dms", {}),
    ("qwen2", "dms", {}),
    ("qwen3", "dms_nvidia", {}),
    ("llama", "dms_fastdms", {}),
    ("llama", "dms", {"eviction": "immediate"}),
]


@pytest.mark.parametrize(("family", "preset", "overrides"), CASES)
def test_same_tokens_less_memory(model, family, preset, overrides):
    m = model(family, preset, **overrides)
    shrunk = []
    for length in (1, 8, 9, 40):
        prompt = ids(length)
        done = m.generate(prompt, return_dict_in_generate=True, **OPTIONS)
        cache = done.past_key_values
        assert type(cache).__name__ == "DMSCache"
        assert torch.equal(done.sequences, masked(m, prompt))
        with torch.no_grad():
            full = m(done.sequences[:, :-1], past_key_values=DynamicCache(), use_cache=True)
        assert torch.equal(m.dms_live_slots(cache), m.dms_live_slots(full.past_key_values))
        shrunk.append(cache.live().double().mean().item() / (length + NEW - 1))
        assert cache.get_seq_length() == length + NEW - 1
    assert sum(shrunk) / 4 < 0.85


def test_left_padding_holds_no_padding(model):
    m = model("qwen3", "dms")
    batch = torch.cat([ids(20), torch.cat([torch.zeros(1, 9, dtype=torch.int64), ids(11, 2)], 1)])
    attention = torch.ones_like(batch)
    attention[1, :9] = 0
    done = m.generate(batch, attention_mask=attention, return_dict_in_generate=True, **OPTIONS)
    assert torch.equal(done.sequences, masked(m, batch, attention_mask=attention))
    alone = m.generate(
        batch[1:, 9:], attention_mask=attention[1:, 9:], return_dict_in_generate=True, **OPTIONS
    )
    assert torch.equal(done.sequences[1, 20:], alone.sequences[0, 11:])
    found = m.dms_live_slots(done.past_key_values)[:, 1]
    assert torch.equal(found, m.dms_live_slots(alone.past_key_values)[:, 0])


def test_a_mask_with_holes(model):
    """Token 0 in the middle counts as padding unless a mask includes it."""
    prompt = ids(40)
    prompt[0, [0, 5, 6, 20]] = 0
    m = model("llama", "dms")
    assert torch.equal(m.generate(prompt, **OPTIONS), masked(m, prompt))


def test_another_turn(model):
    m = model("qwen3", "dms_nvidia")
    first = m.generate(ids(12), return_dict_in_generate=True, **OPTIONS)
    prompt = torch.cat([first.sequences, ids(9, 2)], 1)
    again = m.generate(prompt, past_key_values=first.past_key_values, **OPTIONS)
    assert torch.equal(again, masked(m, prompt))


def test_sampling(model):
    m = model("llama", "dms")
    options = {"do_sample": True, "top_k": 5, "num_return_sequences": 3}
    torch.manual_seed(0)
    ours = m.generate(ids(10), **{**OPTIONS, **options})
    torch.manual_seed(0)
    assert torch.equal(ours, masked(m, ids(10), **options))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True, "top_k": 5},
    ],
    ids=["search", "sample"],
)
@pytest.mark.parametrize(("family", "preset"), [("llama", "dms"), ("qwen3", "dms_nvidia")])
def test_beams(model, family, preset, options):
    m = model(family, preset)
    batch = torch.cat([ids(14), ids(14, 2)])
    torch.manual_seed(0)
    done = m.generate(batch, return_dict_in_generate=True, **{**OPTIONS, **options})
    torch.manual_seed(0)
    assert torch.equal(done.sequences, masked(m, batch, **options))
    assert type(done.past_key_values).__name__ == "DMSCache"
    assert done.past_key_values.live().double().mean() < 0.85 * (14 + NEW - 1)


def test_a_dynamic_cache_is_kept(model):
    done = model("llama", "dms").generate(
        ids(10), return_dict_in_generate=True, cache_implementation="dynamic", **OPTIONS
    )
    assert isinstance(done.past_key_values, DynamicCache)


def test_exported_files_name_only_each_other(folder):
    directory = folder("llama", small_spec("dms"))
    files = {path.stem for path in directory.glob("*.py")}
    for path in directory.glob("*.py"):
        text = path.read_text()
        optional = '_PACKAGE = "dms_train.inference.export_pages"'  # imported where it exists
        assert "dms_train" not in text.replace("dms_train's", "").replace(optional, "")
        for line in text.splitlines():
            if line.startswith("from ."):
                assert line.split()[1].lstrip(".") in files
