"""Needle in a haystack: RULER's `niah_single_2`, one key and one number in running text.

The paper (appendix F.2) uses RULER with essays, 500 prompts and the context length of the
retrofit. Here the user provides the text (`task.haystack`), and keys come from the word lists of
this package. A regular expression splits sentences, and the length is searched in single words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import (
    Aggregate,
    Document,
    Messages,
    Row,
    Task,
    TaskSampling,
    TokenCounter,
)
from dms_train.evaluation.tasks.haystack import (
    cycled,
    largest_fit,
    read_words,
    sentences,
    unlike,
)

ANSWER_TOKENS = 128
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # percent, the depths of RULER
_WORDS = "assets/needle_words.json"


class Niah(Task):
    """A sentence with a number is hidden at one of 40 depths."""

    name = "niah"
    title = "NIAH"
    scorer = "contains"
    where = "a text such as Paul Graham's essays or articles of WikiText"
    aggregate = Aggregate.MEAN
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=ANSWER_TOKENS)
    scores_truncated = True

    def generate(self, options: TaskOptions, tokens: TokenCounter) -> Iterator[Row]:
        """Yield prompts that fill `options.context_length` tokens together with their answers."""
        if options.haystack is None:
            raise EvaluationError(f"task niah: needs task.haystack=FILE, {self.where}")
        words, size = read_words(Path(options.haystack)), None
        for needle in needles(options.count, options.seed):
            size = _words_that_fit(words, needle, options.context_length, tokens, near=size)
            context = hidden(cycled(words, size), needle)
            yield {"context": context, "query": needle.key, **needle._asdict()}

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `context`, `query`, `value` and `depth`."""
        return Document(
            id=str(row["number"] - 1),
            question=row["context"],
            gold=(str(row["value"]),),
            details={"query": row["query"], "depth": row["depth"]},
        )

    def messages(self, document: Document) -> Messages:
        """Return RULER's template for one key and one value."""
        return _messages(document.question, document.details["query"])


class Needle(NamedTuple):
    """Hidden sentence.

    Attributes:
        key: An adjective and a noun.
        value: A number of seven digits.
        depth: Share of the sentences before the needle, in percent.
    """

    key: str
    value: str
    depth: int


def needles(count: int, seed: int) -> Iterator[Needle]:
    """Draw needles; no key and no number occurs twice.

    Raises:
        EvaluationError: There are not as many keys.
    """
    words = _key_words()
    adjectives, nouns = words["adjectives"], words["nouns"]
    most = len(adjectives) * len(nouns)
    if count > most:
        raise EvaluationError(f"task niah: task.count={count}: only {most} keys exist; lower it")
    rng = random.Random(seed)
    keys = unlike(lambda r: f"{r.choice(adjectives)}-{r.choice(nouns)}", rng)
    values = unlike(lambda r: str(r.randint(1_000_000, 9_999_999)), rng)
    for _ in range(count):
        yield Needle(next(keys), next(values), rng.choice(DEPTHS))


@cache
def _key_words() -> dict[str, list[str]]:
    text = files("dms_train").joinpath(_WORDS).read_text(encoding="utf-8")
    words: dict[str, list[str]] = json.loads(text)
    return words


def hidden(text: str, needle: Needle) -> str:
    """Return a text with the needle between two of its sentences."""
    all_sentences = sentences(text) if text else []
    line = f"One of the special magic numbers for {needle.key} is: {needle.value}."
    at = int(len(all_sentences) * needle.depth / 100)
    return " ".join([*all_sentences[:at], line, *all_sentences[at:]])


def _words_that_fit(
    words: list[str], needle: Needle, length: int, tokens: TokenCounter, near: int | None
) -> int:
    """Return the most words with which prompt and answer have at most `length` tokens."""

    def prompt_tokens(size: int) -> int:
        return tokens(_messages(hidden(cycled(words, size), needle), needle.key))

    return largest_fit(prompt_tokens, length - ANSWER_TOKENS, "niah", near)


def _messages(context: str, query: str) -> Messages:
    return Messages(
        user="A special magic number is hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the number afterwards.\n{context}\n"
        f"What is the special magic number for {query} mentioned in the provided text?",
        answer_prefix=f" The special magic number for {query} mentioned in the provided text is",
    )
