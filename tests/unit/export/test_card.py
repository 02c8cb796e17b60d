"""The model card, read the way the hub reads it."""

from __future__ import annotations

import re

import pytest

from dms_train.export.card import CARD_FILE, add_evaluation, read_base

ModelCard = pytest.importorskip("huggingface_hub").ModelCard


def base_model(folder, front_matter):
    folder.mkdir()
    (folder / CARD_FILE).write_text(f"---\n{front_matter}---\n\n# Base\n")
    return str(folder)


def rows(text):
    """First column to second of every table."""
    found = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return {name.strip("`"): value for name, value in found}


def test_the_front_matter_is_what_the_hub_reads(export, tmp_path):
    base = base_model(tmp_path / "Base-1B", "license: apache-2.0\nlanguage:\n- en\n- de\n")
    data = ModelCard.load(export(provenance={"model": base}) / CARD_FILE).data
    assert (data.license, data.language) == ("apache-2.0", ["en", "de"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert "dynamic-memory-sparsification" in data.tags
    assert data.base_model is None  # a folder is no name on the hub


def test_a_hub_id_is_the_base_model(export, tmp_path, monkeypatch):
    data = ModelCard.load(export(provenance={"model": "someone/no-such-model"}) / CARD_FILE).data
    assert data.base_model == "someone/no-such-model"
    assert data.license == "unknown"


@pytest.mark.parametrize("front_matter", ["", "license: [", "- a\n", "license: 3\n"])
def test_a_licence_that_is_not_stated_is_unknown(tmp_path, front_matter):
    assert read_base(base_model(tmp_path / "base", front_matter)).license == "unknown"


def test_the_base_models_own_terms_are_carried_over(export, tmp_path):
    terms = "license: other\nlicense_name: terms\nlicense_link: https://example.org/terms\n"
    base = base_model(tmp_path / "base", terms + "base_model: someone/older\ndatasets: [x]\n")
    data = ModelCard.load(export(provenance={"model": base}) / CARD_FILE).data.to_dict()
    assert data["license_link"] == "https://example.org/terms"
    assert "base_model" not in data  # that is the base model's base model
    assert "datasets" not in data


def test_the_tables_state_the_method_and_what_was_measured(export):
    text = (export() / CARD_FILE).read_text()
    found = rows(text)
    assert found["window"] == "5"
    assert found["alpha_scale"] == "100.0"
    assert found["training step"] == "12"
    assert found["compression ratio asked for in training"] == "3"
    assert found["compression ratio on the text of the self-test"] == "2.346"
    assert found["base model"] == "none: trained from scratch"
    assert "trust_remote_code=True" in text
    assert "from dms_train import LLM" in text


def test_a_dense_export_has_no_method(export):
    text = (export(spec=None, cr_factor=None) / CARD_FILE).read_text()
    assert "trust_remote_code" not in text
    assert "Evaluation" not in text
    assert ModelCard(text).data.tags is None


def test_an_evaluation_replaces_the_one_before(export):
    directory = export()
    before = (directory / CARD_FILE).read_text()
    add_evaluation(directory, {"kl_nats_per_token": 0.5, "seconds": 3.0})
    add_evaluation(
        directory,
        {
            "kl_nats_per_token": 0.0123456,
            "kl_nats_per_token.low": 0.01,
            "kl_nats_per_token.high": 0.015,
            "kv_reads.student": 123456.7,
            "seconds": 3.0,
        },
    )
    text = (directory / CARD_FILE).read_text()
    found = rows(text)
    assert found["KL(original, this model), nats per token"] == "0.01235 [0.01, 0.015]"
    assert found["KV reads per sequence, this model"] == "123,457"
    assert "Not evaluated" not in text
    assert text.partition("## Evaluation")[0] == before.partition("## Evaluation")[0]
    assert text.partition("## How to load")[2] == before.partition("## How to load")[2]


def test_a_folder_without_our_card_is_not_changed(tmp_path):
    add_evaluation(tmp_path, {"cr_factor": 2.0})
    (tmp_path / CARD_FILE).write_text("# Someone's own card\n")
    add_evaluation(tmp_path, {"cr_factor": 2.0})
    assert (tmp_path / CARD_FILE).read_text() == "# Someone's own card\n"
