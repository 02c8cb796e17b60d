"""`load_export` takes DMS exports and nothing else."""

from __future__ import annotations

import pytest
import torch

from dms_train import LLM, load_export
from dms_train.inference.errors import InferenceError
from tests.unit.evaluation import conftest as evaluation

load, target, tokenizer = evaluation.load, evaluation.target, evaluation.tokenizer


def test_an_export_computes_what_its_own_code_computes(target, load):
    llm = load_export(target.export, max_num_seqs=1)
    assert llm.spec == evaluation.SPEC
    ids = list(range(3, 40))
    with torch.no_grad():
        expected = load(target.export)(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(llm.logits(ids), expected, atol=1e-4, rtol=1e-4)


def test_a_dense_model_is_refused_with_advice(target):
    assert LLM(target.teacher, max_num_seqs=1).spec is None
    with pytest.raises(InferenceError, match=r"dense model.*LLM"):
        load_export(target.teacher)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_export(tmp_path)
