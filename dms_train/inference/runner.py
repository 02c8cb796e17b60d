"""One forward pass over several sequences: token ids in, logits and cache statistics out."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.accounting import PassCounts, TotalMeter
from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.interface import KVCache
from dms_train.inference.cache.page_slabs import PageSlabs
from dms_train.inference.cache.paged import PagedKVCache, decode_rule
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.errors import InferenceError
from dms_train.inference.graphs import DecodeGraphs
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.base import CachePolicy
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.sequence import Sequence
from dms_train.kernels.decode import kernels as decode
from dms_train.kernels.decode.paged import FP8


def build_cache(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> KVCache:
    """The empty cache that the options ask for."""
    a, device = model.architecture, torch.device(options.device)
    sizes = {"layers": a.num_layers, "rows": options.max_num_seqs, "heads": a.num_query_groups}
    if options.cache == "dense":
        like = torch.zeros(0, a.kv_channels, dtype=model.dtype, device=device)
        return DenseCache(policy, like=like, **sizes)
    if _uses_kernels(policy, options):
        slabs = PageSlabs(
            head_size=a.kv_channels,
            dtype=FP8 if options.cache_dtype == "fp8" else model.dtype,
            device=device,
            page_slots=options.page_slots,
            slab_pages=options.slab_pages,
        )
        return PagedKVCache(slabs, policy, **sizes)
    pool = PagePool(
        head_size=a.kv_channels,
        state_width=policy.state_width,
        dtype=model.dtype,
        device=device,
        page_slots=options.page_slots,
        slab_pages=options.slab_pages,
    )
    return CompactCache(pool, policy, **sizes)


def _uses_kernels(policy: CachePolicy, options: EngineOptions) -> bool:
    """Whether the fused decode kernels serve the compact cache.

    Raises:
        InferenceError: They are asked for but cannot.
    """
    obstacle = None
    if not decode.runs_on(torch.device(options.device)):
        obstacle = f"triton does not run on {options.device}"
    elif options.page_slots & (options.page_slots - 1):
        obstacle = f"page_slots={options.page_slots} is not a power of two"
    elif decode_rule(policy) is None:
        obstacle = f"the kernels do not support {type(policy).__name__}"
    wanted = options.kernels == "triton" or options.cache_dtype == "fp8"
    if wanted and (obstacle is not None or options.kernels == "reference"):
        cause = obstacle or "kernels=reference stores no fp8"
        raise InferenceError(
            f"kernels={options.kernels} cache_dtype={options.cache_dtype}: {cause}"
        )
    on_gpu = options.device.startswith("cuda") and options.kernels == "auto"
    return obstacle is None and (wanted or on_gpu)


class ModelRunner:
    """A model with its cache.

    Args:
        model: The model.
        options: How the engine is set up.
    """

    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        self.model = model
        self._device = torch.device(options.device)
        policy = build_policy(options.policy, model.spec, options.window)
        self.cache = build_cache(model, policy, options)
        self.total = TotalMeter(self.cache, torch.arange(options.max_num_seqs, device=self._device))
        self._graphs: DecodeGraphs | None = None
        if isinstance(self.cache, PagedKVCache) and self._device.type == "cuda":
            self._graphs = DecodeGraphs(model.decoder, self.cache)
        self._chunk = min(options.prefill_chunk, policy.max_chunk or options.prefill_chunk)

    @torch.no_grad()
    def step(self, sequences: list[Sequence], *, every: bool = False) -> Tensor:
        """Compute the next tokens of sequences that all have some; advances `computed`.

        Args:
            sequences: Either all prefilling or none.
            every: Return the logits of every token instead of each sequence's last.

        Returns:
            float [b, vocab], or [b, n, vocab] with padding behind shorter rows.
        """
        parts = [s.take(self._chunk) for s in sequences]
        lengths = torch.tensor([len(part) for part in parts], device=self._device)
        tokens, position = self._padded(sequences, parts)
        rows = torch.tensor([s.row for s in sequences], device=self._device)
        if self._graphs is not None and tokens.shape[1] == 1:
            hidden, reads = self._graphs.step(tokens, position, rows)
        else:
            hidden, reads = self.model.decoder(tokens, position, rows, self.cache)
        self._count(sequences, parts, rows, reads)
        if not every:
            hidden = hidden[torch.arange(len(parts), device=self._device), lengths - 1]
        return self.model.decoder.logits(hidden)

    def free(self, row: int) -> None:
        """Empty a cache row."""
        self.cache.free(torch.tensor([row], device=self._device))

    def _padded(self, sequences: list[Sequence], parts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and positions [b, n], padded at the right with 0 and -1."""
        n = max(len(part) for part in parts)
        tokens = [part + [0] * (n - len(part)) for part in parts]
        position = [
            [*range(s.computed, s.computed + len(part)), *[-1] * (n - len(part))]
            for s, part in zip(sequences, parts, strict=True)
        ]
        return (
            torch.tensor(tokens, device=self._device),
            torch.tensor(position, device=self._device),
        )

    def _count(
        self, sequences: list[Sequence], parts: list[list[int]], rows: Tensor, reads: Tensor
    ) -> None:
        counts = PassCounts(reads, self.cache.live(rows), self.cache.held_slots(rows))
        for index, (sequence, part) in enumerate(zip(sequences, parts, strict=True)):
            sequence.meter.step(counts, index, self.cache.slot_bytes, sequence.prefilling)
            sequence.computed += len(part)
        self.total.step()
