"""The words of all tasks of the lab, one token each, so that one teacher learns any of them.

Every task takes its ids from here, and every shard of the lab has the same tokenizer. Ids are the
places in `WORDS`: words of a further task come at the end.
"""

from __future__ import annotations

import string

from dms_train.data_prep.token_documents import EOD, Tokens

LARGEST = 100  # of numbers
MOST_MARKS = 40
OPERATORS = ("+", "-", "*", "/")
LETTERS = tuple(string.ascii_lowercase)
_MARKERS = ("P", "T", "R", "ANS", *OPERATORS, "=", ":", ">", ".", "!", ",")

WORDS = (
    EOD,
    *(str(number) for number in range(LARGEST + 1)),
    *(f"#{number}" for number in range(MOST_MARKS + 1)),
    *_MARKERS,
    *LETTERS,
    "M",
)

ID = {word: number for number, word in enumerate(WORDS)}
NUMBER, MARK, LETTER = ID["0"], ID["#0"], ID[LETTERS[0]]


def decoded(tokens: Tokens) -> list[str]:
    """Words of token ids."""
    return [WORDS[token] for token in tokens.tolist()]
