"""Countdown: every line is true, searches are complete, held-out instances are never trained on."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dms_train.data.manifest import file_sha256, read_manifest
from dms_train.data.reader import ShardReader
from research.data.command import main
from research.data.countdown import (
    PROBLEMS,
    TRAINING,
    CountdownRule,
    Instance,
    held_out_problems,
    instance,
    search,
    solving_moves,
)
from research.data.words import WORDS, decoded
from research.scorers.countdown import solves
from research.tasks.word_problems import FIXTURES


def plays(numbers: tuple[int, ...]) -> set[tuple[str, tuple[int, ...]]]:
    """First moves of any two places and what they leave, by trying all."""
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        values = {"+": a + b, "-": a - b}
        if a != 1 and b != 1:
            values |= {"*": a * b, "/": a / b}
        for sign, value in values.items():
            if value == int(value) and 1 <= value <= 100:
                left, right = (a, b) if a >= b else (b, a)
                name = f"{left} {sign} {right}" if sign in "+*" else f"{a} {sign} {b}"
                found.add((name, tuple(sorted([*rest, int(value)]))))
    return found


def can_make(numbers: tuple[int, ...], target: int) -> bool:
    """Return True if some play ends in the target, by trying all."""
    if len(numbers) == 1:
        return numbers[0] == target
    return any(can_make(rest, target) for _, rest in plays(numbers))


def lines(words: list[str], prompt: int) -> list[list[str]]:
    """The lines of a search, each begins with R or with a number of a first move."""
    found: list[list[str]] = []
    for word in words[prompt : words.index("ANS")]:
        if word == "R" or (word.startswith("#") and found[-1] != ["R"]):
            found.append([])
        found[-1].append(word)
    return found


def check_line(line: list[str]) -> None:
    """The arithmetic of one line."""
    start = 2 if line[0] == "R" else 1
    a, sign, b, equals, result, colon, *rest = line[start:]
    assert (equals, colon) == ("=", ":")
    assert eval(f"{a} {sign} {b}") == int(result)
    if ">" in rest:
        place = rest.index(">")
        x, y = map(int, rest[:place])
        assert x >= y
        values = [x + y, x - y, x * y if y > 1 else 0, x / y if y > 1 else 0]
        fit = [str(int(v)) if v == int(v) and 1 <= v <= 100 else "." for v in values]
        given = rest[place + 1 :]
        assert given == (fit if given[-1] != "!" else [*fit[: len(given) - 1], "!"])


def below(numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Lines of every play of three numbers or more, without the mark, and what each leaves."""
    found = {}
    for name, rest in plays(numbers):
        result = int(eval(name))
        if len(rest) > 2:
            found[f"{name} = {result} : {' '.join(map(str, rest))}"] = rest
            continue
        low, high = rest
        by_sign = {play.split()[1]: value for play, (value,) in plays(rest)}
        values = " ".join(str(by_sign.get(sign, ".")) for sign in "+-*/")
        found[f"{name} = {result} : {high} {low} > {values}"] = rest
    return found


def follow(numbers: tuple[int, ...], told: Iterator[str]) -> bool:
    """Read the lines below some numbers: every play once, each before what is below it.

    Returns:
        True after the last play, False where the target ends the search.
    """
    left = below(numbers)
    while left:
        line = next(told)
        if line.endswith(" !"):
            assert any(f"{each} ".startswith(line[:-1]) for each in left)
            return False
        rest = left.pop(line)
        if len(rest) > 2 and not follow(rest, told):
            return False
    return True


def branches(words: list[str], prompt: int) -> list[tuple[tuple[int, ...], list[str]]]:
    """Numbers that each first move leaves, and the lines below it without their mark."""
    found: list[tuple[tuple[int, ...], list[str]]] = []
    for line in lines(words, prompt):
        if line[0] == "R":
            found.append((tuple(map(int, line[line.index(":") + 1 :])), []))
        else:
            assert line[0] == f"#{len(found)}"
            found[-1][1].append(" ".join(line[1:]))
    return found


def test_the_words_of_countdown_are_the_first_157() -> None:
    """A model that was trained on them alone reads the same ids; 256 are those of lab_teacher_s."""
    assert len(WORDS) == len(set(WORDS)) <= 256
    assert WORDS[0] == "<eod>"
    assert WORDS[156] == ","
    rng = random.Random(6)
    assert max(search(rng, instance(rng, TRAINING[4], "train")).max() for _ in range(50)) <= 156


@pytest.mark.parametrize(("numbers", "searches"), [(3, 40), (4, 20), (5, 4)])
def test_every_line_of_a_search_is_true(numbers: int, searches: int) -> None:
    rng = random.Random(3)
    for _ in range(searches):
        drawn = instance(rng, TRAINING[numbers], "train")
        words = decoded(search(rng, drawn))
        assert words[: numbers + 3] == drawn.prompt.split()
        told = lines(words, numbers + 3)
        for line in told:
            check_line(line)
            assert "!" not in line or line is told[-1]
        assert told[-1][-2:] == [str(drawn.target), "!"]
        roots = [line for line in told if line[0] == "R"]
        assert [line[1] for line in roots] == [f"#{n}" for n in range(1, len(roots) + 1)]
        assert len({tuple(line[2:5]) for line in roots}) == len(roots)
        answer = " ".join(words[words.index("ANS") + 1 : -1])
        assert solves(drawn.numbers, drawn.target, answer)
        assert words[-1] == "<eod>"


@pytest.mark.parametrize(("numbers", "searches"), [(4, 30), (5, 4)])
def test_a_search_below_a_first_move_is_complete(numbers: int, searches: int) -> None:
    """Every line that trying all gives is written once, in an order that does not change."""
    rng = random.Random(4)
    whole: dict[tuple[int, ...], list[str]] = {}
    for _ in range(searches):
        drawn = instance(rng, TRAINING[numbers], "train")
        *without, (solved, last) = branches(decoded(search(rng, drawn)), numbers + 3)
        for rest, told in without:
            assert not can_make(rest, drawn.target)
            given = iter(told)
            assert follow(rest, given)
            assert next(given, None) is None
            assert whole.setdefault(rest, told) == told
        given = iter(last)
        assert not follow(solved, given)
        assert next(given, None) is None
        for line in last[:-1]:
            assert str(drawn.target) not in line.partition(">")[2].split()
        again = Instance(drawn.numbers, drawn.target)
        for rest, told in branches(decoded(search(rng, again)), numbers + 3)[:-1]:
            assert whole.setdefault(rest, told) == told


def test_a_search_of_three_numbers_has_every_play_up_to_the_target() -> None:
    rng = random.Random(8)
    for _ in range(60):
        drawn = instance(rng, TRAINING[3], "train")
        told = [" ".join(line[2:]) for line in lines(decoded(search(rng, drawn)), 6)]
        plays_left = below(drawn.numbers)
        for line in told[:-1]:
            assert not can_make(plays_left.pop(line), drawn.target)
        assert any(f"{each} ".startswith(told[-1][:-1]) for each in plays_left)


def test_solving_moves_of_every_target() -> None:
    rng = random.Random(0)
    numbers = (4, 1, 4, 3)
    unreachable = next(t for t in range(100, 0, -1) if not can_make(numbers, t))
    with pytest.raises(ValueError, match="cannot be reached"):
        search(rng, Instance(numbers, unreachable))
    for target in range(10, 101):
        reached = sum(can_make(rest, target) for _, rest in plays(numbers))
        assert solving_moves(Instance(numbers, target)) == reached, target


def test_solving_moves_are_those_of_trying_all() -> None:
    rng = random.Random(5)
    for _ in range(12):
        drawn = instance(rng, CountdownRule(), "train")
        found = sum(can_make(rest, drawn.target) for _, rest in plays(drawn.numbers))
        assert 1 <= found == solving_moves(drawn) <= 4


def test_first_moves_come_in_random_order() -> None:
    rng = random.Random(1)
    first = Counter(tuple(search(rng, Instance((4, 1, 4, 3), 44))[9:12]) for _ in range(600))
    assert len(first) == len(plays((4, 1, 4, 3)))
    assert min(first.values()) > 600 / len(first) / 2


def test_an_ideal_solver_finishes_within_these_lengths() -> None:
    """As research/lab/README.md says: 0.42, 0.74, 0.98 within 512, 1,024 and 2,048 tokens."""
    rng, count = random.Random(11), 1000
    drawn = [instance(rng, PROBLEMS[4], "held_out") for _ in range(count)]
    sizes = np.array([len(search(rng, each)) - 7 for each in drawn])
    for length, share in ((512, 0.42), (1024, 0.74), (2048, 0.98)):
        error = math.sqrt(share * (1 - share) / count)
        assert (sizes <= length).mean() == pytest.approx(share, abs=4 * error + 0.005)


def test_held_out_instances_are_one_in_sixteen_and_never_trained_on() -> None:
    rng = random.Random(2)
    train = [instance(rng, CountdownRule(), "train") for _ in range(300)]
    assert not any(each.held_out for each in train)
    every = [
        Instance((a, b, 3, 4), t) for a in range(1, 21) for b in range(1, 21) for t in (30, 40)
    ]
    assert sum(each.held_out for each in every) == pytest.approx(len(every) / 16, rel=0.5)
    for each in every[:50]:
        assert each.held_out == Instance(each.numbers[::-1], each.target).held_out


def test_problems_are_held_out_different_and_solved() -> None:
    problems = held_out_problems(40, PROBLEMS[4], seed=1)
    assert problems == held_out_problems(40, PROBLEMS[4], seed=1)
    assert len({(tuple(sorted(p["numbers"])), p["target"]) for p in problems}) == 40
    for row in problems:
        assert Instance(tuple(row["numbers"]), row["target"]).held_out
        assert solves(row["numbers"], row["target"], row["answer"])
        assert row["solving_moves"] in (1, 2)


def made(folder: Path, *words: str) -> list[np.ndarray]:
    assert main(["countdown", "--out", str(folder), *words]) == 0
    reader = ShardReader(folder / "train")
    return [reader[number][0] for number in range(len(reader))]


def test_filled_documents_begin_with_prompts_and_many_with_long_searches(tmp_path: Path) -> None:
    words = ("--documents", "60", "--document-tokens", "400", "--long-share", "0.8")
    documents = made(tmp_path / "a", *words)
    assert {len(each) for each in documents} == {400}
    assert {WORDS[each[0]] for each in documents} == {"P"}
    long = sum(0 not in each[:199] for each in documents)
    assert long > 0.8 * 60 - 4 * 3.1
    again = made(tmp_path / "b", *words, "--workers", "2")
    assert all((a == b).all() for a, b in zip(documents, again, strict=True))
    other = made(tmp_path / "c", *words, "--seed", "1")
    assert any((a != b).any() for a, b in zip(documents, other, strict=True))


def test_several_numbers_are_drawn_as_often_as_they_are_named(tmp_path: Path) -> None:
    documents = made(tmp_path, "--documents", "300", "--numbers", "3,3,4")
    counts = Counter(list(each).index(WORDS.index("T")) - 1 for each in documents)
    assert set(counts) == {3, 4}
    assert counts[3] == pytest.approx(200, abs=4 * math.sqrt(300 * 2 / 9))
    preparation = read_manifest(tmp_path / "train").preparation
    assert preparation is not None
    assert [rule["numbers"] for rule in preparation["settings"]["rules"]] == [3, 3, 4]


def test_the_manifest_has_the_settings_and_the_statistics(tmp_path: Path) -> None:
    documents = made(tmp_path, "--documents", "50", "--numbers", "4", "--most-solving", "2")
    manifest = read_manifest(tmp_path / "train")
    assert (manifest.vocab_size, manifest.eod_id, manifest.documents) == (len(WORDS), 0, 50)
    assert manifest.preparation is not None
    assert manifest.preparation["settings"]["most_solving"] == 2
    shares = manifest.preparation["statistics"]["share_within_tokens"]
    for length, share in shares.items():
        within = sum(len(each) - 7 <= int(length) for each in documents)
        assert share == pytest.approx(within / 50)


def test_the_tokenizer_is_loaded_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made(tmp_path, "--documents", "1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    words = ["P", "4", "1", "#3", "ANS"]
    assert tokenizer.encode(" ".join(words)) == [WORDS.index(word) for word in words]
    assert tokenizer.decode(range(len(WORDS))) == " ".join(WORDS)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eod>", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["countdown", "--out", "a", "--documents", "1", "--long-share", "0.5"], "--document-tok"),
        (
            [
                "countdown",
                "--out",
                "a",
                "--documents",
                "1",
                "--fewest-solving",
                "5",
                "--most-solving",
                "4",
            ],
            "--fewest-solving 5 is above --most-solving 4",
        ),
        (["countdown-problems", "--out", "p.jsonl", "--problems", "1"], "p.jsonl: exists already"),
        (
            ["countdown-problems", "--out", "a", "--problems", "3", "--fewest-solving", "200"],
            "--fewest-solving 200: instances have at most 40 first moves",
        ),
        (
            [
                "countdown-problems",
                "--out",
                "a",
                "--problems",
                "50",
                "--fewest-solving",
                "12",
                "--most-solving",
                "40",
            ],
            "--most-solving 40 --problems 50: 100,000 draws after the first ",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fewest-solving 40", "--fewest-solving 40 --most-solving 40: none of 100,000 drawn"),
        (
            "--document-tokens 8192 --long-share 1",
            "--document-tokens 8192 --long-share 1: none of 10,000 drawn documents has 4,096",
        ),
    ],
)
def test_documents_that_do_not_exist_are_not_sought_for_ever(tmp_path, capsys, words, message):
    given = ["--out", str(tmp_path), "--documents", "1", "--workers", "1", *words.split()]
    assert main(["countdown", *given]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not list(tmp_path.glob("train*"))


def test_the_tokenizer_of_another_model_is_kept_unless_overwrite_is_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tokenizer" / "tokenizer.json"
    other.parent.mkdir()
    other.write_text("{}")
    words = ["countdown", "--out", str(tmp_path), "--documents", "1"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{other}: is of another tokenizer; pass --overwrite" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["tokenizer", "tokenizer.json"]
    assert other.read_text() == "{}"
    made(tmp_path, "--documents", "1", "--overwrite")
    manifest = read_manifest(tmp_path / "train")
    assert manifest.tokenizer_sha256 == file_sha256(other)


def test_a_finished_shard_is_refused_before_its_tokenizer_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "--documents", "1")
    other = tmp_path / "tokenizer" / "tokenizer.json"
    other.write_text("{}")
    assert main(["countdown", "--out", str(tmp_path), "--documents", "1"]) == 2
    assert "train: exists already; pass --overwrite" in capsys.readouterr().err
    assert other.read_text() == "{}"


def test_the_same_tokenizer_is_shared_by_another_shard(tmp_path: Path) -> None:
    made(tmp_path, "--documents", "1")
    for path in tmp_path.glob("train*"):
        path.unlink()
    made(tmp_path, "--documents", "2")


def test_the_problems_of_the_package_are_held_out() -> None:
    for row in map(json.loads, (FIXTURES / "countdown.jsonl").read_text().splitlines()):
        assert Instance(tuple(row["numbers"]), row["target"]).held_out
