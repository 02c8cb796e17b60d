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
from dms_train.inference.scheduler import SchedulerLimits
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
        _limit(slabs, options)
        return PagedKVCache(slabs, policy, **sizes)
    pool = PagePool(
        head_size=a.kv_channels,
        state_width=policy.state_width,
        dtype=model.dtype,
        device=device,
        page_slots=options.page_slots,
        slab_pages=options.slab_pages,
    )
    _limit(pool, options)
    return CompactCache(pool, policy, **sizes)


def _limit(pool: PagePool | PageSlabs, options: EngineOptions) -> None:
    """Keep a pool within `cache_bytes`.

    Raises:
        InferenceError: They do not hold one slab.
    """
    if options.cache_bytes is not None:
        if options.cache_bytes < pool.slab_bytes:
            raise InferenceError(
                f"cache_bytes={options.cache_bytes}: at least {pool.slab_bytes}, or choose a "
                "smaller slab_pages or page_slots"
            )
        pool.limit(options.cache_bytes // pool.slab_bytes)


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

    Attributes:
        model: As given.
        cache: Its cache.
        total: What the cache has cost so far.
        limits: What a step may take.
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
        a = model.architecture
        self.limits = SchedulerLimits(
            rows=options.max_num_seqs,
            batch_tokens=options.max_num_batched_tokens,
            chunk=min(options.prefill_chunk, policy.max_chunk or options.prefill_chunk),
            kv_lists=a.num_layers * a.num_query_groups,
            page_slots=options.page_slots,
            window=policy.window,
            pages=self.cache.max_pages,
        )

    @torch.no_grad()
    def step(self, batch: list[tuple[Sequence, int]], *, every: bool = False) -> Tensor:
        """Compute the next tokens of sequences; advances `computed` and updates `pages`.

        Args:
            batch: Sequences with rows and how many tokens each computes.
            every: Return the logits of every token instead of each sequence's last.

        Returns:
            float [b, vocab] in the order of the batch; of one sequence with `every`, [n, vocab].
        """
        found: dict[int, Tensor] = {}
        order = sorted(range(len(batch)), key=lambda i: batch[i][0].row or 0)
        for single in (True, False):  # one token each, then parts of prompts
            chosen = [i for i in order if (batch[i][1] == 1) == single]
            if chosen:
                hidden = self._forward([batch[i] for i in chosen])
                for place, i in enumerate(chosen):
                    part = hidden[place, : batch[i][1]]
                    found[i] = part if every else part[-1:]
        return self.model.decoder.logits(torch.cat([found[i] for i in range(len(batch))]))

    def free(self, row: int) -> None:
        """Empty a cache row."""
        self.cache.free(torch.tensor([row], device=self._device))

    def _forward(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """The last hidden states [b, n, hidden], with padding behind shorter sequences."""
        parts = [sequence.take(count) for sequence, count in batch]
        tokens, position = self._padded([sequence for sequence, _ in batch], parts)
        rows = torch.tensor([sequence.row for sequence, _ in batch], device=self._device)
        if self._graphs is not None and tokens.shape[1] == 1:
            hidden, reads = self._graphs.step(tokens, position, rows)
        else:
            hidden, reads = self.model.decoder(tokens, position, rows, self.cache)
        counts = PassCounts(reads, self.cache.live(rows), self.cache.held_slots(rows))
        for index, (sequence, count) in enumerate(batch):
            prompt = sequence.prefilling or count > 1
            sequence.meter.step(counts, index, self.cache.slot_bytes, prompt)
            sequence.computed += count
            sequence.pages = counts.sums[index][2] // self.limits.page_slots
        self.total.step()
        return hidden

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
