"""Training and validation samples, built by Megatron's own data sets.

Megatron concatenates the documents of a split in a shuffled order, epoch after epoch. It cuts the
stream into windows of `seq_length + 1` tokens and shuffles the windows. Documents are not kept
apart by masks: each should end in an end-of-document token. With `packing` a sample holds whole
documents instead, which are kept apart (`packed_dataset`). Labels that a shard's mask files leave
out do not count in the loss. The order depends on the data, the seed, the split, the sequence
length and the number of samples requested. A resumed run must request the same number.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from dms_train import limits
from dms_train.data.batches import Sample
from dms_train.data.errors import DataError
from dms_train.data.index_file import read_index
from dms_train.data.manifest import (
    Manifest,
    check_bin_hash,
    check_layout,
    check_run,
    check_shard,
    read_manifest,
)
from dms_train.data.masked_dataset import MaskedGPTDataset
from dms_train.data.options import DataOptions
from dms_train.data.packed_dataset import PackedGPTDataset


class TokenSamples:
    """A fixed number of samples of one split, checked as they are read."""

    def __init__(self, dataset: Any, *, samples: int, vocab_size: int, name: str) -> None:
        """Wrap a Megatron data set.

        Args:
            dataset: GPTDataset or BlendedDataset with at least `samples` samples.
            samples: Number of samples that may be read.
            vocab_size: Token ids must be below this number.
            name: Name of the data in error messages.
        """
        self._dataset = dataset
        self._samples = samples
        self._vocab_size = vocab_size
        self._name = name

    def __len__(self) -> int:
        """Return the number of samples that was requested."""
        return self._samples

    def __getitem__(self, number: int) -> Sample:
        """Read one sample; its tensors belong to the caller.

        Raises:
            DataError: The number is out of range, the read failed, or a token id lies outside the
                vocabulary.
        """
        if not 0 <= number < self._samples:
            raise DataError(f"{self._name}: no sample {number}, only {self._samples} exist")
        try:
            row = self._dataset[number]
        except (AssertionError, IndexError, OSError, ValueError) as error:
            raise DataError(f"{self._name}: sample {number} cannot be read ({error})") from error
        largest = int(torch.maximum(row["tokens"].max(), row["labels"].max()))
        smallest = int(torch.minimum(row["tokens"].min(), row["labels"].min()))
        if smallest < 0 or largest >= self._vocab_size:
            raise DataError(
                f"{self._name}: sample {number} has token ids {smallest} to {largest}, the "
                f"vocabulary ends at {self._vocab_size}; verify the files with dms-data check"
            )
        # Megatron returns its cached mask itself on the first read.
        loss_mask = row["loss_mask"].clone()
        return Sample(row["tokens"], row["labels"], loss_mask, row.get("document_lengths"))


class _Shard(NamedTuple):
    prefix: str
    manifest: Manifest


class _Vocabulary:
    """Stand-in for a tokenizer with the four attributes that Megatron's data sets read.

    The identifiers name Megatron's cached indices. They hold the shards' hashes, because Megatron
    compares only paths and would reuse the indices of files that have been replaced since.
    """

    pad = -1  # stands for no token: samples are never padded

    def __init__(self, vocab_size: int, eod_id: int, shards: list[_Shard]) -> None:
        self.vocab_size = vocab_size
        self.eod = eod_id
        self.unique_identifiers = {
            "vocab_size": vocab_size,
            "eod": eod_id,
            "shards": [shard.manifest.idx_sha256 for shard in shards],
        }


class _Builder(BlendedMegatronDatasetBuilder):
    """Megatron's builder; it can also blend without a process group."""

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build one data set; a blend without a process group keeps its index in memory.

        Megatron queries the rank before it saves that index, which needs a process group.
        """
        if cls is BlendedDataset and not torch.distributed.is_initialized():
            config = copy.copy(args[-1])
            config.path_to_cache = None
            args = (*args[:-1], config)
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            cls, is_built_on_rank, synchronize_ranks, *args
        )


def check_files(
    options: DataOptions, *, vocab_size: int, tokenizer_sha256: str | None, validates: bool
) -> None:
    """Run the checks of `build_datasets` without building anything.

    Every rank calls it, so no content is hashed (`app.inputs.verify_data` does, once for a run).

    Args:
        options: Files, blend weights, split and sequence length.
        vocab_size: Rows of the model's embedding that are real tokens.
        tokenizer_sha256: Hash of the model's `tokenizer.json`; None when the model has none.
        validates: True if validation samples will be requested.

    Raises:
        DataError: As `build_datasets`, or a file was made with another tokenizer.
    """
    _check_options(options)
    shards = [_open_shard(prefix, vocab_size, tokenizer_sha256) for prefix in options.paths]
    eod_id = shards[0].manifest.eod_id if shards else None
    _check_together(options, shards, -1 if eod_id is None else eod_id)
    shares = parse_and_normalize_split(_checked_split(options.split))
    matrix = convert_split_vector_to_split_matrix(shares)
    for split in (Split.train, Split.valid) if validates else (Split.train,):
        for prefix in options.paths:
            _split_tokens(prefix, split, matrix[split.value], options)


def build_datasets(  # noqa: PLR0913 - all named
    options: DataOptions,
    *,
    vocab_size: int,
    eod_id: int,
    train_samples: int,
    valid_samples: int,
    seed: int,
    cache_dir: str | Path,
) -> tuple[TokenSamples | None, TokenSamples | None]:
    """Build the training and validation samples; every rank must call this.

    Rank 0 builds Megatron's indices in `cache_dir`, then the others map them, so all ranks must see
    that directory. The function works with or without an initialised process group.

    Args:
        options: Files, blend weights, split and sequence length.
        vocab_size: Rows of the model's embedding that are real tokens.
        eod_id: End-of-document token, used by `options.eod_mask_loss` alone.
        train_samples: Training samples of the whole run, all epochs together; 0 for none.
        valid_samples: Validation samples; 0 for none.
        seed: Seed of all shuffling.
        cache_dir: Folder of Megatron's indices.

    Returns:
        Training and validation samples; None where none were requested.

    Raises:
        DataError: A file is missing or of another size, does not fit the model, or a split is too
            small for a single sample.
    """
    _check_options(options)
    shards = [_open_shard(prefix, vocab_size) for prefix in options.paths]
    _check_together(options, shards, eod_id)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=options.seq_length,
        blend=(list(options.paths), None),
        split=_checked_split(options.split),
        path_to_cache=str(cache_dir),
        tokenizer=_Vocabulary(vocab_size, eod_id, shards),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=options.eod_mask_loss,
        create_attention_mask=False,
    )
    train = _build_split(config, Split.train, train_samples, options)
    valid = _build_split(config, Split.valid, valid_samples, options)
    return train, valid


def build_valid_samples(
    options: DataOptions, *, vocab_size: int, seed: int, cache_dir: str | Path
) -> TokenSamples:
    """Build the first `options.global_batch_size` validation samples, for evaluation commands.

    Raises:
        DataError: As `build_datasets`, or a token file is damaged.
    """
    _check_options(options)
    for prefix in options.paths:
        manifest = read_manifest(prefix)
        check_shard(prefix, manifest)
        check_bin_hash(prefix, manifest)
    eod = read_manifest(options.paths[0]).eod_id
    _, valid = build_datasets(
        options,
        vocab_size=vocab_size,
        eod_id=-1 if eod is None else eod,
        train_samples=0,
        valid_samples=options.global_batch_size,
        seed=seed,
        cache_dir=cache_dir,
    )
    assert valid is not None
    return valid


def _check_options(options: DataOptions) -> None:
    """Refuse values that Python code could pass but a configuration could not."""
    problems = list(limits.wrong_types(options, "data"))
    if problems:
        raise DataError("\n".join(problems))


def _open_shard(prefix: str, vocab_size: int, tokenizer_sha256: str | None = None) -> _Shard:
    manifest = read_manifest(prefix)
    check_layout(prefix, manifest)
    check_run(manifest, vocab_size=vocab_size, tokenizer_sha256=tokenizer_sha256)
    return _Shard(prefix, manifest)


def _check_together(options: DataOptions, shards: list[_Shard], eod_id: int) -> None:
    if not shards:
        raise DataError("data.paths is empty; name at least one prefix")
    weights = options.weights
    if weights is not None and (len(weights) != len(shards) or min(weights) <= 0):
        raise DataError("data.weights needs one positive number for each of data.paths")
    for prefix, manifest in shards:
        if manifest.tokenizer_sha256 != shards[0].manifest.tokenizer_sha256:
            raise DataError(
                f"{prefix} and {shards[0].prefix} were made with different tokenizers; "
                "tokenise both with the model's own tokenizer"
            )
        if options.eod_mask_loss and manifest.eod_id != eod_id:
            raise DataError(
                f"{prefix}: its documents end in token {manifest.eod_id}, data.eod_mask_loss "
                f"expects {eod_id}; tokenise with --append-eod or turn the option off"
            )


def _checked_split(split: str) -> str:
    # Plain decimals only: Megatron would read "1e-3" as two shares.
    if not re.fullmatch(r"(\d+\.?\d*,){0,2}\d+\.?\d*", split) or not re.search("[1-9]", split):
        raise DataError(f'data.split is "{split}"; write three shares such as "98,2,0"')
    return split


def _build_split(
    config: GPTDatasetConfig, split: Split, samples: int, options: DataOptions
) -> TokenSamples | None:
    if samples == 0:
        return None
    config = copy.copy(config)
    share = config.split_matrix[split.value]
    # A split that is None is not built; Megatron never returns from building an empty one.
    config.split_matrix = [share if other is split else None for other in Split]
    prefixes = config.blend[0]
    tokens = [_split_tokens(prefix, split, share, options) for prefix in prefixes]
    if len(prefixes) > 1:
        # Without weights Megatron would give one epoch at most.
        blend = [float(weight) for weight in options.weights or tokens]
        config.blend = (prefixes, blend)
        config.mid_level_dataset_surplus = _surplus(blend, samples)
    name = f"{split.name} data of {', '.join(prefixes)}"
    sizes = [samples if other is split else 0 for other in Split]
    try:
        kind = PackedGPTDataset if options.packing else MaskedGPTDataset
        dataset = _Builder(kind, sizes, _on_every_rank, config).build()[split.value]
    except Exception as error:  # Megatron raises bare exceptions here
        raise DataError(
            f"{name}: Megatron could not build its indices ({error}); "
            f"empty {config.path_to_cache} and see that all ranks can reach and write it"
        ) from error
    vocab_size = config.tokenizer.vocab_size
    return TokenSamples(dataset, samples=samples, vocab_size=vocab_size, name=name)


def _split_tokens(
    prefix: str, split: Split, share: tuple[float, float] | None, options: DataOptions
) -> int:
    """Return the tokens of one split of one shard, by Megatron's rounding; at least one sample."""
    lengths = read_index(prefix).lengths
    start, stop = (round(bound * len(lengths)) for bound in share or (0.0, 0.0))
    tokens = int(lengths[start:stop].sum(dtype="int64"))
    if tokens <= options.seq_length:
        raise DataError(
            f"{prefix}: its {split.name} split has {tokens} tokens in {stop - start} of "
            f"{len(lengths)} documents, one sample needs {options.seq_length + 1}; use more data, "
            "another data.split or a shorter data.seq_length"
            + (", or run.eval_samples=0" if split is Split.valid else "")
        )
    if options.packing and int(lengths[start:stop].max()) < 2:
        raise DataError(
            f"{prefix}: every document of its {split.name} split is a single token, so with "
            "data.packing=true nothing can be predicted; use other data or data.packing=false"
        )
    return tokens


def _surplus(weights: list[float], samples: int) -> float:
    """Return the share of extra samples per shard that covers the rounding of a blend.

    Rounding up each shard's part lengthens the blend by at most one sample per shard. The blend
    leads its exact proportions by less than one sample per shard.
    """
    smallest = min(weights) / sum(weights)
    return len(weights) / samples * (1 + 1 / smallest)


def _on_every_rank() -> bool:
    return True
