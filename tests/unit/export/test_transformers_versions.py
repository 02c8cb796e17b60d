"""The code of an export under transformers 4, the installed transformers and the newest.

The truth for logits is an independent float64 forward; the truth for tokens is greedy search that
computes the whole text for every token.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.export.tokenizer import copy_tokenizer
from dms_train.method.spec import PRESETS
from tests.support import launch, piece_tokenizer
from tests.unit.hf import conftest as hf

export = hf.export
OTHERS = {
    "transformers 4": Path(
        os.environ.get("DMS_TRANSFORMERS_4", Path(sys.prefix) / "transformers4")
    ),
    "newest": Path(sys.prefix) / "transformers_newest",
}
# by default other tests load exports with the installed one
VERSIONS = (pytest.param("installed", marks=pytest.mark.slow), *OTHERS)
CASES = {
    "nested": ("llama", PRESETS["dms"].override(window=4).spec, torch.float32, "DMSCache"),
    "flat": ("qwen3", PRESETS["dms_nvidia"].override(window=4).spec, torch.bfloat16, "DMSCache"),
    "merged": ("llama", PRESETS["dmc"].spec, torch.float32, "DynamicCache"),
}
USE = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

result, tokenizers, *directories = sys.argv[1:]
ids = torch.arange(1, 31)[None]
options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
found = {"version": transformers.__version__}
found["inputs"] = [
    list(AutoTokenizer.from_pretrained(folder)("who was there"))
    for folder in tokenizers.split(",")
]
for directory in directories:
    model = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits, grown = model(ids).logits[0], ids
        for _ in range(options["max_new_tokens"]):
            grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], 1)
    done = model.generate(ids, return_dict_in_generate=True, **options)
    cache = type(done.past_key_values).__name__
    found[directory] = (logits, done.sequences, grown, cache)
torch.save(found, result)
"""


def path_of(which: str) -> str:
    """Return the PYTHONPATH with a version of transformers; skip the test if it is absent."""
    if which not in OTHERS:
        return ""
    if not OTHERS[which].is_dir():
        pytest.skip(f"{OTHERS[which]} is absent; make setup installs it")
    return str(OTHERS[which])


def version_of(which: str) -> str:
    """Return the version that pip has installed there."""
    path = [str(OTHERS[which])] if which in OTHERS else sys.path
    (found, *_) = distributions(name="transformers", path=path)
    return found.version


@pytest.mark.parametrize("which", VERSIONS)
def test_exports_load_compute_and_generate(export, tmp_path, which):
    path = path_of(which)
    cases = {
        str(export(case[0], case[1], dtype=case[2]).rename(tmp_path / name)): case
        for name, case in CASES.items()
    }
    source = piece_tokenizer.write_tokenizer(tmp_path / "source", tokenizer_class="LlamaTokenizer")
    copied, exam = tmp_path / "copied", tmp_path / "exam"
    copied.mkdir()
    copy_tokenizer(source, copied)
    write_exam_tokenizer(exam)
    result = tmp_path / "result.pt"
    paths = {"PYTHONPATH": path, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    launch.checked(launch.python("-c", USE, str(result), f"{copied},{exam}", *cases, **paths))
    found = torch.load(result)
    assert found.pop("version") == version_of(which)
    assert found.pop("inputs") == 2 * [["input_ids", "attention_mask"]]  # what `generate` takes
    for directory, (family, spec, dtype, cache) in cases.items():
        logits, tokens, greedy, used = found[directory]
        assert torch.equal(tokens, greedy)
        assert used == cache
        if spec.kind == "dms":
            a = hf._architecture(family)
            weights = {name: tensor.to(dtype) for name, tensor in hf._weights(a).items()}
            expected, _ = hf._forward(weights, a, spec, torch.arange(1, 31))
            torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_large_tokenizers_are_not_taken_for_those_of_mistral(export, case):
    # the other two versions never take them for those
    path, (family, spec, dtype, _) = path_of("transformers 4"), CASES[case]
    folder = export(family, spec, dtype=dtype)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100_001)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    load = (
        "import sys; sys.stderr = sys.stdout; from transformers import AutoTokenizer;"
        f"AutoTokenizer.from_pretrained({str(folder)!r})"
    )
    assert "regex" not in launch.checked(launch.python("-c", load, PYTHONPATH=path))
