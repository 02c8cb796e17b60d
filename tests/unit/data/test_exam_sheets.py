"""Exam sheets are right, held-out equations stay out, and the tokenizer loses nothing."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dms_train.data_prep.exam_sheets import (
    ALPHABET,
    VARIABLES,
    ExamProblem,
    Split,
    held_out_problems,
    problem,
    sheet,
)
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer

QUESTION = re.compile(
    r"(\d+): Solve (-?\d+)\*(\w) ([+-]) (\d+) = (-?\d+)\*\3 ([+-]) (\d+) for \3\."
)
SOLUTION = re.compile(
    r"Solution (\d+)\. Collect terms: (-?\d+)\*(\w) ([+-]) (\d+)\*\3 = (-?\d+) ([+-]) (\d+)\.\n"
    r"So (-?\d+)\*\3 = (-?\d+)\.\n"
    r"Divide: \3 = (-?\d+) / (-?\d+)\.\n"
    r"The final answer is (-?\d+)\.\n"
)

SEEDS = st.integers(0, 2**32)
SPLITS = st.sampled_from(["train", "held_out"])


def signed(sign: str, digits: str) -> int:
    return int(sign + digits)


def parse_questions(text: str) -> list[ExamProblem]:
    problems = []
    for i, line in enumerate(text.splitlines(), 1):
        match = QUESTION.fullmatch(line)
        assert match, line
        number, a, v, b_sign, b, c, d_sign, d = match.groups()
        assert int(number) == i
        problems.append(ExamProblem(int(a), signed(b_sign, b), int(c), signed(d_sign, d), v))
    return problems


def check_solution(p: ExamProblem, match: re.Match[str]) -> None:
    _, a, v, c_sign, c, d, b_sign, b, factor, constant, constant2, factor2, answer = match.groups()
    assert (int(a), v, signed(c_sign, c)) == (p.a, p.variable, -p.c)
    assert (int(d), signed(b_sign, b)) == (p.d, -p.b)
    assert int(factor) == int(factor2) == p.a - p.c
    assert int(constant) == int(constant2) == p.d - p.b
    x = int(answer)
    assert p.a * x + p.b == p.c * x + p.d


@settings(max_examples=60)
@given(seed=SEEDS, n=st.integers(1, 12), split=SPLITS)
def test_sheets_are_right(seed: int, n: int, split: Split) -> None:
    text = sheet(random.Random(seed), n, split)
    assert set(text) <= set(ALPHABET)
    assert text.endswith(".\n\n")
    questions, solutions = text[: text.index("Solution")], text[text.index("Solution") :]
    problems = parse_questions(questions)
    matches = list(SOLUTION.finditer(solutions))
    assert "".join(match[0] for match in matches) + "\n" == solutions
    assert [int(match[1]) for match in matches] == list(range(1, n + 1))
    assert len(problems) == n
    for p, match in zip(problems, matches, strict=True):
        check_solution(p, match)


@settings(max_examples=100)
@given(seed=SEEDS, split=SPLITS)
def test_problems_keep_their_ranges_and_split(seed: int, split: Split) -> None:
    p = problem(random.Random(seed), split)
    assert 1 <= abs(p.a) <= 12
    assert 1 <= abs(p.c) <= 12
    assert p.a != p.c
    assert abs(p.b) <= 40
    assert abs(p.answer) <= 15
    assert p.variable in VARIABLES
    assert p.held_out == (split == "held_out")


@settings(max_examples=20)
@given(seed=SEEDS)
def test_held_out_equations_never_occur_in_training(seed: int) -> None:
    text = sheet(random.Random(seed), 20, "train")
    assert not any(p.held_out for p in parse_questions(text[: text.index("Solution")]))


def test_one_equation_in_ten_is_held_out_under_every_name() -> None:
    equations = [(a, b, c, 5) for a in range(1, 13) for b in range(-40, 41) for c in range(-12, 0)]
    flags = [{ExamProblem(*e, v).held_out for v in VARIABLES[:3]} for e in equations]
    assert all(len(flag) == 1 for flag in flags)
    assert sum(True in flag for flag in flags) / len(flags) == pytest.approx(0.1, abs=0.01)


def test_the_hash_stays_as_it_is() -> None:
    held_out = [b for b in range(-40, 41) if ExamProblem(4, b, 6, b + 30, "c").held_out]
    assert held_out == [-38, -16, 4, 22, 35]


def test_lengths() -> None:
    rng = random.Random(0)
    for n, length in ((1, 147), (2, 294), (3, 441)):
        mean = sum(len(sheet(rng, n, "train")) for _ in range(200)) / 200
        assert mean == pytest.approx(length, rel=0.03)


def test_answers_are_spread_evenly() -> None:
    rng = random.Random(0)
    counts = Counter(problem(rng, "train").answer for _ in range(6200))
    assert set(counts) == set(range(-15, 16))
    assert max(counts.values()) < 2 * min(counts.values())


def test_held_out_problems_for_evaluation() -> None:
    drawn = held_out_problems(20, 3, seed=5)
    assert drawn == held_out_problems(20, 3, seed=5)
    assert drawn != held_out_problems(20, 3, seed=6)
    for prompt, answers in drawn:
        questions, rest = prompt[: prompt.index("Solution")], prompt[prompt.index("Solution") :]
        assert rest == "Solution 1."
        problems = parse_questions(questions)
        assert all(p.held_out for p in problems)
        assert tuple(p.answer for p in problems) == answers


def test_a_sheet_needs_a_question() -> None:
    with pytest.raises(ValueError, match="at least one question"):
        sheet(random.Random(0), 0, "train")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory = tmp_path_factory.mktemp("exam") / "tokenizer"
    write_exam_tokenizer(directory)
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def test_tokenizer_has_one_token_per_character(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(set(ALPHABET)) == len(ALPHABET) == 49
    assert len(tokenizer) == 50
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.encode(ALPHABET) == list(range(1, 50))


@settings(max_examples=40)
@given(seed=SEEDS, n=st.integers(1, 12), split=SPLITS)
def test_tokenizer_loses_nothing(
    tokenizer: PreTrainedTokenizerFast, seed: int, n: int, split: Split
) -> None:
    text = sheet(random.Random(seed), n, split)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_refuses_other_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("é")
