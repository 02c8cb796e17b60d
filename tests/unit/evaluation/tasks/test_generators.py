"""Generated documents: lengths, depths, unique keys, and answers that another computation finds."""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks import niah, variable_tracking
from dms_train.evaluation.tasks.haystack import largest_fit, sentences, unlike
from dms_train.evaluation.tasks.linear_1d import equation
from dms_train.evaluation.tasks.registry import task

LENGTH = 900


def tokens(messages) -> int:
    """Words and signs, as an independent tokenizer counts them."""
    return len(re.findall(r"\w+|[^\w\s]", messages.user + messages.answer_prefix))


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    rng = random.Random(0)
    parts = [f"Line {n} has {rng.randint(2, 99)} words and ends here." for n in range(300)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(parts))
    return str(path)


def test_needles_never_collide():
    drawn = list(niah.needles(10_000, seed=1))
    assert len({needle.key for needle in drawn}) == 10_000
    assert len({needle.value for needle in drawn}) == 10_000
    assert all(re.fullmatch(r"[a-z]+-[a-z]+", n.key) for n in drawn)
    assert all(re.fullmatch(r"[1-9]\d{6}", n.value) for n in drawn)
    depths = Counter(needle.depth for needle in drawn)
    assert set(depths) == set(niah.DEPTHS)
    assert min(depths.values()) > 170  # 250 of each expected, standard deviation 16
    assert list(niah.needles(50, seed=1)) == drawn[:50]
    assert list(niah.needles(50, seed=2)) != drawn[:50]
    with pytest.raises(EvaluationError, match=r"task\.count=1000000: only \d+ keys exist"):
        next(niah.needles(1_000_000, seed=1))


def test_depths_are_those_of_ruler():
    import numpy as np

    assert list(niah.DEPTHS) == np.round(np.linspace(0, 100, num=40)).astype(int).tolist()


def test_a_needle_stands_once_at_its_depth_and_the_prompt_fills_the_limit(haystack):
    options = TaskOptions(count=60, context_length=LENGTH, haystack=haystack)
    found = task("niah").documents(options, tokens)
    assert len(found) == 60
    for document in found:
        (value,), key = document.gold, document.details["query"]
        line = f"One of the special magic numbers for {key} is: {value}."
        assert document.question.count(value) == document.question.count(line) == 1
        messages = task("niah").messages(document)
        assert value not in messages.answer_prefix
        length = tokens(messages) + niah.ANSWER_TOKENS
        assert LENGTH - 3 <= length <= LENGTH  # a word may be two tokens
        before = document.question.split(line)[0].count("ends here.")
        total = document.question.count(" words and ends here")
        assert abs(before - total * document.details["depth"] / 100) <= 1.01
    depths = [document.details["depth"] for document in found]
    assert 25 < statistics.mean(depths) < 75


def test_a_haystack_is_repeated_where_it_is_too_short(tmp_path):
    (tmp_path / "short.txt").write_text("One two three. Four five six.")
    options = TaskOptions(count=1, context_length=400, haystack=str(tmp_path / "short.txt"))
    (document,) = task("niah").documents(options, tokens)
    assert document.question.count("Four five six.") > 10


def test_niah_refuses_what_it_cannot_use(tmp_path, haystack):
    with pytest.raises(EvaluationError, match=r"needs task\.haystack=FILE"):
        task("niah").documents(TaskOptions(count=1), tokens)
    with pytest.raises(EvaluationError, match=r"must fit into 2; raise task\.context_length"):
        task("niah").documents(TaskOptions(context_length=130, haystack=haystack), tokens)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(EvaluationError, match=r"empty\.txt: no text"):
        task("niah").documents(TaskOptions(haystack=str(tmp_path / "empty.txt")), tokens)


def test_variables_and_values_never_collide():
    rng = random.Random(5)
    for _ in range(250):  # 10,000 chains
        chains = variable_tracking.assignments(rng)
        names, values = zip(*chains, strict=True)
        assert len(set(names)) == len(set(values)) == variable_tracking.CHAINS == 40
        assert all(re.fullmatch(r"[A-Z]{5}", name) for name in names)
        assert all(10_000 <= int(value) <= 99_998 for value in values)


def test_variable_tracking_asks_for_the_one_variable_with_a_value():
    options = TaskOptions(count=20, context_length=LENGTH + 300)
    found = task("variable_tracking").documents(options, tokens)
    places = []
    for document in found:
        lines = document.question.split("\n")
        chains = dict(
            match.groups()[::-1]
            for line in lines
            if (match := re.fullmatch(r"VAR (\w+) = (\d+)", line))
        )
        assert len(chains) == 40
        assert document.gold == (chains[document.details["query"]],)
        assert set(lines) - {line for line in lines if line.startswith("VAR")} == {
            variable_tracking.NOISE
        }
        length = tokens(task("variable_tracking").messages(document))
        assert LENGTH + 300 - 31 < length + variable_tracking.ANSWER_TOKENS <= LENGTH + 300
        places += [n / len(lines) for n, line in enumerate(lines) if line.startswith("VAR")]
    assert 0.4 < statistics.mean(places) < 0.6
    assert min(places) < 0.05
    assert max(places) > 0.95
    assert len({document.question for document in found}) == 20


def value(side: str, variable: str) -> tuple[int, int]:
    """Factor of the variable and constant of one side, read term by term."""
    factor = constant = 0
    for term in re.findall(r"-?[^+-]+", side.replace(" ", "").replace("+-", "-")):
        if variable in term:
            number = term.replace(f"*{variable}", "").replace(variable, "1")
            factor += int(number)
        else:
            constant += int(term)
    return factor, constant


def test_linear_equations_are_solved_by_their_answers():
    rng = random.Random(7)
    drawn = [equation(rng) for _ in range(3000)]
    for question, answer in drawn:
        left, right, variable = re.fullmatch(r"Solve (.+) = (.+) for (.)\.", question).groups()
        (a, b), (c, d) = value(left, variable), value(right, variable)
        assert Fraction(d - b, a - c) == answer
        assert variable != "e"
    sizes = sorted(abs(answer) for _, answer in drawn)
    assert 5 <= statistics.median(sizes) <= 11  # 8 in the public generator
    assert 100 < sizes[-1] <= 159  # 152 there; ceil(10^2.5 / 2) at most
    lengths = [len(question) for question, _ in drawn]
    assert 31 < statistics.mean(lengths) < 39  # 35 there
    assert 0.1 < sum("= 0 for" in q or "Solve 0 =" in q for q, _ in drawn) / 3000 < 0.3  # 0.2
    shape = re.compile(r"Solve -?\d+\*(.) [+-] \d+ = -?\d+\*\1 [+-] \d+ for \1\.")
    assert sum(bool(shape.fullmatch(question)) for question, _ in drawn) / 3000 < 0.08  # 0.03


def test_linear_documents_differ_and_follow_the_seed():
    def questions(seed: int) -> list[str]:
        options = TaskOptions(count=300, seed=seed)
        return [d.question for d in task("linear_1d").documents(options, tokens)]

    assert len(set(questions(1))) == 300
    assert questions(1) == questions(1) != questions(2)


def test_the_largest_fit_is_found_exactly():
    for limit in (3, 17, 64, 1000):
        assert largest_fit(lambda n: 3 + 2 * n, limit, "t") == (limit - 3) // 2


def test_the_largest_fit_does_not_depend_on_where_the_search_begins():
    for limit in range(3, 40):
        truth = max(n for n in range(40) if 3 + n * n // 8 <= limit)
        for near in range(40):
            assert largest_fit(lambda n: 3 + n * n // 8, limit, "t", near) == truth
    with pytest.raises(EvaluationError, match="has 3 tokens and must fit into 2"):
        largest_fit(lambda n: 3 + n, 2, "t", near=7)


def test_the_search_for_a_size_begins_at_that_of_the_prompt_before(haystack):
    calls = []

    def counted(messages):
        calls.append(messages)
        return tokens(messages)

    for name in ("niah", "variable_tracking"):
        options = TaskOptions(count=20, context_length=2000, haystack=haystack)
        list(task(name).generate(options, counted))
        assert len(calls) < 20 * 8
        calls.clear()


def test_sentences_are_cut_behind_their_signs():
    text = 'It is 3.5 m. "Why?" He said no! 7 came. e.g. this'
    assert sentences(text) == ["It is 3.5 m.", '"Why?" He said no!', "7 came. e.g. this"]
    assert " ".join(sentences(text)) == text


def test_unlike_values_skip_repeats():
    values = unlike(lambda rng: str(rng.randint(0, 9)), random.Random(0))
    assert sorted(islice(values, 10)) == list("0123456789")
