"""Samples are the documents' tokens, in an order that seed and settings fix."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dms_train.data.errors import DataError
from dms_train.data.manifest import Source
from dms_train.data.options import DataOptions
from dms_train.data.tokens import TokenSamples, build_datasets
from dms_train.data.writer import ShardWriter

SEQ, VOCAB_SIZE, EOD_ID = 16, 61, 0

MakeShard = Callable[..., str]


def build(tmp_path: Path, *paths: str, **changes: Any) -> tuple[Any, Any]:
    requested: dict[str, Any] = {"train_samples": 30, "valid_samples": 4, "seed": 7}
    requested.update({name: changes.pop(name) for name in list(changes) if name in requested})
    settings: dict[str, Any] = {
        "paths": paths,
        "split": "80,20,0",
        "seq_length": SEQ,
        "micro_batch_size": 1,
        "global_batch_size": 1,
    }
    options = DataOptions(**{**settings, **changes})
    return build_datasets(
        options, vocab_size=VOCAB_SIZE, eod_id=EOD_ID, cache_dir=tmp_path / "cache", **requested
    )


def rows(samples: TokenSamples) -> torch.Tensor:
    return torch.stack([samples[i].tokens for i in range(len(samples))])


def stream_windows(prefix: str, start: int, stop: int) -> set[tuple[int, ...]]:
    """Every window inside one document, for a test of origin."""
    documents = IndexedDataset(prefix)
    return {
        tuple(documents[i][j : j + 4].tolist())
        for i in range(start, stop)
        for j in range(len(documents[i]) - 3)
    }


def test_samples_have_shifted_labels_and_full_masks(tmp_path: Path, make_shard: MakeShard) -> None:
    train, valid = build(tmp_path, make_shard())
    assert (len(train), len(valid)) == (30, 4)
    for i in range(len(train)):
        sample = train[i]
        assert sample.tokens.shape == sample.labels.shape == sample.loss_mask.shape == (SEQ,)
        assert sample.tokens.dtype == sample.labels.dtype == torch.int64
        assert torch.equal(sample.tokens[1:], sample.labels[:-1])
        assert sample.loss_mask.eq(1).all()


def masked_shard(tmp_path: Path, name: str, first: int, *, masked: bool) -> str:
    """Documents of tokens from `first` on; with masks, even tokens count and odd ones do not."""
    draw = torch.Generator().manual_seed(first)
    prefix = tmp_path / name
    with ShardWriter(
        prefix,
        vocab_size=VOCAB_SIZE,
        eod_id=None,
        tokenizer_sha256="a" * 64,
        loss_mask=masked,
        overwrite=False,
    ) as writer:
        for _ in range(40):
            length = int(torch.randint(3, 60, (), generator=draw))
            tokens = torch.randint(first, first + 20, (length,), generator=draw).int().numpy()
            writer.add(tokens, (tokens % 2 == 0).astype("uint8") if masked else None)
        writer.finish((Source(name="words", sha256="b" * 64, rows=40),))
    return str(prefix)


def test_labels_count_as_the_mask_of_their_shard_says(tmp_path: Path) -> None:
    """Over document edges, epochs, splits and blends; a shard without a mask counts whole."""
    paths = (
        masked_shard(tmp_path, "masked", 0, masked=True),
        masked_shard(tmp_path, "whole", 30, masked=False),
    )
    for chosen in (paths, paths[:1], paths[1:]):
        for samples in build(tmp_path, *chosen, train_samples=300):
            read = [samples[i] for i in range(len(samples))]
            labels = torch.stack([sample.labels for sample in read])
            expected = (labels >= 30) | (labels % 2 == 0)
            assert torch.equal(torch.stack([sample.loss_mask for sample in read]), expected.float())
            if len(samples) == 300:
                assert (labels < 30).any() == (paths[0] in chosen)
                assert (labels >= 30).any() == (paths[1] in chosen)


def test_splits_read_their_own_documents(tmp_path: Path, make_shard: MakeShard) -> None:
    prefix = make_shard(documents=40)
    _, valid = build(tmp_path, prefix)
    known = stream_windows(prefix, 32, 40)
    for row in rows(valid).tolist():
        inside = [tuple(row[j : j + 4]) for j in range(SEQ - 3) if EOD_ID not in row[j : j + 4]]
        assert set(inside) <= known


def test_same_seed_same_samples_and_other_seed_others(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    prefix = make_shard()
    first, _ = build(tmp_path, prefix)
    cached, _ = build(tmp_path, prefix)
    rebuilt, _ = build(tmp_path / "elsewhere", prefix)
    other, _ = build(tmp_path, prefix, seed=8)
    assert torch.equal(rows(first), rows(cached))
    assert torch.equal(rows(first), rows(rebuilt))
    assert not torch.equal(rows(first), rows(other))


def test_training_order_does_not_depend_on_evaluation(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    prefix = make_shard()
    with_valid, _ = build(tmp_path, prefix)
    alone, nothing = build(tmp_path, prefix, valid_samples=0)
    assert nothing is None
    assert torch.equal(rows(with_valid), rows(alone))


def test_many_epochs(tmp_path: Path, make_shard: MakeShard) -> None:
    train, _ = build(tmp_path, make_shard(documents=10), train_samples=200)
    assert rows(train).shape == (200, SEQ)


@pytest.mark.parametrize("weights", [None, (9.0, 1.0)])
def test_a_blend_has_the_requested_size(
    tmp_path: Path, make_shard: MakeShard, weights: tuple[float, ...] | None
) -> None:
    paths = (make_shard("big"), make_shard("small", documents=10, seed=1))
    train, valid = build(tmp_path, *paths, weights=weights, train_samples=300, valid_samples=3)
    again, _ = build(tmp_path, *paths, weights=weights, train_samples=300, valid_samples=3)
    assert rows(train).shape == (300, SEQ)
    assert rows(valid).shape == (3, SEQ)
    assert torch.equal(rows(train), rows(again))


def test_replaced_files_do_not_reuse_the_cached_indices(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    build(tmp_path, make_shard(documents=40))
    replaced, _ = build(tmp_path, make_shard(documents=12, seed=3))
    fresh, _ = build(tmp_path / "elsewhere", make_shard(documents=12, seed=3))
    assert torch.equal(rows(replaced), rows(fresh))


def test_eod_mask_leaves_inputs_at_document_ends_out(tmp_path: Path, make_shard: MakeShard) -> None:
    train, _ = build(tmp_path, make_shard(), eod_mask_loss=True)
    ends = 0
    for i in range(len(train)):
        sample = train[i]
        assert torch.equal(sample.loss_mask == 0, sample.tokens == EOD_ID)
        ends += int((sample.tokens == EOD_ID).sum())
    assert ends > 0


def test_a_caller_may_change_a_sample(tmp_path: Path, make_shard: MakeShard) -> None:
    train, _ = build(tmp_path, make_shard())
    train[0].loss_mask.zero_()
    assert train[1].loss_mask.eq(1).all()


def test_ranks_of_a_process_group_read_the_same_samples(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    paths = (make_shard("one"), make_shard("two", seed=1))
    alone, _ = build(tmp_path / "alone", *paths)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=build_as_rank, args=(r, tmp_path, paths)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for r in (0, 1):
        assert torch.equal(torch.load(tmp_path / f"rank{r}.pt", weights_only=True), rows(alone))


def build_as_rank(rank: int, tmp_path: Path, paths: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    train, _ = build(tmp_path, *paths)
    torch.save(rows(train), tmp_path / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 5000}, "one sample needs 5001"),
        ({"split": "100,0,0"}, "valid split has 0 tokens in 0 of 40 documents"),
        ({"split": "1e-3,1"}, "three shares"),
        ({"split": "0,0,0"}, "three shares"),
        ({"weights": (1.0, 2.0)}, "one positive number"),
        ({"weights": (0.0,)}, "one positive number"),
        ({"paths": ()}, "name at least one prefix"),
        ({"paths": ("absent",)}, "absent.manifest.json: missing"),
    ],
)
def test_unfit_settings_are_refused(
    tmp_path: Path, make_shard: MakeShard, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path, make_shard(), **changes)
    assert "\n" not in str(caught.value)


def test_shards_of_different_tokenizers_are_refused(tmp_path: Path, make_shard: MakeShard) -> None:
    paths = (make_shard("one"), make_shard("two", tokenizer="c" * 64))
    with pytest.raises(DataError, match="different tokenizers"):
        build(tmp_path, *paths)


def test_an_unusable_cache_directory_is_refused(tmp_path: Path, make_shard: MakeShard) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(DataError, match="could not build its indices"):
        build(tmp_path, make_shard())


def test_damaged_tokens_are_reported_when_read(tmp_path: Path, make_shard: MakeShard) -> None:
    prefix = make_shard()
    Path(prefix + ".bin").write_bytes(b"\xff" * Path(prefix + ".bin").stat().st_size)
    train, _ = build(tmp_path, prefix)
    with pytest.raises(DataError, match="dms-data check"):
        train[0]


def test_no_sample_beyond_the_last(tmp_path: Path, make_shard: MakeShard) -> None:
    train, _ = build(tmp_path, make_shard())
    for number in (-1, 30):
        with pytest.raises(DataError, match="no sample"):
            train[number]
