"""Validation, tasks and inspection of a DMC export: they name the method, and count its slots."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from dms_train.app.inspection import describe
from dms_train.app.verification import verify
from dms_train.cli.config_source import compose_evaluation
from dms_train.evaluation import report
from dms_train.evaluation.measure import EvaluationTarget
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.scaling.run import evaluate, prepare
from dms_train.evaluation.validation import validate
from dms_train.export.card import CARD_FILE, add_evaluation
from dms_train.method.spec import PRESETS
from tests.unit.evaluation.conftest import recorded_target, write_model

SPEC = PRESETS["dmc"].override(alpha_offset=0.0)  # about half of all tokens are merged
NAMES_DMS = re.compile(r"\bDMS\b|Sparsification")


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tokenizer, load) -> EvaluationTarget:
    """A DMC export with the self-test of its own modelling code, and another model as teacher."""
    return recorded_target(tmp_path_factory.mktemp("dmc"), SPEC, tokenizer, load)


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("problems") / "p.jsonl"
    rows = [{"prompt": f"{n}: Solve", "answers": ["1"], "stop": "."} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_report_names_the_method_and_what_becomes_of_tokens(
    compared: EvaluationTarget, samples, sheets, load, tmp_path
) -> None:
    options = ValidateOptions(samples=2, problems=str(sheets), max_tokens=20, window_only=True)
    found = validate(compared, samples, options, lambda line: None, 0.0)
    assert found.selftest.passed
    assert list(found.accuracies) == ["teacher", "student"]  # no window, so no control
    report.write(found, tmp_path, None)
    text = (tmp_path / report.REPORT).read_text()
    for said in ("KL(original, DMC)", "| DMC |", "merged, of all tokens but the first"):
        assert said in text
    assert not NAMES_DMS.search(text)
    assert "window" not in text
    assert found.agreement is not None
    # by the decisions of the export's own code: a token but the first is merged, or takes a slot
    model, merged, counted = load(compared.export), 0.0, 0
    for sample in samples[:2]:
        with torch.no_grad():
            decisions = model.dmc_decision_logits(sample.tokens[None])[:, 0] > 0
        merged += decisions[..., 1:].float().mean((0, 1)).sum().item()
        counted += decisions.shape[-1] - 1
    stated = re.search(r"merged, of .* \| (\S+) \|", text)
    assert stated is not None
    assert 0.1 < merged / counted < 0.9
    assert float(stated[1]) == pytest.approx(merged / counted, abs=6e-4)


def test_the_card_has_the_numbers_of_the_report(
    compared: EvaluationTarget, samples, tokenizer, tmp_path
) -> None:
    write_model(tmp_path / "export", SPEC, 0, tokenizer)
    found = validate(compared, samples, ValidateOptions(samples=2), lambda line: None, 0.0)
    add_evaluation(tmp_path / "export", found.numbers())
    card = (tmp_path / "export" / CARD_FILE).read_text()
    reads = found.numbers()["kv_reads.student"]
    assert f"| KV reads per sequence, this model | {reads:.4g} |" in card
    assert "with DMC" in card
    assert not NAMES_DMS.search(card)


@pytest.mark.parametrize("policy", ["auto", "dmc"])
def test_tasks_call_it_by_its_method_whichever_way_it_is_chosen(
    compared: EvaluationTarget, sheets, tmp_path, policy: str
) -> None:
    words = [
        f"model.path={compared.export}",
        "model.device=cpu",
        "task.name=exam_sheets",
        f"task.path={sheets}",
        "sweep.lengths=[0.02]",
        f"policy.name={policy}",
        f"run.dir={tmp_path / 'run'}",
    ]
    prepared = prepare(compose_evaluation(words))
    assert (prepared.header["method"], prepared.header["config"]["cr"]) == ("DMC", 2.0)
    found = evaluate(prepared, lambda line: None)
    assert found.complete
    assert found.method == "DMC"


def test_the_other_tools_name_it(compared: EvaluationTarget) -> None:
    assert describe(compared.export)["kind"] == "Hugging Face DMC export"
    assert verify(compared.export).passed
