"""Packed samples hold whole documents, each once an epoch, in an order that the seed fixes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dms_train.data import packing
from dms_train.data.batches import BatchSource, Sample
from dms_train.data.errors import DataError
from dms_train.data.manifest import Source
from dms_train.data.reader import ShardReader
from dms_train.data.tokens import TokenSamples
from dms_train.data.writer import ShardWriter
from dms_train.data_prep import prepare
from tests.support.r1_tokenizer import write_tokenizer
from tests.unit.data.test_tokens import VOCAB_SIZE, build, masked_shard

SEQ = 70
MakeShard = Callable[..., str]


def pairs(tokens: list[int], mask: list[int]) -> tuple[tuple[int, int, int], ...]:
    """(input, label, whether it counts) of a document."""
    return tuple(zip(tokens[:-1], tokens[1:], mask[1:], strict=True))


def documents_of(sample: Sample) -> list[tuple[tuple[int, int, int], ...]]:
    assert sample.document_lengths is not None
    columns = [x.int().tolist() for x in (sample.tokens, sample.labels, sample.loss_mask)]
    ends = sample.document_lengths.cumsum(0).tolist()
    return [
        tuple(zip(*(x[end - size : end] for x in columns), strict=True))
        for size, end in zip(sample.document_lengths.tolist(), ends, strict=True)
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 12))
def test_pieces_hold_every_next_token_once(tokens: list[int], length: int) -> None:
    pieces = packing.cut(np.array(tokens, dtype=np.int32), length)
    found = [
        (document, offset + i)
        for document, offset, count in zip(*(x.tolist() for x in pieces), strict=True)
        for i in range(count)
    ]
    assert found == [(d, i) for d, n in enumerate(tokens) for i in range(n - 1)]
    assert all(0 < count <= length for count in pieces.positions)


def best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """One by one, longest first, into the sequence with the least room that is enough."""
    sequences: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        rooms = [length - sum(own) for own in sequences]
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            sequences[min(fitting, key=rooms.__getitem__)].append(size)
        else:
            sequences.append([size])
    return sequences


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_an_epoch_is_packed_by_best_fit(sizes: list[int]) -> None:
    expected = sorted(sum(own) for own in best_fit(sizes, 20))
    if len(expected) == 1:
        return  # the next epoch fills it
    made = packing.pack(np.array(sizes), 20, seed=0, count=1)
    found = sorted(sum(sizes[piece] for piece in made.of(n)) for n in range(len(made)))
    assert found == expected[1:]  # the emptiest one waits


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_epochs_hold_each_piece_once_and_do_not_depend_on_the_count(
    sizes: list[int], seed: int
) -> None:
    made = packing.pack(np.array(sizes), 9, seed=seed, count=30)
    assert len(made) >= 30
    assert all(sum(sizes[piece] for piece in made.of(n)) <= 9 for n in range(len(made)))
    fewer = packing.pack(np.array(sizes), 9, seed=seed, count=7)
    assert len(fewer) >= 7
    for number in range(len(fewer)):
        assert fewer.of(number).tolist() == made.of(number).tolist()
    taken = Counter(made.pieces.tolist())
    waiting = [size * (max(taken.values()) - taken[piece]) for piece, size in enumerate(sizes)]
    assert sum(waiting) <= 9  # in the sequence that the next epoch fills


def test_long_documents_waste_little() -> None:
    lengths = np.random.RandomState(0).lognormal(7, 1, 5000).astype(int) + 2
    pieces = packing.cut(lengths, 8192)
    made = packing.pack(pieces.positions, 8192, seed=0, count=1)
    assert pieces.positions[made.pieces].sum() > 0.98 * len(made) * 8192


def test_other_seeds_give_other_sequences() -> None:
    sizes = np.arange(1, 30)
    first, again, other = (packing.pack(sizes, 40, seed=s, count=20) for s in (3, 3, 4))
    assert first.pieces.tolist() == again.pieces.tolist()
    assert first.pieces.tolist() != other.pieces.tolist()


def read(samples: TokenSamples) -> list[Sample]:
    return [samples[number] for number in range(len(samples))]


@pytest.mark.parametrize("masked", [True, False])
def test_samples_hold_the_documents_of_their_split_with_their_mask(
    tmp_path: Path, masked: bool
) -> None:
    prefix = masked_shard(tmp_path, "shard", 3, masked=masked)
    documents = [pairs(d.tokens.tolist(), d.mask.tolist()) for d in ShardReader(prefix)]
    for samples, known in zip(
        build(tmp_path, prefix, seq_length=SEQ, packing=True, valid_samples=9),
        (documents[:32], documents[32:]),
        strict=True,
    ):
        found = Counter(text for sample in read(samples) for text in documents_of(sample))
        assert set(found) == set(known)
        assert max(found.values()) - min(found.values()) <= 2  # the last epoch is begun
        for sample in read(samples):
            assert sample.document_lengths is not None
            end = int(sample.document_lengths.sum())
            assert SEQ // 2 < end <= SEQ
            assert not any(x[end:].any() for x in sample[:3])
            kinds = [torch.int64, torch.int64, torch.float32, torch.int64]
            assert [x.dtype for x in sample] == kinds


def test_documents_of_a_sample_are_samples(tmp_path: Path, make_shard: MakeShard) -> None:
    samples, _ = build(tmp_path, make_shard(), seq_length=SEQ, packing=True)
    sample = samples[0]
    texts = [text for one in sample.documents() for text in (one.tokens, one.labels)]
    expected = [
        torch.tensor(x[:2]) for x in (list(zip(*d, strict=True)) for d in documents_of(sample))
    ]
    for number, pair in enumerate(expected):
        assert torch.equal(torch.stack(texts[2 * number : 2 * number + 2]), pair)
    alone, _ = build(tmp_path, make_shard(), seq_length=16)
    assert len(alone[0].documents()) == 1


def test_longer_documents_are_cut(tmp_path: Path, make_shard: MakeShard) -> None:
    prefix = make_shard()
    samples, _ = build(tmp_path, prefix, seq_length=16, packing=True, train_samples=500)
    texts = [d.tokens.tolist() for d in ShardReader(prefix)]
    whole = {pair for text in texts for pair in pairwise(text)}
    lengths = torch.cat([s.document_lengths for s in read(samples)])
    assert lengths.max() == 16
    found = {pair[:2] for s in read(samples) for text in documents_of(s) for pair in text}
    assert found <= whole


def test_more_samples_and_blends_keep_the_order(tmp_path: Path, make_shard: MakeShard) -> None:
    """A run that resumes reads what it would have read; weights are shares of the samples."""
    one, two = make_shard("one"), make_shard("two", seed=1)
    few, _ = build(tmp_path, one, seq_length=SEQ, packing=True, train_samples=20)
    many, _ = build(tmp_path / "b", one, seq_length=SEQ, packing=True, train_samples=90)
    assert all(torch.equal(few[n].tokens, many[n].tokens) for n in range(20))
    known = {pairs(d.tokens.tolist(), d.mask.tolist()) for d in ShardReader(one)}
    blend: dict[str, Any] = {"seq_length": SEQ, "packing": True, "weights": (3.0, 1.0)}
    blended, _ = build(tmp_path / "c", one, two, train_samples=40, **blend)
    again, _ = build(tmp_path / "d", one, two, train_samples=40, **blend)
    from_one = [documents_of(sample)[0] in known for sample in read(blended)]
    assert sum(from_one) == 30
    assert all(
        torch.equal(a.tokens, b.tokens) for a, b in zip(read(blended), read(again), strict=True)
    )


def test_the_end_of_document_token_is_masked_as_an_input(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    """Documents of several texts: only the last end-of-document token is never an input."""
    options = {"seq_length": SEQ, "packing": True, "eod_mask_loss": True}
    prefix = tmp_path / "texts"
    with ShardWriter(prefix, vocab_size=VOCAB_SIZE, eod_id=0, tokenizer_sha256="a" * 64) as writer:
        for number in range(40):
            writer.add(np.array([5, 0, number + 7, 0], dtype=np.int32))
        writer.finish((Source(name="words", sha256="b" * 64, rows=40),))
    samples, _ = build(tmp_path, str(prefix), **options, valid_samples=0)
    for sample in read(samples):
        for text in documents_of(sample):
            assert [counts for _, _, counts in text] == [1, 0, 1]


def test_ranks_share_the_packed_samples(tmp_path: Path, make_shard: MakeShard) -> None:
    samples, _ = build(tmp_path, make_shard(), seq_length=SEQ, packing=True)

    def batches(rank: int, size: int) -> list[Any]:
        source = BatchSource(
            samples,
            micro_batch_size=2,
            global_batch_size=8,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        return source.microbatches(8)

    alone = batches(0, 1)
    shared = [batch for step in zip(batches(0, 2), batches(1, 2), strict=True) for batch in step]
    for whole, part in zip(alone, shared, strict=True):
        assert torch.equal(whole.tokens, part.tokens)
        assert torch.equal(whole.documents.cu_seqlens, part.documents.cu_seqlens)
    first = alone[0]
    ends = [samples[8].document_lengths.cumsum(0).tolist()]
    ends.append([SEQ + end for end in samples[9].document_lengths.cumsum(0).tolist()])
    bounds = sorted({0, SEQ, 2 * SEQ, *ends[0], *ends[1]})
    assert first.documents.cu_seqlens.tolist() == bounds


def test_the_sample_of_reasoning_traces_leaves_little_padding(
    tmp_path: Path, real_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    shard, rows = str(tmp_path / "openr1"), str(real_data / "openr1-sample.jsonl")
    words = ["openr1", rows, "--tokenizer", str(tmp_path / "tokenizer"), "--append-eod"]
    assert prepare.main([*words, "--output", shard]) == 0
    assert prepare.main(["packing", shard, "--seq-length", "8192"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"25 documents, 0 of them cut, 0 left out; .* ([\d.]+)% padding", line)
    assert found is not None
    assert float(found[1]) < 2.0


def test_single_tokens_are_left_out_and_refused_alone(tmp_path: Path) -> None:
    def shard(name: str, lengths: list[int]) -> str:
        with ShardWriter(
            tmp_path / name, vocab_size=VOCAB_SIZE, eod_id=None, tokenizer_sha256="a" * 64
        ) as writer:
            for length in lengths:
                writer.add(np.full(length, 9, dtype=np.int32))
            writer.finish((Source(name="words", sha256="b" * 64, rows=len(lengths)),))
        return str(tmp_path / name)

    samples, _ = build(tmp_path, shard("some", [1, 5] * 40), seq_length=8, packing=True)
    assert {int(n) for s in read(samples) for n in s.document_lengths} == {4}
    with pytest.raises(DataError, match=r"every document of its train split is a single token"):
        build(tmp_path, shard("single", [1] * 80), seq_length=8, packing=True)
