"""Samples of whole documents that do not attend to each other."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dms_train.data import packing
from dms_train.data.manifest import mask_prefix, read_manifest


class PackedGPTDataset(GPTDataset):
    """Samples that `packing.pack` makes from one split of one shard.

    Megatron's builder creates it in place of GPTDataset, divides shards into splits and blends
    them. Every process computes the sequences from the document lengths, so nothing is cached on
    disk.

    Args:
        indexed_dataset: The tokens.
        dataset_path: Prefix of the shard.
        *args: As of GPTDataset.
    """

    def __init__(self, indexed_dataset: IndexedDataset, dataset_path: str, *args: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *args)
        self._masks: IndexedDataset | None = None
        if read_manifest(dataset_path).loss_mask is not None:
            self._masks = IndexedDataset(str(mask_prefix(dataset_path)))

    def _build_document_sample_shuffle_indices(self) -> tuple[None, None, None]:
        """Do nothing; GPTDataset would build the indices of its own samples here."""
        length = self.config.sequence_length
        self._pieces = packing.cut(self.dataset.sequence_lengths[self.indices], length)
        self._sequences = packing.pack(
            self._pieces.positions, length, seed=self.config.random_seed, count=self.num_samples
        )
        return None, None, None

    def __len__(self) -> int:
        """Return the number of sequences in the requested epochs."""
        return len(self._sequences)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return one sample: tokens, labels, loss mask, and document lengths in positions.

        Padding has token 0 and does not count in the loss.
        """
        length = self.config.sequence_length
        tokens, labels = (torch.zeros(length, dtype=torch.int64) for _ in range(2))
        loss_mask = torch.zeros(length)
        chosen = self._sequences.of(0 if idx is None else idx)
        lengths = torch.from_numpy(self._pieces.positions[chosen])
        ends = lengths.cumsum(0).tolist()
        for piece, first, last in zip(chosen.tolist(), [0, *ends], ends, strict=False):
            location = self._read(piece)
            text = torch.from_numpy(self.dataset.get(*location).astype("int64"))
            tokens[first:last], labels[first:last] = text[:-1], text[1:]
            loss_mask[first:last] = 1.0
            if self._masks is not None:
                mask = self._masks.get(*location)[1:].astype("float32")
                loss_mask[first:last] = torch.from_numpy(mask)
        if self.config.eod_mask_loss:
            loss_mask[tokens == self.config.tokenizer.eod] = 0.0
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "document_lengths": lengths,
        }

    def _read(self, piece: int) -> tuple[int, int, int]:
        """Return the document, the first token and the number of tokens of a piece."""
        document, offset, positions = (int(column[piece]) for column in self._pieces)
        return int(self.indices[document]), offset, positions + 1
