"""The tokenizer of an export: the ids of its source in every loader, or a clear word on none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Inner
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from dms_train.export.shipped import configuration_dmc, configuration_dms
from dms_train.export.writer import write_export
from dms_train.hf.directory import read_architecture
from dms_train.hf.rope import RopeScaling
from dms_train.hf.tensors import expected_shapes
from dms_train.inference.tokenizer import Tokenizer
from dms_train.method.spec import PRESETS
from tests.support import piece_tokenizer
from tests.unit.export.conftest import ARCHITECTURE

TEXT = "there was  a cat: 2023 naïve 東京 😀\n\tto the park"


@pytest.mark.parametrize(
    "stated",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": "TokenizersBackend"},
        {
            "auto_map": {"AutoTokenizer": [None, "mine.MyTokenizer"]},
            "tokenizer_class": "MyTokenizer",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ["dms", "dense"])
@pytest.mark.filterwarnings("error:`rope_scaling` is deprecated:FutureWarning")
def test_auto_tokenizer_gives_the_ids_of_the_source_and_asks_nothing(
    export, tmp_path, capfd, stated, spec
):
    source = piece_tokenizer.write_tokenizer(tmp_path / "source", **stated)
    right = Inner.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    directory = export(source_dir=source, **({"spec": None} if spec == "dense" else {}))
    loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    assert loaded(TEXT)["input_ids"] == right
    assert loaded.eos_token == piece_tokenizer.END
    assert Tokenizer.load(directory).encode(TEXT) == right
    assert "auto_map" not in (directory / "tokenizer_config.json").read_text("utf-8")
    printed = "".join(capfd.readouterr())
    assert "custom code" not in printed
    assert f"from_pretrained(path{', trust_remote_code=False' * (spec == 'dms')})" in (
        directory / "README.md"
    ).read_text("utf-8")


@pytest.mark.parametrize("preset", ["dms", "dmc"])
def test_auto_tokenizer_needs_no_code_of_a_model_with_rope_scaling(export, tmp_path, preset):
    """As of Llama 3: the rule is stated where only the export's own code reads it."""
    source = piece_tokenizer.write_tokenizer(tmp_path / "source")
    rule = RopeScaling(factor=8.0, original_max_position_embeddings=32)
    directory = export(
        source_dir=source,
        architecture=dataclasses.replace(ARCHITECTURE, rope_scaling=rule),
        spec=PRESETS[preset].override(**({"window": 5} if preset == "dms" else {})),
        export_format=preset,
    )
    right = Inner.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    assert loaded(TEXT)["input_ids"] == right
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    stated = config.to_dict()
    found = {**(stated.get("rope_scaling") or {}), **(stated.get("rope_parameters") or {})}
    assert found["rope_type"] == "llama3"
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    assert [found[name] for name in names] == [getattr(rule, name) for name in names]
    assert read_architecture(directory).rope_scaling == rule


@pytest.mark.parametrize("code", [configuration_dms, configuration_dmc])
def test_a_plain_rope_is_stated_where_a_family_has_a_rule_by_default(code):
    """Transformers 4 gives gpt-oss YaRN unless its config.json says otherwise."""
    plain = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert code._with_rope_scaling(plain) == {**plain, "rope_scaling": None}


def test_a_source_with_tokenizer_json_alone_loads_too(export, tmp_path):
    source = piece_tokenizer.write_tokenizer(tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    loaded = AutoTokenizer.from_pretrained(export(source_dir=source), trust_remote_code=False)
    right = Inner.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    assert loaded(TEXT)["input_ids"] == right


def test_truncation_and_padding_are_not_carried_over(export, tmp_path):
    source = piece_tokenizer.write_tokenizer(tmp_path / "source", pad_token="<unk>")
    right = Inner.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    plain = (source / "tokenizer.json").read_bytes()
    assert (export(source_dir=source) / "tokenizer.json").read_bytes() == plain
    used = PreTrainedTokenizerFast.from_pretrained(source)
    used(TEXT, truncation=True, max_length=8, padding="max_length")
    used.save_pretrained(source)
    stored = Inner.from_file(str(export(source_dir=source) / "tokenizer.json"))
    assert (stored.truncation, stored.padding) == (None, None)
    assert stored.encode(TEXT).ids == right


def advice(out: Path, source: Path | None) -> list[str]:
    return write_export(
        out,
        architecture=ARCHITECTURE,
        spec=None,
        cr_factor=None,
        target_cr=1.0,
        dtype=torch.float32,
        export_format="dms",
        weights=[(n, torch.zeros(s)) for n, s in expected_shapes(ARCHITECTURE).items()],
        source_dir=source,
        selftest=None,
        provenance={},
    )


def test_an_export_without_a_tokenizer_says_so(tmp_path):
    source = piece_tokenizer.write_tokenizer(tmp_path / "source")
    assert advice(tmp_path / "with", source) == []
    assert "no tokenizer" not in (tmp_path / "with/README.md").read_text("utf-8")
    (source / "tokenizer.json").unlink()
    for name, given in (("no source", None), ("no file", source)):
        (line,) = advice(tmp_path / name, given)
        assert "no tokenizer.json, so it takes and returns token ids only" in line
        assert "This folder has no tokenizer" in (tmp_path / name / "README.md").read_text("utf-8")
