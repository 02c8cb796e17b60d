"""`dms-report`: everything a run recorded, in a page that needs nothing else."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dms_train.cli import report
from dms_train.evaluation import plots, run_comparison
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.run_comparison import compare
from dms_train.evaluation.run_report import read_run, render

STEPS = 20
KEPT = [[1.0, 0.25], [0.5, 0.75], [0.125, 0.3]]


def training_row(step: int) -> dict:
    return {
        "step": step,
        "tokens": 4096 * step,
        "train/loss": 1.2345678 / step,
        "train/kl": 0.9876543 / step,
        "train/target_cr": 1 + step / 10,
        "train/cr": 1 + step / 11,
        "train/grad_norm": 0.321,
        "train/tokens_per_second": 1234.5 + step,
        "train/memory_gib": 3.25,
        "train/mfu": 0.4321,
    }


ROWS = [
    *(training_row(step) for step in range(1, STEPS + 1)),
    {
        "step": STEPS,
        "tokens": 4096 * STEPS,
        "eval/kl": 0.0456,
        "eval/cr": 2.7,
        "eval/kept": KEPT,
        "eval/kept_layers": [0, 2, 5],
    },
    {"step": STEPS, "tokens": 4096 * STEPS, "train/checkpoint_seconds": 1.75, "note": "</script>"},
    {
        "step": STEPS,
        "tokens": 4096 * STEPS,
        "validate_export/cr_factor": 2.718,
        "validate_export/student.accuracy": 0.96,
        "validate_export/student.accuracy.low": 0.94,
        "validate_export/student.accuracy.high": 0.98,
    },
]


NAME = "mine <b> & more"


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "metrics.jsonl").write_text(text + '{"step": 21, "tra')
    (folder / "config.yaml").write_text("optim:\n  lr: 3.0e-05\nmodel:\n  path: <some&where>\n")
    return folder


def shorten(folder: Path) -> None:
    """Leave one metric of a run: the picture of each takes a third of a second."""
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/kl": 0.5}\n')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / NAME)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the run."""
    return render(read_run(write_run(tmp_path_factory.mktemp("runs") / NAME)))


@pytest.fixture(scope="module")
def found(text: str) -> Page:
    return Page(text)


class Page(HTMLParser):
    """A page as a browser sees it: attributes, table rows, pictures and the embedded rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.lines: list[list[str]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._open = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.lines.append([])
        elif tag in ("td", "th"):
            self.lines[-1].append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open in ("td", "th"):
            self.lines[-1][-1] += data
        elif self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data


def page(folder: Path) -> Page:
    return Page(render(read_run(folder)))


def test_metrics_of_a_folder_with_former_names_have_todays(tmp_path):
    row = {
        "step": 1,
        "train/neuron_scale": 0.5,
        "export_eval/cr_factor": 2.5,
        "export_tasks/gsm8k.1-1-4.accuracy": 0.5,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = read_run(tmp_path).rows
    assert found == [
        {
            "step": 1,
            "train/channel_scale": 0.5,
            "validate_export/cr_factor": 2.5,
            "run_tasks/gsm8k.1-1-4.accuracy": 0.5,
        }
    ]


def test_the_page_refers_to_nothing_outside_itself(text, found):
    links = [value for _, name, value in found.attributes if name in ("src", "href", "srcset")]
    assert links
    assert all(value.startswith("data:image/png;base64,") for value in links)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert {tag for tag, _, _ in found.attributes} <= {"html", "meta", "img", "script"}
    (policy,) = [v for _, name, v in found.attributes if name == "content"]
    assert policy.startswith("default-src 'none'")


def test_the_rows_are_in_it_to_the_last_digit(found):
    assert json.loads(found.texts["script"]) == ROWS


def test_tables(found):
    lines = found.lines
    assert ["train/kl", "0.0493827", "20", "0.0493827", "0.987654"] in lines
    assert ["train/mfu", "0.4321", "20", "0.4321", "0.4321"] in lines
    assert ["student.accuracy", "0.96", "0.94", "0.98"] in lines
    assert ["cr_factor", "2.718", "", ""] in lines
    assert lines[lines.index(["step", "kl", "cr"]) + 1] == ["20", "0.0456", "2.7"]


def test_a_picture_for_each_subject_there_are_rows_of(found):
    titles = [value for tag, name, value in found.attributes if (tag, name) == ("img", "alt")]
    assert titles == [
        "Loss and compression loss",
        "Token loss",
        "Compression ratio, target and achieved",
        "Gradient norm",
        "Throughput",
        "Model FLOPs utilization",
        "Memory of the fullest process",
        "Writing a checkpoint",
        "Tokens kept, step 20",
    ]
    sources = [value for tag, name, value in found.attributes if (tag, name) == ("img", "src")]
    pictures = [base64.b64decode(source.partition(",")[2]) for source in sources]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(set(pictures)) == len(titles)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run with half of the loss, another learning rate and a metric of its own."""
    folder = tmp_path / "other"
    folder.mkdir()
    rows = [row | {"train/kl": row["train/kl"] / 2, "train/dmc": 7.5} for row in ROWS[:STEPS]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("optim:\n  lr: 1.0e-04\nmodel:\n  path: <some&where>\n")
    return folder


def test_runs_side_by_side(run, other):
    found = Page(compare([read_run(run), read_run(other)]))
    assert found.texts["h1"] == "mine <b> & more, other"
    assert ["metric", "mine <b> & more", "other"] in found.lines
    assert ["train/kl", "0.0493827", "0.0246914"] in found.lines
    assert ["eval/kl", "0.0456", ""] in found.lines
    assert ["train/dmc", "", "7.5"] in found.lines
    differences = found.lines[found.lines.index(["key", "mine <b> & more", "other"]) + 1 :]
    assert differences == [["optim.lr", "3e-05", "0.0001"]]
    assert json.loads(found.texts["script"])["mine <b> & more"] == ROWS


def test_a_picture_of_a_metric_has_a_curve_for_each_run(run, other, monkeypatch):
    drawn = {}
    draw = run_comparison.draw_curves

    def recorded(curves, unit, title, target, metric):
        drawn[title] = {name: values[-1] for name, (_, values) in curves.items()}
        draw(curves, unit, title, target, metric)

    monkeypatch.setattr(run_comparison, "draw_curves", recorded)
    found = Page(compare([read_run(run), read_run(other)]))
    assert drawn["train/kl"] == {
        "mine <b> & more": pytest.approx(0.04938271),
        "other": pytest.approx(0.02469136),
    }
    assert list(drawn["eval/kl"]) == ["mine <b> & more"]
    titles = [value for tag, name, value in found.attributes if (tag, name) == ("img", "alt")]
    assert titles == list(drawn)


def test_evaluations_are_points_and_training_is_a_line(run, other, monkeypatch):
    for folder in (run, other):
        rows = [{"step": step, "eval/kl": 1.0} for step in (5, 10)]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(f"\n{json.dumps(row)}" for row in rows))
    styles = {}
    plot = plots._plot

    def recorded(*args):
        axes = plot(*args)
        for line in axes.lines:
            shown = (line.get_linestyle(), line.get_marker())
            styles.setdefault((line.get_label(), axes.get_ylabel()), set()).add(shown)
        return axes

    monkeypatch.setattr(plots, "_plot", recorded)
    line, points = ("-", "None"), ("None", "o")
    render(read_run(run))
    assert styles["train/kl", "nats/token"] == {line}
    assert styles["eval/kl", "nats/token"] == {points}
    styles.clear()
    compare([read_run(run), read_run(other)])
    assert styles["other", "nats/token"] == {line, points}
    assert styles["other", "tokens/s"] == {line}


def test_a_damaged_configuration_is_refused_with_its_name(run, other, capsys):
    (other / "config.yaml").write_text("optim:\n  lr: [1, 2\nmodel: {")
    assert report.main([str(run), str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{other / 'config.yaml'}: cannot be read (" in line
    assert line.endswith("; restore or remove it")
    (other / "config.yaml").unlink()
    shorten(run)
    shorten(other)
    assert "optim.lr" in compare([read_run(run), read_run(other)])


def test_runs_of_the_same_name_are_called_by_their_paths(run, other, tmp_path):
    shorten(other)
    twin = tmp_path / "elsewhere" / "other"
    twin.parent.mkdir()
    shutil.copytree(other, twin)
    found = Page(compare([read_run(other), read_run(twin)]))
    assert found.texts["h1"] == f"{other}, {twin}"
    with pytest.raises(EvaluationError, match="is given twice; give each run once"):
        compare([read_run(other), read_run(other)])


def test_names_and_configuration_are_text(run, found):
    assert found.texts["h1"] == "mine <b> & more"
    assert found.texts["pre"] == (run / "config.yaml").read_text()


def test_a_run_without_configuration_or_evaluations(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/lm": 2.5}\n')
    found = page(tmp_path)
    assert ["train/lm", "2.5", "1", "2.5", "2.5"] in found.lines
    assert "pre" not in found.texts
    assert found.texts["p"] == "1 steps, 1 rows."


def test_command(run, tmp_path, capsys):
    shorten(run)
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert report.main([str(run), "--output", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text() == (run / "report.html").read_text()


def test_command_with_several_runs(run, other, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shorten(run)
    shorten(other)
    assert report.main([str(run), str(other)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert Path("comparison.html").read_text() == compare([read_run(run), read_run(other)])
    assert not (run / "report.html").exists()


def test_refusals_are_one_line(tmp_path, run, capsys, monkeypatch):
    assert report.main([str(tmp_path / "absent")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.main([str(run)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("no rows in metrics.jsonl; give the folder of a run")
    assert "pip install 'dms-train[eval]'" in second
    with pytest.raises(EvaluationError):
        read_run(tmp_path)
