"""The code of an export under transformers 4 and the installed transformers.

The truth for logits is an independent float64 forward; the truth for tokens is greedy search that
computes the whole text for every token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from dms_train.method.spec import PRESETS
from tests.support import launch
from tests.unit.hf import conftest as hf

export = hf.export
TRANSFORMERS_4 = Path(os.environ.get("DMS_TRANSFORMERS_4", Path(sys.prefix) / "transformers4"))
PATHS = {"transformers 4": str(TRANSFORMERS_4), "installed": ""}
USE = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM

directory, result = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    directory, trust_remote_code=True, dtype=torch.float32
).eval()
ids = torch.arange(1, 31)[None]
options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
with torch.no_grad():
    logits, grown = model(ids).logits[0], ids
    for _ in range(options["max_new_tokens"]):
        grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], 1)
done = model.generate(ids, return_dict_in_generate=True, **options)
torch.save(
    {
        "version": transformers.__version__,
        "logits": logits,
        "tokens": done.sequences,
        "greedy": grown,
        "cache": type(done.past_key_values).__name__,
    },
    result,
)
"""


@pytest.fixture(params=PATHS)
def use(request, tmp_path):
    """directory -> what a process with this version of transformers computes."""
    if request.param == "transformers 4" and not TRANSFORMERS_4.is_dir():
        pytest.skip(f"{TRANSFORMERS_4} is absent; make setup installs it")

    def _use(directory):
        result = tmp_path / "result.pt"
        paths = {"PYTHONPATH": PATHS[request.param], "HF_MODULES_CACHE": str(tmp_path / "modules")}
        launch.checked(launch.python("-c", USE, str(directory), str(result), **paths))
        found = torch.load(result)
        assert found["version"].startswith("4.") == (request.param == "transformers 4")
        assert torch.equal(found["tokens"], found["greedy"])
        return found

    return _use


@pytest.mark.parametrize(("family", "preset"), [("llama", "dms"), ("qwen3", "dms_nvidia")])
def test_an_export_loads_computes_and_generates(export, use, family, preset):
    a, spec = hf._architecture(family), PRESETS[preset].override(window=4)
    dtype = torch.float32 if preset == "dms" else torch.bfloat16
    found = use(export(family, spec, dtype=dtype))
    weights = {name: tensor.to(dtype) for name, tensor in hf._weights(a).items()}
    expected, _ = hf._forward(weights, a, spec, torch.arange(1, 31))
    torch.testing.assert_close(found["logits"].double(), expected, atol=1e-4, rtol=1e-4)
    assert found["cache"] == "DMSCache"


def test_an_export_that_merges_generates(export, use):
    use(export("llama", PRESETS["dmc"]))
