"""Needles and chains of variables: an independent reader of the texts finds every answer."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dms_train.data.reader import ShardReader
from dms_train.data_prep.prepare import main as dms_data
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import all_scorers
from dms_train.evaluation.tasks.registry import task
from research.data import lab_niah, lab_variable_tracking
from research.data.command import main
from research.data.haystacks import held_out
from research.data.lab_niah import LabNiah
from research.data.lab_variable_tracking import LabVariableTracking
from research.data.words import WORDS, decoded

NEEDLE = re.compile(r"KEY ([a-z] [a-z]) = (\d+ \d+ \d+) \. ")
ASSIGNMENT = re.compile(r"VAR ([a-z] [a-z]|\d+ \d+) > ([a-z] [a-z]) \. ")
SENTENCE = re.compile(r"the [a-z]+ [a-z]+ [a-z]+ [a-z]+ \. ")
NOISE = "the grass is green . the sky is blue . the sun is yellow . "
NOISE += "here we go . there and back again . "


def parts(prompt: str, marker: str) -> tuple[str, list[str]]:
    """The text and the parts of the question."""
    text, question = prompt.split("? ")
    assert text.startswith(f"{marker} ")
    assert question.endswith(" :")
    return text[2:], question[:-2].split(" , ")


def read_needles(prompt: str) -> tuple[dict[str, str], list[str]]:
    """Values by key, in their order, and the keys that are asked for; the rest is sentences."""
    text, asked = parts(prompt, "N")
    found = NEEDLE.findall(text)
    assert len(dict(found)) == len(found)
    assert SENTENCE.sub("", NEEDLE.sub("", text)) == ""
    return dict(found), asked


def read_chains(prompt: str) -> tuple[dict[str, list[str]], list[str]]:
    """Names by value, in their order, and the values that are asked for; the rest is noise."""
    text, asked = parts(prompt, "V")
    values: dict[str, str] = {}
    for source, name in ASSIGNMENT.findall(text):
        assert name not in values
        values[name] = source if source[0].isdigit() else values[source]
    chains: dict[str, list[str]] = {}
    for name, value in values.items():
        before = chains.setdefault(value, [])
        assert f"VAR {before[-1] if before else value} > {name} . " in text
        before.append(name)
    assert len({len(names) for names in chains.values()}) == 1
    assert ASSIGNMENT.sub("", text).replace(NOISE, "") == ""
    return chains, asked


def niah_answers(prompt: str) -> list[str]:
    values, asked = read_needles(prompt)
    return [f"{key} = {values[key]}" for key in asked]


def chain_answers(prompt: str) -> list[str]:
    chains, asked = read_chains(prompt)
    return [" > ".join([value, *chains[value]]) for value in asked]


def hidden_tokens(prompt: str) -> int:
    """Return the tokens of the lines that hide something."""
    return 8 * len(NEEDLE.findall(prompt)) + 7 * len(ASSIGNMENT.findall(prompt))


TASKS = [(LabNiah, niah_answers), (LabVariableTracking, chain_answers)]


@pytest.mark.parametrize(("kind", "answers"), TASKS)
@pytest.mark.parametrize("context", [128, 2048])
def test_the_answers_of_a_document_are_those_of_its_text(kind, answers, context) -> None:
    rng = random.Random(context)
    fullness, bare, names = [], 0, set()
    for _ in range(300):
        drawn = kind(context=context).draw(rng)
        words = decoded(drawn.tokens)
        prompt = " ".join(words[: drawn.prompt])
        told = " ".join(words[drawn.prompt :])
        assert told == f"ANS {' , '.join(answers(prompt))} <eod>"
        assert len(words) <= context
        line = 6 if kind is LabNiah else 24
        filler = len(parts(prompt, words[0])[0].split()) - hidden_tokens(prompt)
        assert filler % line == 0
        bare += filler == 0
        taken = len(words) - filler
        # the place of the length in the logarithm's range, in the middle of a line
        if context == 2048:
            fullness.append(math.log(1 + (filler + line / 2) / taken) / math.log(context / taken))
        names |= set(re.findall(r"(?:KEY|>) ([a-z] [a-z])", prompt))
    assert not any(map(held_out, names))
    assert bare > 0
    if context == 2048:
        halves = np.mean(np.array(fullness) > 0.25)  # the square of one half
        assert halves == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(300) + 0.02)


def test_documents_have_all_numbers_of_needles_hops_and_questions() -> None:
    rng = random.Random(1)
    needles, chains = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    longest = 0
    for _ in range(400):
        drawn = LabNiah().draw(rng)
        values, asked = read_needles(" ".join(decoded(drawn.tokens[: drawn.prompt])))
        needles[len(values), len(asked)] += 1
        drawn = LabVariableTracking().draw(rng)
        found, asked = read_chains(" ".join(decoded(drawn.tokens[: drawn.prompt])))
        hops = len(next(iter(found.values()))) - 1
        chains[hops, len(asked)] += 1
        longest = max(longest, len(found) * (hops + 1))
    assert {count for count, _ in needles} >= {*range(1, 12)}
    few = sum(times for (count, _), times in needles.items() if count < 8)
    assert few / 400 == pytest.approx(math.log(8) / math.log(65), abs=0.1)
    assert {asked for count, asked in needles if count == 2} == {1, 2}
    assert 50 < max(asked for _, asked in needles) <= max(n for n, _ in needles) <= 64
    assert {hops for hops, _ in chains} == {*range(5)}
    assert {asked for _, asked in chains} >= {*range(1, 9)}
    assert 30 < longest <= 40


def test_one_name_in_sixteen_is_held_out() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a} {b}" for a in letters for b in letters]
    assert sum(map(held_out, names)) == pytest.approx(len(names) / 16, rel=0.4)


@pytest.mark.parametrize("needles", [1, 5])
@pytest.mark.parametrize("context", [2048, 8192])
def test_problems_fill_the_context_and_ask_for_a_held_out_key(needles, context) -> None:
    rows = lab_niah.held_out_problems(30, 1, context=context, needles=needles)
    assert rows == lab_niah.held_out_problems(30, 1, context=context, needles=needles)
    assert rows != lab_niah.held_out_problems(30, 2, context=context, needles=needles)
    assert len({row["depth"] for row in rows}) > 10
    for row in rows:
        values, (asked,) = read_needles(row["prompt"])
        assert len(values) == needles
        assert [f"{asked} = {values[asked]}"] == row["answers"]
        assert [key for key in values if held_out(key)] == [asked]
        used = len(row["prompt"].split()) + len(f"ANS {row['answers'][0]} <eod>".split())
        assert context - 6 < used <= context
        before = len(SENTENCE.findall(row["prompt"].split(f"KEY {asked}")[0]))
        sentences = len(SENTENCE.findall(row["prompt"]))
        assert before == sentences * row["depth"] // 100


def row_value(row: dict[str, object]) -> str:
    """The value that is asked for."""
    return str(row["prompt"]).split("? ")[1].removesuffix(" :")


@pytest.mark.parametrize(("chains", "hops"), [(40, 0), (6, 4)])
@pytest.mark.parametrize("context", [2048, 8192])
def test_problems_ask_for_a_chain_of_held_out_names(chains, hops, context) -> None:
    def made(seed: int) -> list[dict[str, object]]:
        size = {"context": context, "chains": chains, "hops": hops}
        return lab_variable_tracking.held_out_problems(20, seed, **size)

    rows = made(1)
    assert rows == made(1) != made(2)
    firsts = Counter(list(read_chains(row["prompt"])[0]).index(row_value(row)) for row in rows)
    assert len(firsts) >= 4  # at random among the others
    for row in rows:
        found, (asked,) = read_chains(row["prompt"])
        assert (len(found), len(found[asked])) == (chains, hops + 1)
        assert row["answers"] == [" > ".join([asked, *found[asked]])]
        names = [name for each in found.values() for name in each]
        assert [name for name in names if held_out(name)] == found[asked]
        used = len(row["prompt"].split()) + len(f"ANS {row['answers'][0]} <eod>".split())
        assert context - 24 < used <= context


@pytest.mark.parametrize(
    ("name", "answers"), [("lab_niah", niah_answers), ("lab_variable_tracking", chain_answers)]
)
def test_the_scorer_takes_the_answer_and_nothing_near_it(name, answers, tmp_path: Path) -> None:
    path, command = tmp_path / "problems.jsonl", name.replace("_", "-")
    more = ["--needles", "3"] if name == "lab_niah" else ["--chains", "5", "--hops", "1"]
    given = ["--out", str(path), "--problems", "10", "--context", "400"]
    assert main([f"{command}-problems", *given, *more]) == 0
    scorer = all_scorers()["words"]
    with AnswerChecker() as checker:
        for document in task(name).documents(TaskOptions(path=str(path)), lambda _: 0):
            (right,) = answers(document.question)
            words = right.split()
            near = [
                *(words[:place] + words[place + 1 :] for place in range(len(words))),
                *(
                    [*words[:place], "0" if word != "0" else "1", *words[place + 1 :]]
                    for place, word in enumerate(words)
                ),
                [*words, words[-1]],
            ]
            texts = [f"ANS {right}", *(f"ANS {' '.join(each)}" for each in near), right]
            scores = scorer.scores(document, texts, checker)
            assert [each.correct for each in scores] == [(True,), *[(False,)] * (len(texts) - 1)]


@pytest.mark.parametrize("command", ["lab-niah", "lab-variable-tracking"])
def test_a_shard_depends_on_the_seed_and_not_on_the_workers(command, tmp_path: Path) -> None:
    def made(name: str, *more: str) -> list[np.ndarray]:
        given = ["--documents", "30", "--context", "300", *more]
        assert main([command, "--out", str(tmp_path / name), *given]) == 0
        reader = ShardReader(tmp_path / name / "train")
        return [reader[number][0] for number in range(len(reader))]

    documents = made("a")
    assert all(WORDS[each[-1]] == "<eod>" for each in documents)
    again = made("b", "--workers", "2")
    assert all((a == b).all() for a, b in zip(documents, again, strict=True))
    other = made("c", "--seed", "1")
    assert not all(np.array_equal(a, b) for a, b in zip(documents, other, strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "lab-niah --documents 1 --context 20",
            "--context 20: a problem without its filler has 21 tokens; raise it, or hide less",
        ),
        (
            "lab-niah-problems --problems 1 --context 128 --needles 30",
            "--context 128: a problem without its filler has 253 tokens; raise it, or hide less",
        ),
        (
            "lab-niah-problems --problems 1 --context 8192 --needles 700",
            "699 names are needed and there are 634; hide less",
        ),
        (
            "lab-variable-tracking --documents 1 --context 12",
            "--context 12: a problem without its filler has",
        ),
        (
            "lab-variable-tracking-problems --problems 1 --context 256",
            "--context 256: a problem without its filler has 292 tokens; raise it, or hide less",
        ),
        (
            "lab-variable-tracking-problems --problems 1 --context 8192 --hops 4 --chains 150",
            "745 names are needed and there are 634; hide less",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys, words, message) -> None:
    command, *given = words.split()
    assert main([command, "--out", str(tmp_path / "out"), *given]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not list(tmp_path.glob("out/train*"))
    assert not (tmp_path / "out").is_file()


def test_shards_of_all_tasks_have_one_vocabulary_and_are_mixed(tmp_path: Path) -> None:
    weights = {"countdown": 4, "arithmetic": 3, "lab-niah": 2, "lab-linear-1d": 1}
    weights["lab-variable-tracking"] = 2
    given = ["--documents", "60", "--document-tokens", "200"]
    for command in weights:
        assert main([command, "--out", str(tmp_path / command), *given]) == 0
    parts = [f"{tmp_path / name / 'train'}={weight}" for name, weight in weights.items()]
    assert dms_data(["mix", *parts, "--output", str(tmp_path / "mixed")]) == 0
    reader = ShardReader(tmp_path / "mixed")
    first = Counter(WORDS[reader[number][0][0]] for number in range(len(reader)))
    assert set(first) == set("PMNEV")
    for word, weight in zip("PMNEV", weights.values(), strict=True):
        assert first[word] / len(reader) == pytest.approx(weight / 12, abs=2 / len(reader))
