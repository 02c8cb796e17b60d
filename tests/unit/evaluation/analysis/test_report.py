"""Reports of stored runs: numbers against the rows, and a page that loads nothing."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from dms_train.cli import evaluate as command
from dms_train.evaluation.analysis import tables
from dms_train.evaluation.analysis.comparison import (
    AVERAGE,
    PEAK,
    READS,
    Comparison,
    accuracy_cells,
)
from dms_train.evaluation.analysis.page import markdown, page
from dms_train.evaluation.analysis.pareto import BudgetPoint, margin
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling import store
from dms_train.evaluation.scaling.results import load_all

LENGTHS, WIDTHS, DOCUMENTS = [0.5, 1.0], [1, 2], 40
EVIL = "</pre><script src='https://example.org/x.js'></script><img src=//example.org/a>"


def header(task: str, method: str, cr: float) -> dict:
    config = {
        "task": {"name": task, "context_length": 4096},
        "documents": {"count": DOCUMENTS, "sha256": "0"},
        "model": {"sha256": f"{cr:g}" * 12},
        "cr": cr,
        "sampling": {"temperature": 0.6, "seed": 0},
        "sweep": {"lengths": LENGTHS, "widths": WIDTHS},
    }
    return {
        "config_hash": store.config_hash({**config, "method": method}),
        "config": config,
        "label": f"model {cr:g}",
        "method": method,
        "title": task.upper(),
        "aggregate": "vote",
        "scores_truncated": False,
        "publishable": task != "secret",
    }


def rows(document: int, cr: float, rng: random.Random) -> list[dict]:
    found = []
    for chain in range(max(WIDTHS)):
        tokens, right = rng.randint(200, 1200), rng.random() < 0.6
        peak = [min(tokens, round(1024 * length)) / cr for length in LENGTHS]
        found.append(
            {
                "document": f"d{document}",
                "chain": chain,
                "chains": max(WIDTHS),
                "tokens": tokens,
                "finish_reason": "stop" if tokens < 1024 else "length",
                "answers": ["7" if right else str(rng.randint(0, 3))],
                "correct": [right],
                "verdict": "correct" if right else "wrong",
                "prefill_reads": 50.0,
                "kv_reads": [100 * p for p in peak],
                "joint_peak": [p * (chain + 1) for p in peak],
                "joint_peak_shared": [p * (chain + 1) for p in peak],
                "peak_allocated_bytes": 100,
                "session": "s",
                "clock": float(document),
                "text": EVIL,
            }
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for task in ("sums", "secret"):
        for method, cr in (("Vanilla", 1.0), ("DMS", 1.5), ("DMS", 2.0)):
            run, rng = root / task / f"cr{cr:g}", random.Random(task)
            store.open_run(run, header(task, method, cr))
            with store.ChainWriter(run, 0, 1) as writer:
                for document in range(DOCUMENTS):
                    writer.add(rows(document, cr, rng))
    return root


@pytest.fixture(scope="module")
def comparison(folder) -> Comparison:
    return Comparison(load_all([folder]))


def test_points_are_grouped_by_task_and_method(comparison):
    assert comparison.tasks == ["SECRET", "SUMS"]
    assert comparison.methods == ["Vanilla", "DMS"]
    marks = comparison.marks("SUMS", READS)
    assert len(marks) == 3 * len(LENGTHS) * len(WIDTHS)
    vanilla = [m for m in marks if m.method == "Vanilla"]
    for mark in vanilla:  # the same chains with their costs divided
        (other,) = [m for m in marks if m.budget == mark.budget._replace(cr=2.0)]
        assert other.accuracy == mark.accuracy
        assert other.cost == pytest.approx(mark.cost / 2)


def test_averages_are_means_over_tasks(comparison):
    for cost in (READS, PEAK):
        for mark in comparison.marks(AVERAGE, cost):
            same = [
                m
                for task in comparison.tasks
                for m in comparison.marks(task, cost)
                if (m.method, m.budget) == (mark.method, mark.budget)
            ]
            assert len(same) == 2
            assert mark.cost == pytest.approx(sum(m.cost for m in same) / 2)
            assert mark.accuracy == pytest.approx(sum(m.accuracy for m in same) / 2)


@pytest.mark.parametrize("cost", [READS, PEAK], ids=["reads", "peak"])
def test_margins_are_those_of_the_points_and_lie_in_their_intervals(comparison, cost):
    found = comparison.margins(cost)
    assert [(m.task, m.first, m.second) for m in found] == [
        ("SECRET", "DMS", "Vanilla"),
        ("SUMS", "DMS", "Vanilla"),
    ]
    for each in found:
        lines = [
            [
                BudgetPoint(m.cost, m.accuracy)
                for m in comparison.marks(each.task, cost)
                if m.method == method
            ]
            for method in ("DMS", "Vanilla")
        ]
        assert each.value == pytest.approx(margin(*lines))
        low, high = each.interval
        assert low < high
        assert low - 1 <= each.value <= high + 1
    assert comparison.margins(cost) == found


def test_tables_have_the_accuracy_of_one_chain_of_the_longest_length(comparison):
    cells = accuracy_cells(comparison)
    assert set(cells) == {
        (task, method, cr)
        for task in ("SUMS", "SECRET")
        for method, cr in (("Vanilla", 1.0), ("DMS", 1.5), ("DMS", 2.0))
    }
    for (task, method, cr), value in cells.items():
        (mark,) = [
            m
            for m in comparison.marks(task, READS)
            if (m.method, m.budget) == (method, (max(LENGTHS), 1, cr))
        ]
        assert value.value == mark.accuracy
    first = tables.task_table(comparison)
    assert first.columns == ["task", "Vanilla", "DMS 1.5x", "DMS 2x"]
    second = tables.method_table(comparison)
    assert [row[1:] for row in first.rows] == [
        list(column) for column in zip(*[row[1:] for row in second.rows], strict=True)
    ]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[tuple] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.ids.add(values.get("id") or "")
        if tag == "a":
            self.links.append(values["xlink:href"])
            assert "target" not in values
        self.loads += [(tag, n, v) for n, v in attrs if n in ("src", "srcset", "data", "poster")]
        assert tag not in ("link", "img", "iframe", "object")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_its_links_lead_to_the_chains(comparison):
    text = page(comparison)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.loads == []
    assert "default-src 'none'" in text
    assert len(tags.links) == 2 * 2 * 12  # two costs, two tasks, twelve points
    assert {link.removeprefix("#") for link in tags.links} <= tags.ids
    assert "<script src" not in text
    assert text.count("&lt;script src") > 100
    assert "1-2-1.5" in text
    assert text.count("Published, Table 5") == 1


def test_what_a_task_asks_not_to_publish_is_not_shown(comparison):
    secret = Comparison([r for r in comparison.results if r.title == "SECRET"])
    assert "example.org" not in page(secret)
    assert "(not shown)" in page(secret)


def test_markdown_has_every_table(comparison):
    text = markdown(comparison)
    for caption in ("Form of Table 1", "Form of Tables 2 and 3", "over KV reads", "over peak tok"):
        assert caption in text
    assert len(re.findall(r"^\| SUMS \| DMS \| model 2 \| ", text, re.MULTILINE)) == 4
    below = text.partition("## Published by the paper, not measured here")[2]
    assert "| DMS vs Vanilla | 10.6 | 15.0 | 9.1 |" in below
    assert all(line.startswith("**Published") for line in re.findall(r"^\*\*.*", below, re.M))


def test_figures_are_files_that_show_every_point_and_method(folder, tmp_path, comparison):
    figures = tmp_path / "figures"
    given = ["report", str(folder), "--output", str(tmp_path / "r.html")]
    assert command.main([*given, "--figures", str(figures)]) == 0
    images = {path.stem: ElementTree.parse(path).getroot() for path in figures.iterdir()}
    costs = {
        f"{name}_{cost}" for name in ("sums", "average") for cost in ("kv_reads", "peak_tokens")
    }
    assert costs <= set(images)
    space = "{http://www.w3.org/2000/svg}"
    image = images["sums_kv_reads"]
    hovers = [title.text for title in image.iter(f"{space}title")]
    assert sorted(text.partition(":")[0] for text in hovers) == sorted(
        f"{result.method} {point.budget}"
        for result, point in comparison.points
        if result.title == "SUMS"
    )
    texts = {text.text for text in image.iter(f"{space}text")}
    assert texts >= {*comparison.methods, "KV reads of a document (cache slots)", "accuracy (%)"}
    assert not image.findall(f".//{space}a")


def test_runs_without_chains_are_refused(tmp_path, capsys):
    store.open_run(tmp_path / "run", header("sums", "DMS", 2.0))
    with pytest.raises(EvaluationError, match=r"the runs hold no chains yet"):
        page(Comparison(load_all([tmp_path])))
    assert command.main(["report", str(tmp_path / "absent")]) == 2
    assert "no run.json here or below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sampling", "differing"),
    [
        ({"temperature": 1.0, "seed": 0}, "sampling.temperature"),
        ({"temperature": 0.6, "seed": 0, "top_k": 5}, "sampling.top_k"),
        ({"temperature": 0.6, "seed": 1}, None),
    ],
)
def test_runs_that_were_sampled_differently_are_not_compared(tmp_path, capsys, sampling, differing):
    other = header("sums", "DMS", 2.0)
    other["config"]["sampling"] = sampling
    other["config_hash"] = store.config_hash(other["config"])
    for name, head in (("a", header("sums", "Vanilla", 1.0)), ("b", other)):
        store.open_run(tmp_path / name, head)
        with store.ChainWriter(tmp_path / name, 0, 1) as writer:
            writer.add(rows(0, head["config"]["cr"], random.Random(0)))
    given = ["report", str(tmp_path), "--output", str(tmp_path / "out" / "r.html")]
    code = command.main(given)
    written, refusal = capsys.readouterr()
    if differing is None:
        assert (code, refusal) == (0, "")
        target = tmp_path / "out" / "r.html"
        assert target.read_text().startswith("<!DOCTYPE html>")
        assert target.with_suffix(".md").read_text().startswith("# Evaluation")
        assert written.split() == [str(target), str(target.with_suffix(".md"))]
        return
    assert code == 2
    assert refusal.count("\n") == 1
    for fact in (differing, str(tmp_path / "a"), str(tmp_path / "b"), "SUMS"):
        assert fact in refusal


@pytest.mark.parametrize(
    "text", ["{}", "[]", "7", '{"config": 1, "config_hash": "x"}', "{", "\x80"]
)
def test_a_run_of_another_program_is_refused(tmp_path, capsys, text):
    file = tmp_path / "run.json"
    file.write_bytes(text.encode("latin-1"))
    assert command.main(["report", str(tmp_path), "--output", str(tmp_path / "r.html")]) == 2
    refusal = capsys.readouterr().err
    assert str(file) in refusal
    assert refusal.count("\n") == 1


def test_the_page_is_not_written_over_by_its_markdown(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["report", str(folder), "--output", str(tmp_path / "r.md")])
    assert ended.value.code == 2
    assert "--output" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
