"""Options of the training tokens and their batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dms_train.limits import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Megatron `.bin/.idx` files with their manifests.

    Attributes:
        paths: Prefixes of the files (`PREFIX.bin`, `PREFIX.idx`, `PREFIX.manifest.json`).
        weights: Blend weight of each prefix; None blends by size.
        split: Train, validation and test shares of the documents.
        seq_length: Tokens per sample.
        micro_batch_size: Samples per forward pass and rank.
        global_batch_size: Samples per optimizer step over all ranks.
        cache_dir: Folder of Megatron's shuffle indices.
        eod_mask_loss: Leave positions whose input is the end-of-document token out of the loss.
        packing: Samples hold whole documents. Attention, window, decision shift and position ids
            start again at each document (Megatron's `reset_attention_mask` and
            `reset_position_ids`). Without packing, samples are cut from concatenated documents,
            which attend to each other.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    split: str = "98,2,0"
    seq_length: Annotated[int, AtLeast(1)]
    micro_batch_size: Annotated[int, AtLeast(1)]
    global_batch_size: Annotated[int, AtLeast(1)]
    cache_dir: str | None = None
    eod_mask_loss: bool = False
    packing: bool = False

    def check(self, path: str) -> Iterator[str]:
        """Report paths, weights and shares that do not form a blend."""
        if not self.paths:
            yield f"{path}.paths=[]: name at least one prefix of a .bin/.idx pair"
        if self.weights is not None:
            if len(self.weights) != len(self.paths):
                yield (
                    f"{path}.weights: {len(self.weights)} weight(s) for {len(self.paths)} path(s); "
                    "give one for each, or null to blend by size"
                )
            if not all(weight > 0 for weight in self.weights):
                yield f"{path}.weights={list(self.weights)}: use numbers above 0"
        if not _is_split(self.split):
            yield f"{path}.split={self.split}: use train,validation,test shares such as '98,2,0'"


def _is_split(text: str) -> bool:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        return False
    return len(shares) == 3 and shares[0] > 0 and min(shares) >= 0
