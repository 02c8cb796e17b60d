"""Every data-parallel size cuts the same microbatches from the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dms_train.data.batches import Batch, BatchSource, Sample
from dms_train.data.errors import DataError
from dms_train.data.options import DataOptions
from dms_train.data.tokens import build_datasets
from dms_train.method.documents import PackedDocuments
from tests.support import tiny

SEQ = 4


class Numbered:
    """Sample i holds the tokens i, i+1, ..."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> Sample:
        tokens = torch.arange(number, number + SEQ)
        return Sample(tokens, tokens + 1, torch.full((SEQ,), float(number % 2)))


def source(rank: int = 0, size: int = 1, micro: int = 2, total: int = 16) -> BatchSource:
    return BatchSource(
        Numbered(),
        micro_batch_size=micro,
        global_batch_size=total,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )


def groups(size: int, first: int) -> list[tuple[int, ...]]:
    """Microbatches of all ranks in global order."""
    parts = [source(rank, size).microbatches(first) for rank in range(size)]
    return [tuple(batch.samples.tolist()) for step in zip(*parts, strict=True) for batch in step]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("first", [0, 16, 32])
def test_microbatches_do_not_depend_on_the_data_parallel_size(size: int, first: int) -> None:
    assert groups(size, first) == [(i, i + 1) for i in range(first, first + 16, 2)]
    assert source(0, size).num_microbatches == 8 // size


def test_what_was_read_ahead_is_what_would_be_read() -> None:
    class Counting(Numbered):
        reads = 0

        def __getitem__(self, number: int) -> Sample:
            self.reads += 1
            return super().__getitem__(number)

    data = Counting()
    ahead = source()
    ahead._dataset = data
    ahead.read_ahead(16)
    for first, reads in ((16, 16), (16, 32), (0, 48)):  # kept once, and not for others
        found = ahead.microbatches(first)
        assert data.reads == reads
        for one, other in zip(found, source().microbatches(first), strict=True):
            assert all(torch.equal(*pair) for pair in zip(one[:4], other[:4], strict=True))
    ahead.read_ahead(16)
    for first in (0, 16):  # another global batch is read, and what was kept is forgotten
        assert ahead.microbatches(first)[0].samples[0] == first
    assert data.reads == 48 + 3 * 16
    ahead.read_ahead(48)  # past the end, as after the last step
    with pytest.raises(DataError, match="samples 48 to 63"):
        ahead.microbatches(48)


def test_batch_contents() -> None:
    batch = source(rank=1, size=2).microbatches(16)[1]
    assert isinstance(batch, Batch)
    assert batch.samples.tolist() == [22, 23]
    assert batch.tokens.tolist() == [[22, 23, 24, 25], [23, 24, 25, 26]]
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.loss_mask.tolist() == [[0.0] * SEQ, [1.0] * SEQ]
    assert batch.tokens.dtype == batch.labels.dtype == batch.samples.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32


def test_resuming_reads_what_the_first_run_would_have_read() -> None:
    steps = [source().microbatches(first) for first in (0, 16, 32)]
    resumed = source().microbatches(32)
    for expected, batch in zip(steps[2], resumed, strict=True):
        assert torch.equal(expected.tokens, batch.tokens)


@pytest.mark.parametrize("first", [-1, 33, 48])
def test_samples_past_the_end_are_refused(first: int) -> None:
    with pytest.raises(DataError, match="built with 48"):
        source().microbatches(first)


@pytest.mark.parametrize(
    ("rank", "size", "micro", "total"),
    [(0, 1, 3, 16), (0, 3, 2, 16), (2, 2, 2, 16), (-1, 2, 2, 16), (0, 0, 2, 16), (0, 1, 0, 16)],
)
def test_layouts_that_do_not_divide_are_refused(
    rank: int, size: int, micro: int, total: int
) -> None:
    with pytest.raises(ValueError, match=r"multiple|not below|at least 1"):
        source(rank, size, micro, total)


def test_real_token_files(tmp_path: Path, make_shard: Callable[..., str]) -> None:
    options = DataOptions(
        paths=(make_shard(),), seq_length=16, micro_batch_size=2, global_batch_size=4
    )
    train, _ = build_datasets(
        options,
        vocab_size=61,
        eod_id=0,
        train_samples=12,
        valid_samples=0,
        seed=1,
        cache_dir=tmp_path / "cache",
    )
    assert train is not None
    parts = [
        BatchSource(
            train,
            micro_batch_size=2,
            global_batch_size=4,
            data_parallel_rank=rank,
            data_parallel_size=2,
        )
        for rank in (0, 1)
    ]
    rows = torch.cat([part.microbatches(8)[0].tokens for part in parts])
    assert torch.equal(rows, torch.stack([train[i].tokens for i in range(8, 12)]))


def test_a_batch_is_cut_to_its_first_positions() -> None:
    batch = tiny.batch(0, size=3, length=12)
    cut = batch.first(2, 5)
    assert torch.equal(cut.tokens, batch.tokens[:2, :5])
    assert torch.equal(cut.labels, batch.labels[:2, :5])
    assert torch.equal(cut.loss_mask, torch.ones(2, 5))  # also where the batch masks its loss
    assert cut.samples.tolist() == [0, 1]
    assert cut.documents is None


def test_packed_documents_are_cut_at_the_end_and_padding_counts_in_no_loss() -> None:
    batch = tiny.packed(tiny.batch(0, size=2, length=12), [[4, 6, 2], [1, 2]])
    cut = batch.first(2, 5)
    expected = PackedDocuments.of([torch.tensor([4, 1]), torch.tensor([1, 2])], 5)
    assert cut.documents is not None
    for name in ("cu_seqlens", "first", "end", "tokens", "dense_reads"):
        assert torch.equal(getattr(cut.documents, name), getattr(expected, name)), name
    assert cut.loss_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    alone = batch.first(1, 12)
    assert alone.documents is not None
    assert alone.documents.tokens.tolist() == [12]
