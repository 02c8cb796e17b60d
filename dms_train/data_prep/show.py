"""Text of a shard's documents, with marks for counted tokens and document ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from dms_train.data.errors import DataError
from dms_train.data.manifest import file_sha256
from dms_train.data.reader import MaskedDocument, ShardReader
from dms_train.data_prep.encode import load_tokenizer

_GREEN, _GREY, _BOLD, _RESET = "\033[32m", "\033[90m", "\033[1m", "\033[0m"
_OPEN, _CLOSE = "⟦", "⟧"  # around counted tokens, where there are no colours
_RULE = "─" * 12


def show_documents(
    prefix: Path, tokenizer: str, *, first: int, count: int, colour: bool
) -> Iterator[str]:
    """Yield lines for `count` documents from number `first` on.

    Args:
        prefix: Prefix of the shard.
        tokenizer: Directory of the tokenizer that it was made with.
        first: Number of the first document.
        count: Largest number of documents to show.
        colour: Show counted tokens in green and others in grey, without brackets.

    Raises:
        DataError: The shard is damaged, has no such document, or was made with another tokenizer.
    """
    reader = ShardReader(prefix)
    decoder = load_tokenizer(tokenizer)
    sha256 = file_sha256(Path(tokenizer) / "tokenizer.json")
    if sha256 != reader.manifest.tokenizer_sha256:
        raise DataError(
            f"{prefix}: made with tokenizer {reader.manifest.tokenizer_sha256[:12]}, {tokenizer} "
            f"is {sha256[:12]}; give the one that it was made with"
        )
    if first >= len(reader):
        raise DataError(f"{prefix}: no document {first}, only {len(reader)} exist")
    for number in range(first, min(first + count, len(reader))):
        document = reader[number]
        yield _edge(number, document, colour=colour)
        yield _text(document, decoder, colour=colour)
    yield f"{_BOLD}{_RULE}{_RESET}" if colour else _RULE


def _edge(number: int, document: MaskedDocument, *, colour: bool) -> str:
    line = (
        f"{_RULE} document {number}: {len(document.tokens)} tokens, "
        f"{int(document.mask.sum())} in the loss {_RULE}"
    )
    return f"{_BOLD}{line}{_RESET}" if colour else line


def _text(document: MaskedDocument, decoder: Any, *, colour: bool) -> str:
    pieces = []
    pairs = zip(document.tokens.tolist(), document.mask.tolist(), strict=True)
    for counted, run in groupby(pairs, key=lambda pair: pair[1]):
        text = decoder.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        if colour:
            # repeat the colour, because a terminal may reset it at the end of a line
            start = _GREEN if counted else _GREY
            text = "\n".join(f"{start}{line}{_RESET}" for line in text.split("\n"))
        elif counted:
            text = f"{_OPEN}{text}{_CLOSE}"
        pieces.append(text)
    return "".join(pieces)
