"""HumanEval: right bodies pass, others do not, and pass@1 and pass@all are counted."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.completion import CompletionScorer
from dms_train.evaluation.tasks.base import FIXTURES, Aggregate
from dms_train.evaluation.tasks.humaneval import HumanEval
from tests.unit.evaluation.scorers.test_programs import MODES

ROWS = {
    row["task_id"]: row
    for row in map(json.loads, Path(FIXTURES / "humaneval.jsonl").read_text().splitlines())
}
DOCUMENTS = HumanEval().documents(TaskOptions(fixture=True), lambda messages: 1)


def passed(document, *bodies: str, mode: str = "unisolated") -> list[bool]:
    with AnswerChecker(allow_code=mode) as checker:
        scores = CompletionScorer().scores(document, bodies, checker)
    return [score.correct == (True,) for score in scores]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.details["entry_point"])
def test_right_bodies_pass_and_others_do_not(document, mode):
    right = ROWS[document.id]["canonical_solution"]
    assert passed(
        document,
        right,
        f"{right}```\nIt is explained here.",
        "    return None\n",
        "this is no program",
        "",
        mode=mode,
    ) == [True, True, False, False, False]


def test_programs_of_several_workers_run_at_the_same_time(tmp_path):
    """Each program ends only if the other one has begun."""
    document = DOCUMENTS[1]
    waits = f"""    import os, time
    open({str(tmp_path)!r} + '/ME', 'w').close()
    while not os.path.exists({str(tmp_path)!r} + '/OTHER'):
        time.sleep(0.01)
    return text.upper() + '!'
"""
    bodies = [waits.replace("ME", own).replace("OTHER", other) for own, other in ("ab", "ba")]
    with AnswerChecker(2, allow_code="unisolated") as checker:
        scores = CompletionScorer().scores(document, bodies, checker)
    assert [score.correct for score in scores] == [(True,), (True,)]


def test_equal_programs_run_once(tmp_path):
    """Each call of the function adds a line to a file."""
    counted = f"""    with open({str(tmp_path / "runs")!r}, "a") as file:
        file.write("one\\n")
    return text.upper() + '!'
"""
    wrong = counted.replace("upper", "lower")
    assert passed(DOCUMENTS[1], counted, wrong) == [True, False]
    once = (tmp_path / "runs").read_text()
    assert passed(DOCUMENTS[1], counted, wrong, counted, counted) == [True, False, True, True]
    assert (tmp_path / "runs").read_text() == 2 * once


def test_no_more_programs_run_than_there_are_workers(tmp_path):
    """Each program fails if another one runs."""
    alone = f"""    import os, time
    os.mkdir({str(tmp_path / "busy")!r})
    time.sleep(0.3)
    os.rmdir({str(tmp_path / "busy")!r})
    return text.upper() + '!'
"""
    assert passed(DOCUMENTS[1], *[alone.replace("0.3", f"0.{n}") for n in (3, 2, 4)]) == 3 * [True]


def test_programs_that_have_not_started_are_dropped_at_the_end(tmp_path):
    slow = f"""    open({str(tmp_path)!r} + '/FILE', 'w').close()
    import time
    time.sleep(1)
    return text.upper() + '!'
"""
    bodies = [slow.replace("FILE", name) for name in "abc"]
    with ThreadPoolExecutor() as caller, AnswerChecker(1, allow_code="unisolated") as checker:
        caller.submit(CompletionScorer().scores, DOCUMENTS[1], bodies, checker)
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_program_cannot_end_before_its_tests():
    document = DOCUMENTS[1]
    early = "    return text\n\nprint('passed')\nimport os, sys\n"
    assert passed(
        document,
        f"{early}sys.exit(0)\n",
        f"{early}os._exit(0)\n",
        "    return text.upper() + '!'\n\nprint('a line')\n",
    ) == [False, False, True]


def test_names_of_this_process_are_not_those_of_the_program():
    document = DOCUMENTS[3]
    assert document.details["entry_point"] == "power_of"
    assert passed(document, "    return pow(base, exponent, modulus)\n") == [True]
    (wrong,) = passed(document, "    return int(fmod(base ** exponent, modulus))\n")
    assert not wrong, "math is not imported"


def test_code_is_not_run_without_permission():
    with pytest.raises(EvaluationError, match="only with --allow-code"), AnswerChecker() as checker:
        CompletionScorer().scores(DOCUMENTS[0], [""], checker)


def test_the_prompt_ends_where_the_body_begins():
    task = HumanEval()
    for document in DOCUMENTS:
        messages = task.messages(document)
        assert messages.answer_prefix.endswith(f"```python\n{document.question}\n")
        assert document.question in messages.user
        assert ROWS[document.id]["canonical_solution"] not in messages.user
        assert {"\ndef", "\n```"} <= set(task.stop(document))
    assert task.aggregate is Aggregate.ANY
    assert task.sampling.temperature == 0
