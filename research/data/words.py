"""Words of all tasks of the lab, one token each, so that one teacher can learn every task.

Every task takes its ids from here, and every shard of the lab has the same tokenizer. An id is the
index of a word in `WORDS`, so words of a further task must be appended.
"""

from __future__ import annotations

import string

from benchmarks.word_tokenizer import EOD
from research.data.token_documents import Tokens

LARGEST = 100  # largest number
MOST_MARKS = 40
OPERATORS = ("+", "-", "*", "/")
LETTERS = tuple(string.ascii_lowercase)
ADJECTIVES = ("green", "blue", "yellow", "old", "small", "warm", "quiet", "bright")
NOUNS = ("grass", "sky", "sun", "river", "bird", "stone", "road", "tree")
VERBS = ("rests", "turns", "moves", "waits", "shines", "grows", "falls", "sings")
ADVERBS = ("slowly", "always", "often", "gently", "nearby", "alone", "early", "twice")
_MARKERS = ("P", "T", "R", "ANS", *OPERATORS, "=", ":", ">", ".", "!", ",")

WORDS = (
    EOD,
    *(str(number) for number in range(LARGEST + 1)),
    *(f"#{number}" for number in range(MOST_MARKS + 1)),
    *_MARKERS,
    *LETTERS,
    *("M", "N", "V", "?", "KEY", "VAR"),
    *("the", *ADJECTIVES, *NOUNS, *VERBS, *ADVERBS),
    *("is", "here", "we", "go", "there", "and", "back", "again"),
    "E",
)

ID = {word: number for number, word in enumerate(WORDS)}
NUMBER, MARK, LETTER = ID["0"], ID["#0"], ID[LETTERS[0]]


def encoded(text: str) -> list[int]:
    """Return the token ids of words between blanks.

    Raises:
        KeyError: A word is not one of the lab's.
    """
    return [ID[word] for word in text.split()]


def decoded(tokens: Tokens) -> list[str]:
    """Return the words of token ids."""
    return [WORDS[token] for token in tokens.tolist()]
