"""The page of refusals lists every case."""

from __future__ import annotations

from tests.e2e.bad_inputs.errors_page import DOCS, GROUPS


def test_docs_list_every_case_and_no_other() -> None:
    lines = DOCS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and line[2:5] not in ("Inp", "---")]
    done = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    assert done == [case.done for cases in GROUPS.values() for case in cases.values()]
