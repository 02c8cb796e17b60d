"""Exports: what is in them, how they load, and that they appear whole or not at all."""

from __future__ import annotations

import json

import pytest
import torch

from dms_train.families import FAMILIES
from dms_train.hf.config_json import from_hf_config, to_hf_config
from dms_train.hf.directory import read_architecture
from dms_train.hf.formats import ExportRefused, read_spec
from dms_train.hf.formats.flat import METADATA_FILE
from dms_train.hf.formats.registry import MARKER_FILE
from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.selftest import REFERENCE, SelfTest
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_reader import WeightReader

CASES = [
    *((family, "dms") for family in FAMILIES),
    ("qwen3", "dms_nvidia"),
    ("llama", "dms_fastdms"),
    ("qwen3", "dms_fastdms"),
]


def ids(a, length=30):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, a.vocab_size, (length,), generator=generator)


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_loads_and_computes(
    export, load, architecture, random_weights, reference_forward, spec, family, preset
):
    a, s = architecture(family), spec(preset)
    directory = export(family, s, dtype=torch.bfloat16)
    weights = {n: t.bfloat16() for n, t in random_weights(a).items()}
    model = load(directory)
    expected, decisions = reference_forward(weights, a, s, ids(a))
    torch.testing.assert_close(
        model(ids(a)[None]).logits[0].double(), expected, atol=1e-4, rtol=1e-4
    )
    found = model.dms_decision_logits(ids(a)[None])[:, 0].double()
    torch.testing.assert_close(found, decisions, atol=1e-3, rtol=1e-4)
    assert type(model).__name__ == f"{FAMILIES[family].classes}ForCausalLMDMS"


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_export_loads_in_plain_transformers(export, load, architecture, family):
    directory = export(family, None)
    model = load(directory, trust_remote_code=False)
    assert type(model).__name__ == f"{FAMILIES[family].classes}ForCausalLM"
    assert from_hf_config(model.config.to_dict()) == architecture(family)
    assert set(WeightReader(directory).names()) == set(expected_shapes(architecture(family)))
    assert not list(directory.glob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_shapes_are_those_of_transformers(export, load, architecture, family, tmp_path):
    # a model in memory may hold the experts of a layer in one tensor
    load(export(family, None), trust_remote_code=False).save_pretrained(tmp_path / "saved")
    reader = WeightReader(tmp_path / "saved")
    shapes = {name: reader.shape(name) for name in reader.names()}
    assert shapes == expected_shapes(architecture(family))


@pytest.mark.parametrize("preset", [None, "dms", "dms_nvidia"])
def test_the_config_of_the_original_is_carried_over(export, architecture, spec, tmp_path, preset):
    original = {
        **to_hf_config(architecture("qwen3")),
        "initializer_range": 0.041666666666666664,
        "attention_dropout": 0.1,
        "bos_token_id": 3,
        "eos_token_id": [4, 5],
        "pad_token_id": 6,
        "max_window_layers": 2,
    }
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "config.json").write_text(json.dumps(original))
    s = None if preset is None else spec(preset)
    dtype = torch.float32 if preset is None else torch.bfloat16
    written = read_config(export("qwen3", s, source_dir=tmp_path / "original", dtype=dtype))
    changed = {"architectures", "model_type"} if s is not None else set()
    kept = {key: value for key, value in original.items() if key not in changed}
    assert {key: written.get(key) for key in kept} == kept


def test_a_window_that_no_sequence_leaves_is_not_carried_over(
    export, architecture, load, spec, tmp_path
):
    a = architecture("qwen2")
    windows = {"use_sliding_window": True, "sliding_window": a.max_position_embeddings}
    kinds = ["full_attention", "sliding_attention"]
    original = {**to_hf_config(a), **windows, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(original))
    directory = export("qwen2", spec("dms"), source_dir=tmp_path)
    assert from_hf_config(read_config(directory)) == a
    logits = load(directory).dms_decision_logits(torch.arange(20)[None])
    assert len(logits) == a.num_layers


def test_own_format_needs_its_code(export, load, spec):
    directory = export("llama", spec("dms"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(directory, trust_remote_code=False)


@pytest.mark.parametrize("preset", ["dms", "dms_nvidia"])
def test_save_pretrained_keeps_the_layout(export, load, spec, tmp_path, preset):
    directory = export("qwen3", spec(preset), dtype=torch.bfloat16)
    first = load(directory)
    first.save_pretrained(tmp_path / "again")
    before, after = read_config(directory), read_config(tmp_path / "again")
    kept = [key for key in before if key.startswith("dms") or key in ("model_type", "auto_map")]
    assert {key: after.get(key) for key in kept} == {key: before[key] for key in kept}
    prompt = torch.arange(20)[None]
    assert torch.equal(load(tmp_path / "again")(prompt).logits, first(prompt).logits)


def test_options_of_other_loaders_are_accepted(export, load, spec):
    directory = export("qwen3", spec("dms_nvidia"), dtype=torch.bfloat16)
    load(directory, dms_chunked_prefill=4096, dms_preallocate_for_tokens=64)


def test_files(export, spec, stories):
    directory = export("qwen3", spec("dms_nvidia"), dtype=torch.bfloat16, source_dir=stories)
    names = {p.name for p in directory.iterdir()}
    assert names == {
        "adapter_dms.py",
        "config.json",
        "configuration_dms.py",
        "configuration_qwen3_dms.py",
        "generation_dms.py",
        "modeling_dms.py",
        "modeling_qwen3_dms.py",
        "pages_dms.py",
        "pool_dms.py",
        "README.md",
        "dms_metadata.json",
        "export.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_config(directory)
    assert (config["torch_dtype"], config["dtype"]) == ("bfloat16", "bfloat16")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["bos_token_id"] == 1  # carried over
    assert config["vocab_size"] == 61  # not carried over
    assert WeightReader(directory).dtype("model.norm.weight") == "BF16"


def test_metadata(export, spec):
    directory = export(
        "qwen3", spec("dms_nvidia"), dtype=torch.bfloat16, target_cr=3.5, cr_factor=3.2
    )
    stored = read_json(directory / METADATA_FILE)
    assert stored["format_version"] == 1
    assert stored["config"] == {
        "window_size": 4,
        "alpha_scale": 100.0,
        "alpha_offset": 5.0,
        "target_cr": 3,
        "context_len": 256,
        "compression_mode": "relu",
        "dms_decision_shift": 1,
        "decision_source": "borrowed_query_last_channel",
    }
    assert stored["provenance"]["step"] == 7
    assert stored["provenance"]["target_cr"] == 3.5
    assert read_json(directory / MARKER_FILE)["export_format"] == "nvidia"


def test_nothing_foreign_is_copied(export, spec, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pytorch_model.bin", "weights.pt", "modeling_old.py", "x.safetensors"):
        (source / name).write_bytes(b"")
    old = {"auto_map": {"AutoConfig": "modeling_old.C"}, "dms_cr": 3, "eos_token_id": 9}
    (source / "config.json").write_text(json.dumps(old))
    (source / "chat_template.jinja").write_text("{{ x }}")
    directory = export("llama", spec("dms"), source_dir=source)
    assert not {p.name for p in directory.iterdir()} & {p.name for p in source.iterdir()} - {
        "config.json",
        "chat_template.jinja",
    }
    config = read_config(directory)
    assert config["eos_token_id"] == 9
    assert "dms_cr" not in config
    assert "old" not in config["auto_map"]["AutoConfig"]


def test_tied_head_is_omitted(export, spec, architecture, random_weights):
    weights = random_weights(architecture("qwen3"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    directory = export("qwen3", spec("dms"), weights=weights.items())
    assert "lm_head.weight" not in WeightReader(directory).names()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w[1:], "1 tensors are missing, first model.embed_tokens"),
        (lambda w: [*w, w[0]], "repeated"),
        (lambda w: [*w, ("dms_proj_alpha.weight", torch.zeros(1))], "not part of"),
        (lambda w: [(w[0][0], w[0][1].T), *w[1:]], "expected"),
    ],
)
def test_wrong_weights_leave_nothing(
    export, spec, architecture, random_weights, tmp_path, change, named
):
    weights = list(random_weights(architecture("llama")).items())
    with pytest.raises(ValueError, match=named):
        export("llama", spec("dms"), weights=change(weights))
    assert not list(tmp_path.iterdir())


def test_interrupted_export_keeps_the_old_one(export, spec, tmp_path):
    directory = export("llama", spec("dms"))
    before = (directory / "config.json").read_text()

    def interrupted():
        yield "model.norm.weight", torch.ones(32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export("llama", spec("dms", window=9), weights=interrupted())
    assert (directory / "config.json").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_export_is_replaced(export, spec, tmp_path):
    export("llama", spec("dms"))
    directory = export("llama", spec("dms", window=9))
    assert read_config(directory)["dms"]["spec"]["window"] == 9
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_foreign_directory_is_not_replaced(export, spec, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.txt").write_text("")
    with pytest.raises(FileExistsError, match="not an export"):
        export("llama", spec("dms"))


def test_refusal_comes_before_any_write(export, spec, tmp_path):
    with pytest.raises(ExportRefused, match="float32"):
        export("qwen3", spec("dms_nvidia"))
    assert not list(tmp_path.iterdir())


def test_dense_export_has_no_selftest(export):
    reference = SelfTest(
        input_ids=torch.arange(3), decision_logits=torch.zeros(1, 1, 3), logits=torch.zeros(3, 5)
    )
    with pytest.raises(ValueError, match="no decisions"):
        export("llama", None, selftest=reference)


def test_selftest_round_trip(tmp_path):
    reference = SelfTest(
        input_ids=torch.arange(3),
        decision_logits=torch.randn(2, 1, 3),
        logits=torch.randn(5, 3).T,
        dtype="float32",
        kl_tolerance=0.5,
    )
    reference.save(tmp_path)
    read = SelfTest.load(tmp_path)
    for name in ("input_ids", "decision_logits", "logits"):
        assert torch.equal(getattr(read, name), getattr(reference, name))
    assert (read.dtype, read.decision_tolerance, read.kl_tolerance) == ("float32", 0.5, 0.5)


def test_broken_selftest(tmp_path):
    with pytest.raises(FileNotFoundError, match="no self-test"):
        SelfTest.load(tmp_path)
    (tmp_path / REFERENCE).parent.mkdir()
    (tmp_path / REFERENCE).write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="not a readable self-test"):
        SelfTest.load(tmp_path)


@pytest.mark.parametrize(
    "shapes", [((3,), (1, 1, 4), (3, 5)), ((3,), (1, 1, 3), (4, 5)), ((1, 3), (1, 1, 3), (3, 5))]
)
def test_selftest_shapes(shapes):
    tokens, decisions, logits = (torch.zeros(s, dtype=torch.int64) for s in shapes)
    with pytest.raises(ValueError, match="self-test"):
        SelfTest(input_ids=tokens, decision_logits=decisions, logits=logits)


def test_a_model_from_scratch_states_the_special_tokens_of_its_tokenizer(export, spec, tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    added = [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<s>"}]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    named = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "pad_token": None}
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    for method in (None, spec("dms")):
        directory = export("llama", method, source_dir=source)
        config = read_config(directory)
        assert (config["eos_token_id"], config["bos_token_id"]) == (3, 4)
        assert "pad_token_id" not in config
        stated = read_json(directory / "generation_config.json")
        assert stated == {"eos_token_id": 3, "bos_token_id": 4}
    sampling = {"eos_token_id": [3, 7], "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(sampling))
    directory = export("llama", None, source_dir=source)
    assert read_json(directory / "generation_config.json") == {**sampling, "bos_token_id": 4}


def test_an_export_does_not_take_over_what_its_source_states_of_its_own_weights(export, tmp_path):
    """As with the tokenizer of a quantised or a retrofitted model; the export would be misread."""
    source = tmp_path / "source"
    source.mkdir()
    foreign = {
        "quantization_config": {"bits": 4},
        "compression_config": {"format": "float"},
        "quantization": {"bits": 4},
        "dmc": {"spec": {}},
        "dms_window_size": 3,
        "bos_token_id": 7,
    }
    (source / "config.json").write_text(json.dumps(foreign))
    directory = export("llama", None, source_dir=source)
    written = read_config(directory)
    assert foreign.keys() & written.keys() == {"bos_token_id"}
    assert read_spec(directory) is None
    assert read_architecture(directory).family == "llama"
