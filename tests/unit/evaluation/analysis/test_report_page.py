"""The page of `dms-eval report` in a browser: sorting, hover, links to chains, and no requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dms_train.cli import evaluate as command
from dms_train.evaluation.scaling import store
from tests.support import browser
from tests.support.browser import Browser
from tests.support.served_model import wait_for
from tests.unit.evaluation.analysis.test_report import LENGTHS, WIDTHS, header

DOCUMENTS, CHAINS = 40, max(WIDTHS)
RATIOS = {"Vanilla": 1.0, "DMS": 4.0}
COLUMNS = {"accuracy": 4, "95 % interval": 5, "KV reads": 8, "peak tokens": 9}
# of a table that a test chooses, and the choice of the one with every budget
ROWS = """[...window.table.tBodies[0].rows]
    .map(row => [...row.cells].map(cell => cell.textContent))"""
FIND = """(window.table = [...document.querySelectorAll('table')]
    .find(table => table.caption?.textContent.startsWith('All budgets')), true)"""
HOVER = "[...document.querySelectorAll('svg title')].map(title => title.textContent)"
# the text that the browser shows for what lies in the middle of an element
UNDER = """(element => {
  element.scrollIntoView({block: 'center'});
  const box = element.getBoundingClientRect();
  const found = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  const titled = found.closest('g:has(> title)');
  return titled?.querySelector('title').textContent;
})(document.querySelector(SELECTOR))"""
OPEN = "[...document.querySelectorAll('main > details')].filter(d => d.open).map(d => d.id)"
SEEN = """(box => box.top >= 0 && box.top < innerHeight)(
    document.getElementById(NAME).getBoundingClientRect())"""
OUTSIDE = "http://127.0.0.1:9/image.png"


def tokens_of(document: int, chain: int) -> int:
    """Return tokens of one to four digits: the order of such numbers is not that of their texts."""
    return (7 * document + 3 * chain) ** 2 % 1300 + 8


def text_of(document: int, chain: int, method: str) -> str:
    return f"chain {chain} of d{document} by {method} <b>&amp;"


def rows(document: int, method: str) -> list[dict]:
    found = []
    for chain in range(CHAINS):
        tokens = tokens_of(document, chain)
        right = (document + chain) % (2 if method == "Vanilla" else 6) == 0
        peak = [min(tokens, 1024 * length) / RATIOS[method] for length in LENGTHS]
        found.append(
            {
                "document": f"d{document}",
                "chain": chain,
                "chains": CHAINS,
                "tokens": tokens,
                "finish_reason": "stop" if tokens < 1024 else "length",
                "answers": ["7" if right else "1"],
                "correct": [right],
                "verdict": "correct" if right else "wrong",
                "prefill_reads": 5.0,
                "kv_reads": [p * p / 2 for p in peak],
                "joint_peak": [p * (chain + 1) for p in peak],
                "joint_peak_shared": [p * (chain + 1) for p in peak],
                "peak_allocated_bytes": 100,
                "session": "s",
                "clock": float(document),
                "text": text_of(document, chain, method),
            }
        )
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for method, cr in RATIOS.items():
        run = root / method
        store.open_run(run, header("sums", method, cr))
        with store.ChainWriter(run, 0, 1) as writer:
            for document in range(DOCUMENTS):
                writer.add(rows(document, method))
    target = root / "report.html"
    assert command.main(["report", str(root), "--output", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser.opened() as opened:
        yield opened


@pytest.fixture
def page(tab, report) -> Browser:
    tab.open(report.as_uri())
    tab.evaluate(FIND)
    return tab


def run_id(method: str) -> str:
    return f"run-{header('sums', method, RATIOS[method])['config_hash'][:12]}"


def number(text: str) -> float:
    """Return the number that a cell shows, or the lower end of an interval."""
    return float(text.split(", ")[0].strip("[]").replace(",", ""))


def click_head(page: Browser, column: str) -> None:
    page.evaluate(
        f"[...window.table.querySelectorAll('th')].forEach(head => "
        f"head.id = head.textContent === {json.dumps(column)} ? 'head' : '')"
    )
    page.click("#head")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_click_on_a_column_sorts_by_number_and_another_click_the_other_way(page, column):
    before = page.evaluate(ROWS)
    assert len(before) == len(RATIOS) * len(LENGTHS) * len(WIDTHS)
    place = COLUMNS[column]
    up = sorted(number(row[place]) for row in before)
    assert up != [number(text) for text in sorted(row[place] for row in before)]
    for wanted in (up, up[::-1], up):
        click_head(page, column)
        after = page.evaluate(ROWS)
        assert [number(row[place]) for row in after] == wanted
        assert sorted(after) == sorted(before)  # whole rows move
    assert page.console_messages() == []


def test_a_column_of_words_is_sorted_by_them(page):
    for methods in (["DMS", "Vanilla"], ["Vanilla", "DMS"]):
        click_head(page, "method")
        shown = [row[1] for row in page.evaluate(ROWS)]
        assert shown == sorted(shown, key=methods.index)


def test_points_say_their_method_budget_accuracy_and_cost_under_the_pointer(page):
    texts = page.evaluate(HOVER)
    budgets = page.evaluate(ROWS)
    for cost, place in (("KV reads", 8), ("peak tokens", 9)):
        wanted = {f"{row[1]} {row[3]}": (row[4], number(row[place])) for row in budgets}
        shown = [text for text in texts if text.endswith(cost)]
        assert len(shown) == len(wanted) == len(budgets)
        for text in shown:
            name, values = text.removesuffix(f" {cost}").split(": ")
            accuracy, value = values.split(" %, ")
            assert accuracy == wanted[name][0]
            assert number(value) == pytest.approx(wanted[name][1], abs=0.5)
    assert page.evaluate(UNDER.replace("SELECTOR", "'svg a use'")) == texts[0]


@pytest.mark.parametrize("method", RATIOS)
def test_a_click_on_a_point_opens_the_chains_of_its_run(page, method):
    name = run_id(method)
    assert page.evaluate(OPEN) == []
    page.click(f"a[*|href='#{name}'] use")
    wait_for(lambda: page.evaluate(OPEN) == [name])
    wait_for(lambda: page.evaluate(SEEN.replace("NAME", json.dumps(name))))
    assert page.evaluate("location.hash") == f"#{name}"

    page.evaluate(f"window.table = document.querySelector('#{name} table')")
    chains = page.evaluate(ROWS)
    assert len(chains) == DOCUMENTS * CHAINS
    click_head(page, "tokens")
    tokens = [number(row[2]) for row in page.evaluate(ROWS)]
    drawn = [tokens_of(d, chain) for d in range(DOCUMENTS) for chain in range(CHAINS)]
    assert tokens == sorted(drawn)

    page.click(f"#{name} tbody tr:first-child summary")
    document, chain = page.evaluate(ROWS)[0][:2]
    shown = page.evaluate(f"document.querySelector('#{name} tbody details[open] pre').innerText")
    assert shown == text_of(int(document[1:]), int(chain), method)
    assert page.console_messages() == []


def test_the_address_of_a_run_opens_its_chains(tab, report):
    tab.open("about:blank")
    tab.open(f"{report.as_uri()}#{run_id('DMS')}")
    assert tab.evaluate(OPEN) == [run_id("DMS")]


def test_the_page_requests_nothing_and_the_browser_refuses_to_load_anything_for_it(page):
    assert page.evaluate("performance.getEntriesByType('resource').map(e => e.name)") == []
    assert page.console_messages() == []
    page.evaluate(f"document.body.append(Object.assign(new Image(), {{src: {OUTSIDE!r}}}))")
    wait_for(lambda: any("Content Security Policy" in line for line in page.console_messages()))
