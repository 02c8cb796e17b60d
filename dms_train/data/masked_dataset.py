"""Megatron's samples with the loss mask of their shard."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dms_train.data.manifest import mask_prefix, read_manifest


class MaskedGPTDataset(GPTDataset):
    """GPTDataset with a loss mask from the mask files of its shard.

    The mask files hold documents of the same lengths, so one index addresses tokens and masks.
    Without mask files every label counts in the loss.

    Args:
        indexed_dataset: The tokens.
        dataset_path: Prefix of the shard.
        *args: As of GPTDataset.
    """

    def __init__(self, indexed_dataset: IndexedDataset, dataset_path: str, *args: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *args)
        self._masks: GPTDataset | None = None
        if read_manifest(dataset_path).loss_mask is not None:
            self._masks = copy.copy(self)
            self._masks.dataset = IndexedDataset(str(mask_prefix(dataset_path)))

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return a sample of GPTDataset with the mask of its labels."""
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)
        if self._masks is None or idx is None:
            return sample
        mask, _ = self._masks._query_document_sample_shuffle_indices(idx)
        counted = sample["loss_mask"] * torch.from_numpy(mask[1:]).float()
        return {**sample, "loss_mask": counted}
