"""Linear equations: the solution solves them, and the working collects every term in order."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import all_scorers
from dms_train.evaluation.tasks.registry import task
from research.data.command import main
from research.data.lab_linear_1d import LabLinear1d, held_out_problems, is_held_out
from research.data.words import WORDS, decoded

PROMPT = re.compile(r"E (.+) = (.+) \? ([a-z]) :")
TERM = re.compile(r"([+-]?) ?(\d+)( \* [a-z])?")


def terms(side: str) -> list[tuple[int, bool]]:
    """Signed numbers of a side, and whether the unknown stands behind each."""
    return [(int(sign + size), bool(name)) for sign, size, name in TERM.findall(side)]


def solve(prompt: str) -> float:
    """Solve the equation, from the values of left minus right at 0 and 1."""
    left, right, unknown = PROMPT.fullmatch(prompt).groups()
    at = [eval(f"({left}) - ({right})", {unknown: x}) for x in (0, 1)]
    return -at[0] / (at[1] - at[0])


@pytest.mark.parametrize("seed", range(5))
def test_every_step_of_a_document_is_true_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        drawn = LabLinear1d().draw(rng)
        words = " ".join(decoded(drawn.tokens))
        prompt = " ".join(decoded(drawn.tokens[: drawn.prompt]))
        *steps, quotient, answer = re.split(r" [.:] ", words.removeprefix(prompt).strip())
        solution = solve(prompt)
        assert answer == f"ANS {solution:g} <eod>"
        for step in (*steps, quotient):
            told, result = step.split(" = ")
            assert eval(told) == int(result)
            assert 1 <= int(result) <= 100
        left, right, _ = PROMPT.fullmatch(prompt).groups()
        signed = [(v, x, 1) for v, x in terms(left)] + [(v, x, -1) for v, x in terms(right)]
        collected = []
        for of_unknown, sign in ((True, 1), (False, -1)):
            parts = [v * side * sign for v, x, side in signed if x == of_unknown]
            sums = [sum(parts[: count + 1]) for count in range(len(parts))]
            for before, part, after in zip(sums, parts[1:], sums[1:], strict=False):
                operator = "+" if part > 0 else "-"
                collected.append(f"{before} {operator} {abs(part)} = {after}")
            assert 2 <= len(parts) <= 20
        assert steps == collected
        assert quotient.endswith(f"= {solution:g}")


def test_equations_of_problems_are_never_in_training_documents() -> None:
    found = held_out_problems(200, 3)
    assert found == held_out_problems(200, 3)
    assert len({each["prompt"] for each in found}) == 200
    for each in found:
        assert is_held_out(each["prompt"])
        assert each["answers"] == [f"{solve(each['prompt']):g}"]
        assert each["prompt"].count("*") == 20
    rng = random.Random(0)
    for _ in range(500):
        drawn = LabLinear1d().draw(rng)
        assert not is_held_out(" ".join(decoded(drawn.tokens[: drawn.prompt])))
    prompts = [f"E {n} * a = {m} ? a :" for n in range(1, 60) for m in range(1, 60)]
    assert sum(map(is_held_out, prompts)) / len(prompts) == pytest.approx(1 / 16, abs=0.02)


def test_solutions_and_signs_are_mixed() -> None:
    found = held_out_problems(400, 5, terms=4)
    assert len({each["answers"][0] for each in found}) > 30
    starts = [each["prompt"].split()[1] for each in found]
    assert 0.3 < starts.count("-") / len(starts) < 0.7


def test_commands_write_documents_and_problems(tmp_path: Path, capsys) -> None:
    given = ["--documents", "20", "--document-tokens", "400", "--out", str(tmp_path)]
    assert main(["lab-linear-1d", *given]) == 0
    reader = ShardReader(tmp_path / "train")
    assert all(WORDS[reader[n][0][0]] == "E" for n in range(20))
    settings = read_manifest(tmp_path / "train").preparation["settings"]
    assert (settings["task"], settings["most_terms"]) == ("lab_linear_1d", 20)
    file = tmp_path / "problems.jsonl"
    words = ["lab-linear-1d-problems", "--out", str(file), "--problems", "30", "--terms"]
    assert main([*words, "7"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 30
    assert {row["prompt"].count("*") for row in rows} == {7}
    capsys.readouterr()
    assert main([*words, "21", "--overwrite"]) == 2
    assert "--terms 21: not from 2 to 20" in capsys.readouterr().err


def test_the_answer_behind_the_working_is_scored() -> None:
    found = task("lab_linear_1d")
    (document,) = found.documents(TaskOptions(fixture=True, limit=1), lambda messages: 0)
    texts = [f"1 + 2 = 3 : 3 / 3 = 1 . ANS {document.gold[0]}", "ANS 101", document.gold[0]]
    scores = all_scorers()[found.scorer].scores(document, texts, AnswerChecker())
    assert [each.correct for each in scores] == [(True,), (False,), (False,)]


def test_the_loss_counts_what_stands_behind_prompts(tmp_path: Path) -> None:
    given = ["--documents", "8", "--document-tokens", "300", "--loss-on"]
    for kind in ("answer", "all"):
        assert main(["lab-linear-1d", "--out", str(tmp_path / kind), *given, kind]) == 0
    counted, whole = (ShardReader(tmp_path / kind / "train") for kind in ("answer", "all"))
    for number in range(8):
        tokens, mask = counted[number]
        assert np.array_equal(tokens, whole[number][0])
        assert whole[number][1].all()
        prompts = re.finditer(r"E [^?]+ \? [a-z] :", " ".join(decoded(tokens)))
        words = " ".join(decoded(tokens))
        expected = np.ones(len(tokens))
        for prompt in prompts:
            first = len(words[: prompt.start()].split())
            expected[first : first + len(prompt.group().split())] = 0
        last = len(words[: words.rfind("E ")].split())  # its prompt may be cut off
        assert mask[:last].tolist() == expected[:last].tolist()
