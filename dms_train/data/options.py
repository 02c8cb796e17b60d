"""Where training tokens come from and how they are cut into batches."""

from __future__ import annotations

from dataclasses import dataclass


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
        cache_dir: Where Megatron keeps its shuffle indices.
        eod_mask_loss: Leave positions whose input is the end-of-document token out of the loss.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    split: str = "98,2,0"
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    cache_dir: str | None = None
    eod_mask_loss: bool = False
