"""Prompts for the text of a retrofit: drawn, and added from other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

from dms_train.evaluation.tasks.base import FIXTURES
from dms_train.evaluation.tasks.gsm8k import meta_prompt
from research.recipe import prompts as recipe_prompts
from research.recipe.prompts import prompts
from research.recipe.word_problems import _NUMBERS, _PROBLEMS, word_problems

ANSWERS: tuple[Callable[[int, int, int, int, int], int], ...] = (  # of the problems, in their order
    lambda few, some, less, many, large: few * many - less,
    lambda few, some, less, many, large: large - few * some,
    lambda few, some, less, many, large: large - few * some - less,
    lambda few, some, less, many, large: many * few + (many + less) * some,
    lambda few, some, less, many, large: few * some * many - less,
    lambda few, some, less, many, large: large + many + 3 * few * less,
    lambda few, some, less, many, large: (many + less) * few,
    lambda few, some, less, many, large: 5 * less + few,
    lambda few, some, less, many, large: few * many * less + large,
    lambda few, some, less, many, large: (many - 2) * few * some,
    lambda few, some, less, many, large: many + many // 2 + few * many,
    lambda few, some, less, many, large: few * large + less,
)


def test_prompts_are_many_and_the_same_for_a_seed() -> None:
    drawn = prompts(1000, 0)
    assert drawn == prompts(1000, 0)
    assert drawn != prompts(1000, 1)
    assert len(set(prompts(10_000, 0))) == 10_000
    assert not [prompt for prompt in drawn if "{" in prompt]


def test_word_problems_are_many_and_the_same_for_a_seed() -> None:
    drawn = word_problems(1000, 0)
    assert drawn == word_problems(1000, 0)
    assert drawn != word_problems(1000, 1)
    assert len(set(word_problems(10_000, 0))) == 10_000
    assert not [text for text in drawn if "{" in text]


def test_answers_of_word_problems_are_positive_numbers() -> None:
    assert len(_PROBLEMS) == len(ANSWERS)
    for numbers in product(*((values[0], values[-1]) for values in _NUMBERS.values())):
        assert min(answer(*numbers) for answer in ANSWERS) > 0
    assert all(value % 2 == 0 for value in _NUMBERS["many"])  # one problem takes half of it


def test_word_problems_have_the_prompt_of_gsm8k(tmp_path: Path, capsys) -> None:
    out = tmp_path / "prompts.jsonl"
    given = [str(out), "--count", "20", "--seed", "3", "--word-problems", "30"]
    assert recipe_prompts.main(given) == 0
    found = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    asked = [meta_prompt(text).user for text in word_problems(30, 3)]
    assert sorted(found) == sorted([*prompts(20, 3), *asked])
    assert [text in asked for text in found] != [False] * 20 + [True] * 30


def test_prompts_of_other_files_are_added_in_random_order(tmp_path: Path, capsys) -> None:
    out, other = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    added = [f"Question {i}?" for i in range(30)]
    other.write_text("".join(json.dumps({"question": text}) + "\n" for text in added))
    given = [str(out), "--count", "20", "--add", f"{other}:question"]
    assert recipe_prompts.main(given) == 0
    found = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert sorted(found) == sorted([*prompts(20, 0), *added])
    assert [text in added for text in found] != [False] * 20 + [True] * 30
    assert recipe_prompts.main([*given[:-1], f"{other}:answer"]) == 2
    assert f"{other}:1: no text 'answer'; name a column of" in capsys.readouterr().err
    other.write_text('\n["a"]\n')
    assert recipe_prompts.main(given) == 2
    assert f"{other}:2: no text 'question'" in capsys.readouterr().err
    other.write_text("{")
    assert recipe_prompts.main(given) == 2
    assert f"{other}:1: not valid JSON" in capsys.readouterr().err
    assert recipe_prompts.main([*given[:-1], f"{tmp_path}:question"]) == 2
    assert "name a file of JSON lines as FILE:COLUMN" in capsys.readouterr().err


def test_problems_are_added_as_a_task_asks_them(tmp_path: Path, capsys) -> None:
    out, train = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(9)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(out), "--count", "4", "--tasks", f"gsm8k={train}"]
    assert recipe_prompts.main(given) == 0
    found = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    asked = [meta_prompt(row["question"]).user for row in rows]
    assert sorted(found) == sorted([*prompts(4, 0), *asked])
    assert found[4:] != asked
    for wrong, line in (
        (f"humaneval={FIXTURES / 'humaneval.jsonl'}", "humaneval also have a system prompt, the"),
        (f"exam_sheets={FIXTURES / 'exam_sheets.jsonl'}", "exam_sheets also have a system prompt"),
        (f"gsm={train}", "gsm: choose one of"),
        ("gsm8k=none.jsonl", "name a file of problems as TASK=FILE"),
    ):
        assert recipe_prompts.main([*given[:-1], wrong]) == 2
        assert line in capsys.readouterr().err
