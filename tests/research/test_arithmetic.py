"""Modular arithmetic: every line is true, answers are roots, and a vote gains what is stated."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import all_scorers
from dms_train.evaluation.tasks.registry import task
from research.data.arithmetic import (
    Arithmetic,
    System,
    held_out_problems,
    problem,
    system,
    trace,
)
from research.data.command import main
from research.data.words import WORDS, decoded

RIGHT = sum((2 / 3) ** before for before in range(7)) / 7  # as many other roots come first


def groups(words: list[str]) -> list[list[str]]:
    """Parts between commas and colons."""
    found: list[list[str]] = [[]]
    for word in words:
        if word in (",", ":"):
            found.append([])
        else:
            found[-1].append(word)
    return [part for part in found if part]


def coefficients(prompt: list[str]) -> dict[str, int]:
    """Values of the names of a prompt."""
    values: dict[str, int] = {}
    assert (prompt[0], prompt[-1]) == ("M", ":")
    for name, equals, left, sign, right in groups(prompt[1:]):
        assert equals == "="
        values[name] = eval(f"({values.get(left, left)} {sign} {right}) % 61")
    assert list(values) == list("abcdefghi")
    return values


def roots(values: dict[str, int]) -> dict[str, set[int]]:
    """Return the roots of each equation, by trying all numbers in the polynomial itself."""
    found = {}
    for names in ("abc", "def", "ghi"):
        a, b, c = (values[name] for name in names)
        found[names[0]] = {x for x in range(61) if (x**3 + a * x**2 + b * x + c) % 61 == 0}
    return found


def split(words: list[str]) -> tuple[list[str], list[str], list[list[str]], str]:
    """Prompt, worked coefficients, trials and answer of a document."""
    first = words.index(":") + 1
    second = words.index(":", first) + 1
    end = words.index("ANS")
    trials = "  ".join(words[second:end]).split("R  ")[1:]
    assert words[end + 2 :] == ["<eod>"]
    return words[:first], words[first:second], [each.split() for each in trials], words[end + 1]


@pytest.mark.parametrize("seed", range(5))
def test_every_line_of_a_document_is_true(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        drawn = Arithmetic().draw(rng)
        prompt, work, trials, answer = split(decoded(drawn.tokens))
        assert len(prompt) == drawn.prompt == 55
        values = coefficients(prompt)
        for (name, _, *told, _, result), given in zip(
            groups(work), groups(prompt[1:]), strict=True
        ):
            assert name == given[0]
            assert eval(f"({' '.join(told)}) % 61") == values[name] == int(result)
            assert told == [str(values.get(given[2], given[2])), *given[3:]]
        found = roots(values)
        assert {len(each) for each in found.values()} == {3}
        assert len(set.union(*found.values())) == 7
        tried = [int(trial[0]) for trial in trials]
        assert len(set(tried)) == len(tried)
        for x, (_, equation, colon, *line) in zip(tried, trials, strict=True):
            check_trial(x, [values[n] for n in "abcdefghi"["adg".index(equation) * 3 :][:3]], line)
            assert colon == ":"
            assert (line[-1] == "!") == (x in found[equation]) == (x == int(answer))
        assert tried[-1] == int(answer)
        (root,) = set.intersection(*found.values())
        assert bool(drawn.traits) == (int(answer) == root)


def check_trial(x: int, equation: list[int], line: list[str]) -> None:
    """`x + a = s * x = p + b = s * x = p + c = s`, all of it."""
    *chain, _ = line
    assert chain[0] == str(x)
    parts = " ".join(chain).split(" = ")
    values = [int(part.split()[0]) for part in parts]
    signs = [part.split()[1:] for part in parts[:-1]]
    a, b, c = map(str, equation)
    assert signs == [["+", a], ["*", str(x)], ["+", b], ["*", str(x)], ["+", c]]
    for (before, after), (sign, operand) in zip(pairwise(values), signs, strict=True):
        assert after == eval(f"({before} {sign} {operand}) % 61")


def test_order_and_checks_are_uniform() -> None:
    rng, count = random.Random(1), 3000
    drawn = problem(rng, system(rng))
    first = Counter(tuple(trace(rng, drawn)[0][128:130].tolist()) for _ in range(count))
    assert {WORDS[candidate] for candidate, _ in first} == {str(x) for x in range(61)}
    expected = count / 61 / 3
    statistic = sum((n - expected) ** 2 / expected for n in first.values())
    statistic += expected * (183 - len(first))
    assert statistic < 182 + 5 * math.sqrt(2 * 182)


def test_a_chain_is_right_as_often_as_stated_and_a_vote_more_often() -> None:
    """0.404 in the common root, 0.099 in each of six others; votes of 4 and 16 give .55 and .88."""
    rng, problems, chains = random.Random(2), 400, 16
    answers: list[tuple[int, list[int]]] = []
    wrong = Counter[int]()
    for _ in range(problems):
        drawn = problem(rng, system(rng))
        given = [trace(rng, drawn)[1] for _ in range(chains)]
        others = [x for pair in drawn.system.others for x in pair]
        wrong.update(others.index(x) for x in given if x != drawn.system.root)
        answers.append((drawn.system.root, given))
    total = problems * chains
    right = sum(given.count(root) for root, given in answers)
    assert right / total == pytest.approx(RIGHT, abs=4 * math.sqrt(RIGHT * (1 - RIGHT) / total))
    assert pytest.approx(0.404, abs=0.001) == RIGHT
    for place in range(6):
        assert wrong[place] / total == pytest.approx((1 - RIGHT) / 6, abs=0.016)
    for width, share in ((4, 0.55), (16, 0.88)):
        votes = [Counter(given[:width]).most_common(1)[0][0] == root for root, given in answers]
        error = math.sqrt(share * (1 - share) / problems)
        assert np.mean(votes) == pytest.approx(share, abs=4 * error)


def test_lengths_are_those_of_the_guide() -> None:
    """research/lab/README.md: 0.27, 0.58, 0.89 within 256, 512 and 1,024 tokens; 1,661 at most."""
    rng, count = random.Random(3), 1000
    drawn = [Arithmetic().draw(rng) for _ in range(count)]
    sizes = np.array([len(each.tokens) - each.prompt for each in drawn])
    assert sizes.min() >= 72 + 26 + 3
    assert sizes.max() <= 72 + 61 * 26 + 3 == 1661
    for length, share in ((256, 0.27), (512, 0.58), (1024, 0.89)):
        error = math.sqrt(share * (1 - share) / count)
        assert (sizes <= length).mean() == pytest.approx(share, abs=4 * error + 0.005)


def test_held_out_systems_are_one_in_sixteen_and_never_trained_on() -> None:
    rng = random.Random(4)
    for _ in range(300):
        assert not system(rng).held_out
    drawn = [System(*_any_system(rng)) for _ in range(2000)]
    assert np.mean([each.held_out for each in drawn]) == pytest.approx(1 / 16, abs=0.022)
    for root, (a, b, c) in drawn[:100]:
        same = System(root, (c[::-1], a, b[::-1]))
        assert same.held_out == System(root, (a, b, c)).held_out


def _any_system(rng: random.Random) -> tuple[int, tuple[tuple[int, int], ...]]:
    root, a, b, c, d, e, f = rng.sample(range(61), 7)
    return root, ((a, b), (c, d), (e, f))


def test_problems_are_held_out_and_their_answer_is_the_common_root() -> None:
    rows = held_out_problems(40, seed=1)
    assert rows == held_out_problems(40, seed=1)
    assert rows != held_out_problems(40, seed=2)
    assert len({row["prompt"] for row in rows}) == 40
    for row in rows:
        found = roots(coefficients(row["prompt"].split()))
        (root,) = set.intersection(*found.values())
        assert row["answers"] == [str(root)]
        others = tuple(tuple(each - {root}) for each in found.values())
        assert System(root, others).held_out


def test_the_scorer_takes_the_common_root_and_no_other_number(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    assert main(["arithmetic-problems", "--out", str(path), "--problems", "20"]) == 0
    with AnswerChecker() as checker:
        for document in task("arithmetic").documents(TaskOptions(path=str(path)), lambda _: 0):
            found = roots(coefficients(document.question.split()))
            for x in range(61):
                (score,) = all_scorers()["words"].scores(document, [f"! ANS {x} "], checker)
                assert score.correct == (all(x in each for each in found.values()),)
                assert score.answers == (str(x),)


def made(folder: Path, *words: str) -> list[np.ndarray]:
    given = ["--documents", "40", "--document-tokens", "400"]
    assert main(["arithmetic", "--out", str(folder), *given, *words]) == 0
    reader = ShardReader(folder / "train")
    return [reader[number][0] for number in range(len(reader))]


def test_a_shard_depends_on_the_seed_and_not_on_the_workers(tmp_path: Path) -> None:
    documents = made(tmp_path / "a", "--long-share", "0.5")
    assert {WORDS[each[0]] for each in documents} == {"M"}
    again = made(tmp_path / "b", "--long-share", "0.5", "--workers", "2")
    assert all((a == b).all() for a, b in zip(documents, again, strict=True))
    other = made(tmp_path / "c", "--long-share", "0.5", "--seed", "1")
    assert any((a != b).any() for a, b in zip(documents, other, strict=True))
    preparation = read_manifest(tmp_path / "a" / "train").preparation
    assert preparation is not None
    assert preparation["settings"]["task"] == "arithmetic"
    assert 0.2 < preparation["statistics"]["share_right_answer"] < 0.6
    tokenizer = json.loads((tmp_path / "a" / "tokenizer" / "tokenizer.json").read_text())
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    assert [words[token] for token in documents[0].tolist()] == decoded(documents[0])
