"""One forward pass over several sequences: token ids in, logits and cache statistics out."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from dms_train.inference.accounting import PassCounts, TotalMeter
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache_builder import build_cache, longest_sequence
from dms_train.inference.graphs import DecodeGraphs
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.scheduler import SchedulerLimits
from dms_train.inference.sequence import Sequence


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
        longest: Most tokens of a sequence.
    """

    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        self.model = model
        self._device = torch.device(options.device)
        self.longest = longest_sequence(model, options)
        policy = build_policy(options.policy, model.spec, options.window)
        self.cache = build_cache(model, policy, options)
        self.total = TotalMeter(self.cache, torch.arange(options.max_num_seqs, device=self._device))
        self._graphs: DecodeGraphs | None = None
        if isinstance(self.cache, PagedKVCache) and self._device.type == "cuda":
            self._graphs = DecodeGraphs(model.decoder, self.cache, options.max_num_seqs)
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
        # one token each, then parts of prompts
        order = sorted(range(len(batch)), key=lambda i: (batch[i][1] > 1, batch[i][0].row))
        hidden = self._forward([batch[i] for i in order])
        if not every:
            ends = list(accumulate(batch[i][1] for i in order))
            last = [end - 1 for _, end in sorted(zip(order, ends, strict=True))]
            hidden = hidden[torch.tensor(last, device=self._device)]
        return self.model.decoder.logits(hidden)

    def _forward(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """The last hidden states of all tokens, [t, hidden]; single tokens come first."""
        parts = [(s.row or 0, s.computed, s.take(count)) for s, count in batch]
        tokens = TokenBatch.ragged(parts, self._device)
        if self._graphs is not None and batch[-1][1] == 1:
            hidden, reads = self._graphs.step(tokens)
        else:
            hidden, reads = self.model.decoder(tokens, self.cache)
        rows = torch.cat([group.rows for group in tokens.groups])
        counts = PassCounts(reads, self.cache.live(rows), self.cache.held_slots(rows))
        for index, (sequence, count) in enumerate(batch):
            prompt = sequence.prefilling or count > 1
            sequence.meter.step(counts, index, self.cache.slot_bytes, prompt)
            sequence.computed += count
            sequence.pages = counts.sums[index][2] // self.limits.page_slots
        self.total.step()
        return hidden
