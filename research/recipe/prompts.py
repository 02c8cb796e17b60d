r"""Instructions for a model, whose answers are the text of its retrofit.

    python -m research recipe-prompts prompts.jsonl --count 4000 \
        [--word-problems 2000] [--add train.jsonl:question] [--tasks gsm8k=train.jsonl]

draws tasks and subjects at random; every line is {"prompt": ...}. They are this project's own text,
as are the word problems, which have the prompt of GSM8K. `--add` takes texts of other files as they
are, `--tasks` problems in the prompt of a task of `dms-eval`. Then all prompts are in random order.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from dms_train.cli.config_source import ASSETS_DIR
from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Messages
from dms_train.evaluation.tasks.gsm8k import meta_prompt
from dms_train.evaluation.tasks.registry import task as find_task
from dms_train.hf.text_files import read_lines
from research.lab.arguments import count, seed
from research.recipe.word_problems import word_problems

_ON_TOPICS = (
    "Explain {topic} to somebody who has never heard of it.",
    "Write a lesson on {topic} with three exercises and their solutions.",
    "What are the most common mistakes about {topic}? Explain each of them.",
    "Write a long article about {topic} with headings.",
    "Summarize the history of {topic}.",
    "Give ten questions about {topic}, each followed by its answer.",
    "Compare {topic} with {other}.",
    "Write a dialogue in which a teacher and a student discuss {topic}.",
    "Describe step by step how to learn {topic} in a month.",
    "Write a Python program that has to do with {topic}, and explain every line.",
)
_ON_THINGS = (
    "Write a short story about the {adjective} {noun} and the {second} {other}.",
    "Write a letter to a friend about a {adjective} {noun}.",
    "Describe a {adjective} {noun} in detail.",
    "Invent a word problem about a {adjective} {noun}, and solve it step by step.",
    "List twenty things that one can do with a {noun}, each with a reason.",
)
_TOPICS = (
    *("algebra", "anatomy", "ancient Rome", "architecture", "astronomy", "bees", "bicycles"),
    *("bread baking", "bridges", "cell biology", "chemical bonds", "chess", "climate", "coins"),
    *("computer networks", "cooking", "databases", "dinosaurs", "economics", "electric motors"),
    *("elections", "encryption", "evolution", "fractions", "gardening", "genetics", "geometry"),
    *("glaciers", "grammar", "graph theory", "gravity", "healthy food", "insurance", "jazz"),
    *("languages", "light", "logic", "magnets", "maps", "medicine", "mountains", "music theory"),
    *("negotiation", "oceans", "operating systems", "painting", "photography", "photosynthesis"),
    *("physics", "poetry", "probability", "programming", "recycling", "rivers", "robots"),
    *(
        "saving money",
        "sleep",
        "sorting algorithms",
        "sound",
        "statistics",
        "the French Revolution",
    ),
    *("the Moon", "the printing press", "the water cycle", "theatre", "time zones", "trade"),
    *("trains", "vaccines", "volcanoes", "weather", "writing", "World War II"),
)


def prompts(number: int, start: int) -> list[str]:
    """Return different prompts, drawn with the seed `start`: on topics or, one in three, on things.

    Raises:
        EvaluationError: There are not so many prompts.
    """
    draw = random.Random(start)
    kinds = json.loads((ASSETS_DIR / "needle_words.json").read_text(encoding="utf-8"))
    drawn: dict[str, None] = {}
    for _ in range(100 * number):
        if len(drawn) == number:
            return list(drawn)
        topic, other = draw.sample(_TOPICS, 2)
        adjective, second = draw.sample(kinds["adjectives"], 2)
        if draw.random() < 2 / 3:
            drawn[draw.choice(_ON_TOPICS).format(topic=topic, other=other)] = None
            continue
        noun, thing = draw.sample(kinds["nouns"], 2)
        parts = {"adjective": adjective, "second": second, "noun": noun, "other": thing}
        drawn[draw.choice(_ON_THINGS).format(**parts)] = None
    raise EvaluationError(f"--count {number}: only {len(drawn)} prompts were found; ask for fewer")


def column(given: str) -> list[str]:
    """Return the texts of one column of a file of JSON lines, given as `FILE:COLUMN`.

    Raises:
        EvaluationError: There is no such file or column, or the column has no texts.
        HFError: The file is not UTF-8, or a Git LFS pointer.
    """
    file, _, name = given.rpartition(":")
    if not file or not Path(file).is_file():
        raise EvaluationError(f"--add {given}: name a file of JSON lines as FILE:COLUMN")
    return [_text(where, line, name) for where, line in read_lines(Path(file))]


def _text(where: str, line: str, name: str) -> str:
    """Return the column of a row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise EvaluationError(f"{where}: not valid JSON ({error})") from None
    text = row.get(name) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise EvaluationError(f"{where}: no text {name!r}; name a column of every row")
    return text


def problems(given: str) -> list[str]:
    """Return the problems of a file in the prompt of a task, given as `TASK=FILE`.

    Raises:
        EvaluationError: There is no such task or file, or the task's prompt is not only a question.
    """
    name, _, file = given.partition("=")
    if not Path(file).is_file():
        raise EvaluationError(f"--tasks {given}: name a file of problems as TASK=FILE")
    task = find_task(name)
    documents = task.documents(TaskOptions(path=file, subset=True), lambda messages: 0)
    asked = [task.messages(document) for document in documents]
    if any(messages != Messages(user=messages.user) for messages in asked):
        raise EvaluationError(
            f"--tasks {given}: prompts of {name} also have a system prompt, the beginning of an "
            "answer or no chat format; choose another task"
        )
    return [messages.user for messages in asked]


def _run(args: argparse.Namespace) -> int:
    found = prompts(args.count, args.seed)
    found += [meta_prompt(text).user for text in word_problems(args.word_problems, args.seed)]
    for given in args.add:
        found += column(given)
    for given in args.tasks:
        found += problems(given)
    if len(found) > args.count:
        random.Random(args.seed).shuffle(found)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt}) for prompt in found]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research recipe-prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help=".jsonl file to write")
    parser.add_argument("--count", type=count, required=True)
    parser.add_argument("--seed", type=seed, default=0)
    about = "number of word problems, in the prompt of GSM8K (none)"
    parser.add_argument("--word-problems", type=count, default=0, metavar="N", help=about)
    parser.add_argument(
        "--add", nargs="+", default=[], metavar="FILE:COLUMN", help="prompts of other sources"
    )
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK=FILE", help="problems, as a task asks them"
    )
    return run_main(lambda: _run(parser.parse_args(arguments)))
