"""Write token files of tasks that draw their documents as tokens."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.word_tokenizer import EOD
from dms_train.data.errors import DataError
from dms_train.data.manifest import Manifest, file_sha256
from dms_train.data.writer import ShardWriter
from dms_train.data_prep.encode import encode_in_order
from dms_train.data_prep.progress import progress_bar
from dms_train.hf.tokenizer_files import read_tokenizer

Tokens = npt.NDArray[np.uint16]

_LENGTHS = tuple(128 << step for step in range(8))  # of the statistics: 128 to 16,384
_TRIES = 10_000  # largest number of draws for a long document


class Drawn(NamedTuple):
    """Document as drawn.

    Attributes:
        tokens: uint16 [tokens], the last one `<eod>`.
        prompt: Tokens that a model is given.
        traits: Names under which the statistics count the document.
    """

    tokens: Tokens
    prompt: int
    traits: tuple[str, ...] = ()

    @property
    def answer(self) -> npt.NDArray[np.uint8]:
        """Mask with 1 for each token after the prompt."""
        return (np.arange(len(self.tokens)) >= self.prompt).astype(np.uint8)


class TokenTask(Protocol):
    """Source of training documents; picklable and hashable."""

    def __hash__(self) -> int: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed; plain JSON values."""
        ...

    def draw(self, rng: random.Random) -> Drawn:
        """Draw one document."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """Options of one token file.

    Attributes:
        output: Prefix of the files.
        tokenizer: Directory of the tokenizer.
        documents: Number of documents.
        document_tokens: Length of every document, filled with drawn ones; None keeps drawn lengths.
        long_share: Share of the filled documents that begin with a drawn one of at least half
            their length.
        answers_only: True if the loss counts only the tokens after prompts.
        seed: Seed of all draws.
        workers: Number of processes.
        overwrite: Replace an existing shard.
    """

    output: Path
    tokenizer: Path
    documents: int
    document_tokens: int | None = None
    long_share: float = 0.0
    answers_only: bool = False
    seed: int = 0
    workers: int = 1
    overwrite: bool = False


class Tally(NamedTuple):
    """Counts of drawn documents.

    Attributes:
        lengths: Number of documents by their tokens after the prompt, rounded up to the lengths of
            `_LENGTHS`; 0 stands for more.
        traits: Number of documents with each trait.
    """

    lengths: Counter[int]
    traits: Counter[str]

    @classmethod
    def empty(cls) -> Tally:
        """Return counts of zero."""
        return cls(Counter(), Counter())

    def add(self, drawn: Drawn) -> None:
        """Count a document."""
        index = bisect_left(_LENGTHS, len(drawn.tokens) - drawn.prompt)
        self.lengths[_LENGTHS[index] if index < len(_LENGTHS) else 0] += 1
        self.traits.update(drawn.traits)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.lengths.update(other.lengths)
        self.traits.update(other.traits)


class Filled(NamedTuple):
    """Document of the token file, of one or several drawn ones.

    Attributes:
        tokens: uint16 [tokens].
        answer: uint8 [tokens], 1 for tokens after a prompt.
    """

    tokens: Tokens
    answer: npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Consecutive documents.

    Attributes:
        documents: In order.
        tally: Counts of all documents that were drawn for them.
    """

    documents: list[Filled]
    tally: Tally


class DocumentDrawer:
    """Drawer of documents; each document has its own seed, so that workers do not matter."""

    def __init__(self, task: TokenTask, shard: TokenShard) -> None:
        self._task, self._shard = task, shard

    def encode(self, chunk: list[int]) -> Batch:
        """Return the documents with these numbers."""
        tally = Tally.empty()
        return Batch([self._document(number, tally) for number in chunk], tally)

    def _document(self, number: int, tally: Tally) -> Filled:
        rng = random.Random(f"{self._shard.seed} {number}")
        size = self._shard.document_tokens
        if size is None:
            drawn = self._draw(rng, tally)
            return Filled(drawn.tokens, drawn.answer)
        first = self._draw(rng, tally)
        if rng.random() < self._shard.long_share:
            first = self._long(rng, tally, first, (size + 1) // 2)
        parts, filled = [first], len(first.tokens)
        while filled < size:
            parts.append(self._draw(rng, tally))
            filled += len(parts[-1].tokens)
        return Filled(
            np.concatenate([part.tokens for part in parts])[:size],
            np.concatenate([part.answer for part in parts])[:size],
        )

    def _long(self, rng: random.Random, tally: Tally, drawn: Drawn, fewest: int) -> Drawn:
        """Draw until a document has at least `fewest` tokens, starting with this one."""
        for _ in range(_TRIES):
            if len(drawn.tokens) >= fewest:
                return drawn
            drawn = self._draw(rng, tally)
        raise DataError(
            f"--document-tokens {self._shard.document_tokens} --long-share "
            f"{self._shard.long_share:g}: none of {_TRIES:,} drawn documents has {fewest:,} "
            "tokens; pass fewer --document-tokens or no --long-share"
        )

    def _draw(self, rng: random.Random, tally: Tally) -> Drawn:
        drawn = self._task.draw(rng)
        tally.add(drawn)
        return drawn


def write_token_shard(task: TokenTask, shard: TokenShard) -> Manifest:
    """Make one shard, showing progress on stderr.

    The manifest records the settings, and the shares of all drawn documents that end within 128,
    256 and more tokens after the prompt. It also records the share with each trait.

    Raises:
        DataError: The output exists or cannot be written, or no drawn document is long enough.
    """
    tally = Tally.empty()
    vocabulary = read_tokenizer(shard.tokenizer)
    writer = ShardWriter(
        shard.output,
        vocab_size=vocabulary.get_vocab_size(),
        eod_id=vocabulary.token_to_id(EOD),
        tokenizer_sha256=file_sha256(shard.tokenizer / "tokenizer.json"),
        loss_mask=shard.answers_only,
        overwrite=shard.overwrite,
    )
    with writer, progress_bar(shard.documents) as advance:
        for batch in _batches(task, shard):
            for document in batch.documents:
                writer.add(document.tokens.astype(np.int32), document.answer)
            tally.merge(batch.tally)
            advance(len(batch.documents), f"{tally.lengths.total()} drawn")
        settings = {
            **task.settings,
            "documents": shard.documents,
            "document_tokens": shard.document_tokens,
            "long_share": shard.long_share,
            "loss_on": "answer" if shard.answers_only else "all",
            "seed": shard.seed,
        }
        return writer.finish((), {"settings": settings, "statistics": _statistics(tally)})


def _batches(task: TokenTask, shard: TokenShard) -> Iterator[Batch]:
    make = partial(DocumentDrawer, task, shard)
    return encode_in_order(iter(range(shard.documents)), make(), make, shard.workers)


def _statistics(tally: Tally) -> dict[str, Any]:
    drawn, within, shares = tally.lengths.total(), 0, {}
    for length in _LENGTHS:
        within += tally.lengths[length]
        shares[str(length)] = round(within / drawn, 4)
    traits = {f"share_{name}": round(n / drawn, 4) for name, n in sorted(tally.traits.items())}
    return {"drawn": drawn, "share_within_tokens": shares, **traits}
