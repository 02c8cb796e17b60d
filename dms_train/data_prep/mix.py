"""One shard blended from several, without repeating a document."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dms_train.data.errors import DataError
from dms_train.data.manifest import Manifest, Source, check_bin_hash, origins_of
from dms_train.data.origins import Origin, taken
from dms_train.data.reader import ShardReader
from dms_train.data.writer import ShardWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One input of a blend.

    Attributes:
        prefix: Prefix of the shard.
        weight: Share of the tokens, relative to the other weights; None takes the whole shard.
    """

    prefix: Path
    weight: float | None


class _Pick(NamedTuple):
    part: int
    document: int


def mix_shards(parts: list[Part], output: Path, *, seed: int, overwrite: bool) -> Manifest:
    """Blend shards.

    With weights, the blend ends when any shard has no documents left. The shares of tokens then
    equal the weights up to one document of each shard. Without weights the blend holds all
    documents. In both cases the proportions hold from the beginning on, and the documents of each
    shard are shuffled.

    Args:
        parts: Inputs; either all of them have a weight or none has.
        output: Prefix of the files to write.
        seed: Seed of the order of the documents.
        overwrite: Replace an existing shard.

    Raises:
        DataError: A shard is damaged, the shards have different tokenizers or end-of-document
            tokens, or only some weights are given.
    """
    if len({part.weight is None for part in parts}) > 1:
        raise DataError("give every shard a weight (PREFIX=WEIGHT), or none of them")
    readers = [ShardReader(part.prefix) for part in parts]
    first = readers[0].manifest
    _check_together(parts, readers)
    # without weights the share of a shard is its size, so that all shards end together
    weights = [
        float(reader.manifest.tokens) if part.weight is None else part.weight
        for part, reader in zip(parts, readers, strict=True)
    ]
    documents, tokens = [0] * len(parts), [0] * len(parts)
    for part, reader in zip(parts, readers, strict=True):
        check_bin_hash(part.prefix, reader.manifest)  # the new hash would hide damage
    with ShardWriter(
        output,
        vocab_size=max(reader.manifest.vocab_size for reader in readers),
        eod_id=first.eod_id,
        tokenizer_sha256=first.tokenizer_sha256,
        loss_mask=any(reader.manifest.loss_mask is not None for reader in readers),
        overwrite=overwrite,
    ) as writer:
        for pick in _order(readers, weights, seed, all_of_them=parts[0].weight is None):
            document = readers[pick.part][pick.document]
            writer.add(*document)
            documents[pick.part] += 1
            tokens[pick.part] += len(document.tokens)
        sources = tuple(
            Source(name=part.prefix.name, sha256=reader.manifest.bin_sha256, rows=count)
            for part, reader, count in zip(parts, readers, documents, strict=True)
        )
        settings = {"command": "mix", "weights": [part.weight for part in parts]}
        return writer.finish(sources, {"settings": settings}, _origins(readers, tokens))


def _origins(readers: list[ShardReader], tokens: list[int]) -> tuple[Origin, ...]:
    """Return the origins of the tokens that were taken from each shard."""
    parts = zip(readers, tokens, strict=True)
    return tuple(
        one for reader, count in parts for one in taken(origins_of(reader.manifest), count)
    )


def _check_together(parts: list[Part], readers: list[ShardReader]) -> None:
    first = readers[0].manifest
    for part, reader in zip(parts, readers, strict=True):
        other = reader.manifest
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(
                f"{part.prefix} and {parts[0].prefix} were made with different tokenizers; "
                "make both with the model's own tokenizer"
            )
        if other.eod_id != first.eod_id:
            raise DataError(
                f"{part.prefix}: documents end in token {other.eod_id}, those of "
                f"{parts[0].prefix} in {first.eod_id}; make both with or without --append-eod"
            )


def _order(
    readers: list[ShardReader], weights: list[float], seed: int, *, all_of_them: bool
) -> Iterator[_Pick]:
    """Yield documents, each from the shard that is furthest below its share."""
    queues = []
    for number, reader in enumerate(readers):
        order = list(range(len(reader)))
        random.Random(f"{seed} {number}").shuffle(order)
        queues.append(iter(order))
    tokens = [0] * len(readers)
    left = set(range(len(readers)))
    while left:
        part = min(left, key=lambda number: (tokens[number] / weights[number], number))
        document = next(queues[part], None)
        if document is None:
            if not all_of_them:
                return
            left.remove(part)
            continue
        tokens[part] += int(readers[part].lengths[document])
        yield _Pick(part, document)
