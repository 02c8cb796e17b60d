"""The files of a validation."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest

from dms_train.evaluation import report
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.plots import curves_of, read_rows
from dms_train.evaluation.validation import validate
from dms_train.observe.sinks import METRICS_FILE, JsonlSink

COST = ("kv_reads.dense", "kv_reads.student", "peak_tokens.dense", "peak_tokens.student")
BYTES = ("cache_bytes.dense", "cache_bytes.student", "cr_factor")
TEXT = {"kl_nats_per_token", "top1_agreement", *COST, *BYTES, "selftest.kl", "seconds"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    file = tmp_path_factory.mktemp("problems") / "p.jsonl"
    rows = [{"prompt": f"{n}: Solve", "answers": ["1", "2"], "stop": "."} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def result(target, samples, problems):
    options = ValidateOptions(samples=2, problems=str(problems), max_tokens=20, window_only=True)
    return validate(target, samples, options, lambda line: None, 0.0)


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    logged = [{"step": n, "train/kl": 1 / n, "train/cr": n, "train/note": "x"} for n in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in logged) + '{"step": 3, "tra')
    return file


def test_metrics(result, target, samples, tmp_path):
    assert report.write(result, tmp_path, None) == []
    written = json.loads((tmp_path / report.METRICS).read_text())
    assert written == result.numbers()
    assert set(written) >= TEXT
    for name in ("teacher", "student", "window_only"):
        low, value, high = (written[f"{name}.accuracy{end}"] for end in (".low", "", ".high"))
        assert low <= value <= high
    assert written["problems"] == 8
    # generation has the plain names, text its own
    assert written["cr_factor"] == result.accuracies["student"].cost.cr_factor
    assert written["text.cr_factor"] == result.agreement.student.cr_factor
    alone = validate(target, samples, ValidateOptions(samples=2), lambda line: None, 0.0).numbers()
    assert set(alone) >= TEXT
    assert alone["cr_factor"] == written["text.cr_factor"]
    assert not any(name.startswith(("text.", "teacher.", "problems")) for name in alone)


def test_report(result, rows, tmp_path):
    out = tmp_path / "made" / "here"
    assert report.write(result, out, rows) == []
    assert "annealing ended" not in (out / report.REPORT).read_text()
    stop = {"max_kl": 0.05, "cr": 5.0, "kl": 0.0625, "kept_cr": 4.0}
    row = {"step": 9, **{f"early_stop/{name}": value for name, value in stop.items()}}
    rows.write_text(f"{rows.read_text()}\n{json.dumps(row)}\n")
    assert report.write(result, out, rows) == []
    text = (out / report.REPORT).read_text()
    assert "ended at compression ratio 4: the validation KL 0.0625 nats/token at ratio 5" in text
    assert report.tables(result) in text
    assert str(result.accuracies["window_only"].share) in text
    assert "8 problems on 4 sheets" in text
    assert "2 validation sequences of 90 tokens" in text
    for name in (report.TRAINING, report.RETENTION):
        assert f"]({name})" in text
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_report_of_an_early_stop_whose_kl_is_not_a_number(result, tmp_path):
    sink = JsonlSink(tmp_path)
    stop = {"max_kl": 0.05, "cr": 5.0, "kl": math.nan, "kept_cr": 4.0}
    sink.log(9, {f"early_stop/{name}": value for name, value in stop.items()})
    sink.close()
    report.write(result, tmp_path / "out", tmp_path / METRICS_FILE)
    text = (tmp_path / "out" / report.REPORT).read_text()
    assert "the validation KL at ratio 5 was not a finite number (limit 0.05 nats/token)." in text


def test_rows_of_the_report_have_the_numbers_of_the_layers(result, tmp_path):
    student = result.accuracies["student"]
    cost = replace(student.cost, layers=(3, 7))
    accuracies = {**result.accuracies, "student": replace(student, cost=cost)}
    report.write(replace(result, accuracies=accuracies), tmp_path, None)
    table = (tmp_path / report.REPORT).read_text().split("cr_factor by layer and KV head:")[1]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == ["3", "7"]


def test_without_matplotlib(result, rows, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.write(result, tmp_path / "out", rows) == [report.NO_PLOTS]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {report.METRICS, report.REPORT}
    assert ".png" not in (tmp_path / "out" / report.REPORT).read_text()


def test_curves_skip_text_and_a_line_that_was_cut_off(rows):
    found = curves_of(read_rows(rows))
    assert found == {"train/kl": ([1, 2], [1.0, 0.5]), "train/cr": ([1, 2], [1, 2])}
