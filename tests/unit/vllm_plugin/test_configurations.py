"""Configurations of exports in the dms format, as vLLM loads and pickles them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from dms_train.export.writer import write_export
from dms_train.families import FAMILIES
from dms_train.vllm_plugin.configurations import CONFIGURATIONS, register_configurations
from dms_train.vllm_plugin.plugin import SERVED_FAMILIES
from tests.unit.inference.conftest import small_spec, tiny_architecture, varied_weights


def test_every_served_family_has_one():
    assert [c.model_type for c in CONFIGURATIONS] == [f"dms_{name}" for name in SERVED_FAMILIES]


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_an_export_loads_without_its_code(family: str, tmp_path: Path):
    a = tiny_architecture(family)
    write_export(
        tmp_path / "export",
        architecture=a,
        spec=small_spec("dms"),
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms",
        weights=varied_weights(a, 0).items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    register_configurations()
    register_configurations()  # vLLM may load a plugin again
    config = AutoConfig.from_pretrained(tmp_path / "export", trust_remote_code=False)
    assert type(config) in CONFIGURATIONS
    copy = pickle.loads(pickle.dumps(config))
    assert copy.num_key_value_heads == a.num_query_groups
    assert copy.dms["spec"]["window"] == 8
    assert copy.architectures == [f"{FAMILIES[family].causal_lm}DMS"]
    # the parent's rule of RoPE, which vLLM reads
    rope = copy.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == a.rotary_base  # Gemma 3 has two
