"""The shipped modelling code against an independent float64 forward."""

from __future__ import annotations

import pytest
import torch

from dms_train.families import FAMILIES
from tests.support.shipped import shipped_module
from tests.unit.hf.conftest import in_memory

PRESETS = ("dms", "dms_nvidia", "dms_fastdms")


def classes(family):
    """The configuration and the model class that an export of this family defines."""
    described = FAMILIES[family]
    code = shipped_module(f"modeling_{family}_dms", family)
    return getattr(code, f"{described.config_class}DMS"), getattr(code, f"{described.causal_lm}DMS")


def build(family, weights, architecture, spec, *, flat=False):
    """A model from our config keys and weights, without a directory."""
    from dms_train.hf.config_json import to_hf_config
    from dms_train.hf.formats import FORMATS, ExportedModel

    model = ExportedModel(
        architecture=architecture, spec=spec, dtype="float32", target_cr=4.0, block_size=2
    )
    keys = FORMATS["nvidia" if flat else "dms"].config_keys(model)
    values = {**to_hf_config(architecture), **keys}
    values.pop("model_type")
    config_class, model_class = classes(family)
    model = model_class(config_class(**values, attn_implementation="eager"))
    missing, unexpected = model.load_state_dict(in_memory(weights, architecture), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


@pytest.fixture
def tiny(architecture, random_weights):
    """(family, spec, flat=False) -> model, weights, architecture, ids [40]."""

    def _tiny(family, spec, *, flat=False):
        a = architecture(family)
        weights = random_weights(a)
        ids = torch.randint(0, a.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
        return build(family, weights, a, spec, flat=flat), weights, a, ids

    return _tiny


def assert_same(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_independent_forward(tiny, spec, reference_forward, family, preset):
    s = spec(preset)
    model, weights, a, ids = tiny(family, s)
    logits, decisions = reference_forward(weights, a, s, ids)
    assert 0.3 < (decisions > 0).double().mean() < 0.7
    assert decisions.abs().min() > 1e-3  # no decision hangs on rounding
    with torch.no_grad():
        found = model(ids[None]).logits[0]
    assert_same(found, logits)
    assert_same(model.dms_decision_logits(ids[None])[:, 0], decisions)


@pytest.mark.parametrize(
    ("family", "channel", "in_files"), [("phi3", 2, 4), ("phi3", -1, -1), ("glm4", 4, 1)]
)
def test_the_eviction_channel_where_files_order_channels_in_another_way(
    tiny, spec, reference_forward, family, channel, in_files
):
    s = spec("dms").override(channel=channel)
    model, weights, a, ids = tiny(family, s)
    assert model.model.layers[0].self_attn.dms.numbers.channel == in_files
    logits, decisions = reference_forward(weights, a, s, ids)
    assert_same(model(ids[None]).logits[0], logits)
    assert_same(model.dms_decision_logits(ids[None])[:, 0], decisions)


def test_immediate_eviction(tiny, spec, reference_forward):
    s = spec("dms").override(eviction="immediate")
    model, weights, a, ids = tiny("llama", s)
    expected = reference_forward(weights, a, s, ids)[0]
    assert_same(model(ids[None]).logits[0], expected)


@pytest.mark.parametrize("preset", ["dms_nvidia", "dms_fastdms"])
def test_flat_keys_mean_the_same(tiny, spec, preset):
    s = spec(preset)
    nested, _, _, ids = tiny("qwen3", s)
    flat = tiny("qwen3", s, flat=True)[0]
    assert torch.equal(nested(ids[None]).logits, flat(ids[None]).logits)


def test_conventions_matter(tiny, spec, reference_forward):
    """The comparison above can fail: each convention changes the logits."""
    s = spec("dms_nvidia")
    model, weights, a, ids = tiny("qwen3", s)
    found = model(ids[None]).logits[0].double()
    for change in (
        {"channel": 0},
        {"decision_shift": 0},
        {"window": 5},
        {"clear_after_rope": False},
        {"alpha_offset": 20.0},
    ):
        other = reference_forward(weights, a, s.override(**change), ids)[0]
        assert (other - found).abs().max() > 1e-3, change


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chunks", [(1,) * 40, (5, 35), (39, 1), (7, 1, 1, 20, 11)])
def test_any_split_gives_the_same_logits(tiny, spec, preset, chunks):
    model, _, _, ids = tiny("qwen2", spec(preset))
    with torch.no_grad():
        whole = model(ids[None]).logits
        cache, parts = None, []
        for chunk in ids.split(list(chunks)):
            output = model(chunk[None], past_key_values=cache, use_cache=True)
            cache, parts = output.past_key_values, [*parts, output.logits]
    assert_same(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_left_padding(tiny, spec, family):
    model, _, _, ids = tiny(family, spec("dms"))
    short, pad = ids[:25], torch.zeros(15, dtype=torch.int64)
    batch = torch.stack([ids, torch.cat([pad, short])])
    mask = torch.ones_like(batch)
    mask[1, :15] = 0
    with torch.no_grad():
        padded = model(batch, attention_mask=mask).logits
        assert torch.isfinite(padded).all()
        assert_same(padded[1, 15:], model(short[None]).logits[0])
        assert_same(padded[0], model(ids[None]).logits[0])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_batched_generation_equals_single(tiny, spec, family):
    model, _, _, ids = tiny(family, spec("dms_nvidia"))
    batch = torch.stack([ids[:20], torch.cat([torch.zeros(8, dtype=torch.int64), ids[:12]])])
    mask = torch.ones_like(batch)
    mask[1, :8] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    both = model.generate(batch, attention_mask=mask, **options)
    alone = model.generate(
        ids[None, :12], attention_mask=torch.ones(1, 12, dtype=torch.int64), **options
    )
    assert torch.equal(both[1, 20:], alone[0, 12:])


def test_greedy_generation_equals_full_forwards(tiny, spec):
    model, _, _, ids = tiny("llama", spec("dms_fastdms"))
    grown = ids[None, :10]
    with torch.no_grad():
        for _ in range(12):
            grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], 1)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids[None, :10], max_new_tokens=12, **options), grown)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"num_beams": 3}),
        ("qwen3_5_text", {"num_beams": 3}),
        ("llama", {"do_sample": True, "top_k": 5}),
    ],
)
def test_other_generation_modes(tiny, spec, family, options):
    model, _, _, ids = tiny(family, spec("dms"))
    torch.manual_seed(0)
    common = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(ids[None, :10], use_cache=True, **common, **options)
    torch.manual_seed(0)
    full = model.generate(ids[None, :10], use_cache=False, **common, **options)
    assert torch.equal(cached, full)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_second_turn_continues_the_cache(tiny, spec, family):
    model, _, _, ids = tiny(family, spec("dms_nvidia"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = model.generate(ids[None, :10], return_dict_in_generate=True, **options)
    prompt = torch.cat([first.sequences, ids[None, 10:20]], 1)
    fresh = model.generate(prompt, **options)
    continued = model.generate(prompt, past_key_values=first.past_key_values, **options)
    assert torch.equal(fresh, continued)


@pytest.mark.parametrize("preset", PRESETS)
def test_live_slots_equal_the_accounting(tiny, spec, preset):
    from dms_train.method.accounting import live_slots

    s = spec(preset)
    model, _, _, ids = tiny("llama", s)
    with torch.no_grad():
        cache = model(ids[None], use_cache=True).past_key_values
    decisions = model.dms_decision_logits(ids[None]) > 0
    assert torch.equal(model.dms_live_slots(cache), live_slots(decisions, s)[..., -1])


def test_gradients_reach_all_but_the_eviction_channel(tiny, spec):
    model, _, a, ids = tiny("llama", spec("dms_nvidia"))
    model(ids[None], labels=ids[None]).loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    eviction_channel = (a.num_attention_heads // a.num_query_groups) * a.kv_channels
    rows = gradient.abs().sum(1)
    assert (rows[a.kv_channels - 1 :: eviction_channel] == 0).all()
    assert (rows > 0).sum() == len(rows) - a.num_query_groups


def test_static_cache_is_refused(tiny, spec):
    model, _, _, ids = tiny("llama", spec("dms"))
    with pytest.raises(ValueError, match="DynamicCache"):
        model.generate(ids[None, :8], max_new_tokens=4, cache_implementation="static")


def test_a_dense_config_is_refused(architecture):
    from dms_train.hf.config_json import to_hf_config

    values = to_hf_config(architecture("llama"))
    values.pop("model_type")
    config, model = classes("llama")
    with pytest.raises(ValueError, match="not a DMS model"):
        model(config(**values))


@pytest.mark.parametrize("key", [{"dms_separate_alpha": True}, {"dms_alpha_per": "layer"}])
def test_other_variants_are_refused(key):
    code = shipped_module("configuration_dms")
    with pytest.raises(ValueError, match=next(iter(key))):
        code.dms_numbers(classes("qwen3")[0](dms_window_size=512, **key))


def test_eviction_can_be_disabled(architecture, random_weights, spec):
    from transformers import Qwen3ForCausalLM

    a = architecture("qwen3")
    weights = random_weights(a)
    ids = torch.arange(30)[None]
    for layer in range(
        a.num_layers
    ):  # an untouched eviction channel weighs nothing in the dense model
        rows = slice(a.kv_channels - 1, None, 2 * a.kv_channels)
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"][rows] = 0
    model = build("qwen3", weights, a, spec("dms_fastdms"), flat=True)
    model.config.dms_disable_eviction = True
    disabled = type(model)(model.config).eval()
    disabled.load_state_dict(model.state_dict())
    dense = Qwen3ForCausalLM(model.config).eval()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_same(disabled(ids).logits, dense(ids).logits)


def test_a_cache_with_states_cannot_be_cropped_and_counts_no_slots_for_them(tiny, spec):
    model, _, _, ids = tiny("qwen3_5_text", spec("dms"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    done = model.generate(ids[None, :10], return_dict_in_generate=True, **options)
    cache = done.past_key_values
    assert cache.get_seq_length() == 15
    assert cache.live()[0].sum() == 0 < cache.live()[1].sum()
    assert model.dms_live_slots(cache).shape == (1, 1, 2)
    with pytest.raises(ValueError, match="cannot return to an earlier token"):
        cache.crop(-2)
    cache.reset()
    again = model.generate(ids[None, :10].expand(2, -1), past_key_values=cache, **options)
    assert torch.equal(again[0], done.sequences[0])
