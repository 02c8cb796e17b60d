"""Programs run with limits, and only where that was allowed."""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import socket
import subprocess
import zlib

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.programs import ProgramTest, passes, same_output, sandbox
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.program import ProgramScorer
from dms_train.evaluation.tasks.livecodebench import LiveCodeBench, program_tests
from dms_train.evaluation.tasks.prompts import FORMATS


def isolates() -> bool:
    try:
        return bool(sandbox())
    except EvaluationError:
        return False


needs_bubblewrap = pytest.mark.skipif(not isolates(), reason="bubblewrap is absent or not allowed")
MODES = [pytest.param("sandbox", marks=needs_bubblewrap), "unisolated"]
SOLUTIONS = {
    "fix_a": "print(2 * int(input()))",
    "fix_b": "print(sum(c in 'aeiou' for c in input()))",
    "fix_c": "class Solution:\n    def gap(self, values: List[int]) -> int:\n"
    "        return max(abs(a - b) for a, b in zip(values, values[1:]))",
    "fix_d": "for _ in range(int(input())):\n    print(sum(map(int, input().split())))",
    "fix_e": "class Solution:\n    def join(self, a, b):\n        return a + b",
}
DOCUMENTS = LiveCodeBench().documents(TaskOptions(fixture=True), lambda messages: 1)
SAY_YES = [ProgramTest("", "yes")]


def written(source: str) -> str:
    reasoning = "<think>\n```python\nprint(0)\n```\n</think>\n"
    return f"{reasoning}<answer>\n```python\n{source}\n```\n</answer>"


def verdicts(document, *texts: str, mode: str = "unisolated") -> list[str]:
    with AnswerChecker(allow_code=mode) as checker:
        return [m.verdict for m in ProgramScorer().scores(document, texts, checker)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.id)
def test_right_programs_pass_and_others_do_not(document, mode):
    right = SOLUTIONS[document.id]
    wrong = right.replace("2 *", "3 *").replace("aeiou", "aei").replace("max(", "min(")
    wrong = wrong.replace("sum(map", "max(map").replace("a + b", "b + a")
    assert wrong != right
    assert verdicts(
        document,
        written(right),
        written(wrong),
        written("this is no program"),
        f"<think>```python\n{right}\n```",
        right,
        written(right) + f"\n```python\n{wrong}\n```",
        mode=mode,
    ) == ["correct", "wrong", "wrong", "unfinished", "no_answer", "wrong"]


def test_the_last_block_of_python_counts_and_no_other_language():
    right = SOLUTIONS["fix_a"]
    (document,) = [d for d in DOCUMENTS if d.id == "fix_a"]
    sample = written(right) + "\nIt prints:\n```text\n4\n```\nand\n```\n"
    windows = f"```Python\n{right}\n```".replace("\n", "\r\n")
    assert verdicts(document, sample, windows, f"```python3\n{right}\n```") == ["correct"] * 3


def test_hidden_tests_count():
    (document,) = [d for d in DOCUMENTS if d.id == "fix_b"]
    assert len(program_tests(document)) == 3
    assert verdicts(document, written("print(2)")) == ["wrong"]  # passes the one that is shown


def test_programs_of_several_workers_run_at_the_same_time(tmp_path):
    """Each program ends only if the other one has begun."""
    (document,) = [d for d in DOCUMENTS if d.id == "fix_a"]
    waits = f"""import os, time
open({str(tmp_path)!r} + '/ME', 'w').close()
while not os.path.exists({str(tmp_path)!r} + '/OTHER'):
    time.sleep(0.01)
print(2 * int(input()))"""
    first = waits.replace("ME", "a").replace("OTHER", "b")
    second = waits.replace("ME", "b").replace("OTHER", "a")
    with AnswerChecker(2, allow_code="unisolated") as checker:
        scores = ProgramScorer().scores(document, [written(first), written(second)], checker)
    assert [score.verdict for score in scores] == ["correct", "correct"]


def test_nothing_runs_unless_it_is_allowed():
    with AnswerChecker() as checker, pytest.raises(EvaluationError, match="only with --allow-code"):
        ProgramScorer().scores(DOCUMENTS[0], [written("print(1)")], checker)


FORBIDDEN = {
    "new file": "open('made', 'w')",
    "file in /tmp": "open('/tmp/made', 'w')",
    "file in /dev/shm": "open('/dev/shm/made', 'w')",
    "changed file": "import sys; open(sys.argv[1], 'r+')",
    "removed file": "import os, sys; os.unlink(sys.argv[1])",
    "new folder": "import os; os.mkdir('folder')",
    "mode": "import os, sys; os.chmod(sys.argv[1], 0)",
    "file of the user": "open({outside!r})",
    "network": "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX).connect({unix!r})",
    "signal": "import os; os.kill({pid}, 0)",
    "higher limit": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))",
}


@pytest.fixture
def outside(tmp_path):
    """Things of this machine that a program of the user could reach."""
    file = tmp_path / "secret"
    file.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        yield {
            "outside": str(file),
            "port": tcp.getsockname()[1],
            "unix": str(tmp_path / "socket"),
            "pid": os.getpid(),
        }


@needs_bubblewrap
@pytest.mark.parametrize("code", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_sandboxed_program_cannot_reach_outside(code, outside):
    code = code.format_map(outside)
    guarded = f"try:\n    {code}\nexcept OSError as e:\n    print('yes' if e.errno else 'no')\n"
    guarded += "except ValueError:\n    print('yes')\n"
    assert passes(guarded, SAY_YES)
    assert not passes(f"{code}\nprint('yes')", SAY_YES)


@pytest.mark.parametrize("name", ["network", "unix socket", "signal", "file of the user"])
def test_what_a_sandbox_prevents_works_without_one(name, outside):
    assert passes(f"{FORBIDDEN[name].format_map(outside)}\nprint('yes')", SAY_YES, sandboxed=False)


@needs_bubblewrap
def test_processes_that_a_program_started_end_with_it(tmp_path):
    source = "import os, time\nif os.fork():\n    print('yes')\nelse:\n    time.sleep(30)"
    assert passes(source, SAY_YES)
    running = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True)
    assert "dms-program-" not in running.stdout


@pytest.mark.parametrize("found", [None, "/bin/false"], ids=["absent", "refused"])
def test_no_program_runs_without_a_sandbox(monkeypatch, found):
    monkeypatch.setattr(shutil, "which", lambda name: found)
    sandbox.cache_clear()
    with pytest.raises(EvaluationError, match=r"bubblewrap.*allow_code=unisolated"):
        passes("print('yes')", SAY_YES)


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "x = [0]\nwhile True: x += x", "while True: print('y' * 100000)"],
    ids=["time", "memory", "output"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_program_has_limits(code, mode):
    assert not passes(code, SAY_YES, seconds=1.0, sandboxed=mode == "sandbox")


@pytest.mark.parametrize("mode", MODES)
def test_a_program_knows_nothing_of_the_environment(monkeypatch, mode):
    monkeypatch.setenv("SECRET_OF_A_TEST", "x")
    assert "SECRET_OF_A_TEST" in os.environ
    source = "import os; print('no' if 'SECRET_OF_A_TEST' in os.environ else 'yes')"
    assert passes(source, SAY_YES, sandboxed=mode == "sandbox")


@pytest.mark.parametrize("mode", MODES)
def test_threads_deep_recursion_and_reading_work(mode):
    source = """
import sys, threading
threading.stack_size(64 << 20)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print('yes' if depth(20000) == 20000 and sys.stdin.read() == 'in' else 'no')
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    assert passes(source, [ProgramTest("in", "yes")], sandboxed=mode == "sandbox")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \n2", "1\n2\n", True),
        ("1.0 2", "1 2.00", True),
        ("1 2", "1\n2", False),
        ("1.0001", "1", False),
        ("yes", "Yes", False),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_line_by_line(found, expected, same):
    assert same_output(found, expected) is same


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def test_hidden_tests_that_are_no_text_are_refused():
    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    for private in (packed, "%%", packed[:-8]):
        details = {**DOCUMENTS[0].details, "private": private}
        document = type(DOCUMENTS[0])(id="x", question="q", gold=("a",), details=details)
        with pytest.raises(EvaluationError, match="the tests of x are damaged"):
            program_tests(document)


def test_only_contests_of_the_window_are_taken():
    task = LiveCodeBench()
    days = ("2024-07-31", "2024-08-01", "2025-01-31T23:00:00", "2025-02-01")
    assert [task.selects({"contest_date": day}) for day in days] == [False, True, True, False]


def test_the_prompt_is_that_of_the_paper():
    text = FORMATS["r1"](LiveCodeBench().messages(DOCUMENTS[0]))
    assert text.startswith("A conversation between User and Assistant. The user asks a question")
    assert (
        "<answer> answer here </answer>.<｜User｜>You will be given a question (problem "  # noqa: RUF001
        "specification) and will generate a correct Python program" in text
    )
    assert text.endswith("<｜Assistant｜><think>\n")  # noqa: RUF001
