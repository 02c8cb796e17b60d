"""Cache statistics: reads, tokens and bytes, of one request and of an engine.

`cr_factor` is tokens seen over tokens held, as in `method.accounting`, without the layers that have
a sliding window. Other token counts are averaged over all layers and KV heads, so that a model
without compression and windows reads t + 1 at position t. A shared token counts for each sequence
that holds it, but only once in the allocated bytes.

Shape letters: l layers, h KV heads, b sequences, k decode steps, r cache rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dms_train.inference.cache.interface import KVCache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVTrace:
    """Cost of a continuation at the time when each of its g tokens was generated.

    Attributes:
        kv_reads: float64 [g], `RequestKV.kv_reads` at that time; 0 for the first token.
        live_tokens: float64 [g], tokens held at that time.
    """

    kv_reads: Tensor
    live_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestKV:
    """Cache statistics of one request so far.

    Attributes:
        tokens: Tokens seen, evicted ones included.
        cached_tokens: Prompt tokens taken from a snapshot instead of being computed.
        kv_reads: Slots attended, summed over the decode steps.
        prefill_reads: Slots attended, summed over the prompt's queries.
        live_tokens: Tokens held.
        compressed_tokens: Tokens held, averaged over the layers without a window.
        peak_live_tokens: Most tokens held after any forward pass.
        live_bytes: Bytes of the tokens held, in all layers and KV heads.
        peak_live_bytes: Largest value of `live_bytes` after any forward pass.
        allocated_bytes: Bytes of the slots reserved for these tokens.
        peak_allocated_bytes: Largest value of `allocated_bytes` after any forward pass.
        cr_factors: float64 [l, h], tokens seen over tokens held, of the layers without a window.
        trace: Cost at each generated token; None unless requested.
    """

    tokens: int
    cached_tokens: int
    kv_reads: float
    prefill_reads: float
    live_tokens: float
    compressed_tokens: float
    peak_live_tokens: float
    live_bytes: int
    peak_live_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    cr_factors: Tensor
    trace: KVTrace | None = None

    @property
    def cr_factor(self) -> float:
        """Tokens seen over mean tokens held in the layers without a window."""
        return self.tokens / self.compressed_tokens if self.compressed_tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TotalKV:
    """Cache statistics of all requests of an engine.

    Attributes:
        requests: Number of finished requests; each of `n` continuations counts.
        tokens: Tokens seen by finished requests.
        kv_reads: `RequestKV.kv_reads`, summed over finished requests.
        prefill_reads: `RequestKV.prefill_reads`, summed over finished requests.
        peak_live_tokens: Most tokens held at the same time.
        live_bytes: Bytes of the tokens held now.
        peak_live_bytes: Largest value of `live_bytes` so far.
        allocated_bytes: Bytes of the memory that holds tokens now, with page tables, and without
            states of linear attention.
        peak_allocated_bytes: Largest value of `allocated_bytes` so far.
        cr_factors: float64 [l, h], tokens seen over tokens held when requests finished, of the
            layers without a window.
        layers: Numbers of these l layers in the model, from 0.
    """

    requests: int
    tokens: int
    kv_reads: float
    prefill_reads: float
    peak_live_tokens: float
    live_bytes: int
    peak_live_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    cr_factors: Tensor
    layers: tuple[int, ...]

    @property
    def cr_factor(self) -> float:
        """Tokens seen over mean tokens held in the layers without a window."""
        return 1.0 / (1.0 / self.cr_factors).mean().item()


class PassCounts:
    """Cache reads and contents of one forward pass.

    Args:
        lists: Slots attended, tokens held afterwards and slots reserved, integers [3, l, b, h] on
            the CPU.
        layers: Layers without a window.

    Attributes:
        live: Tokens held afterwards by the layers without a window, [l, b, h].
        kv_lists: KV lists of a sequence in all layers.
        by_sequence: For each sequence, the same three numbers summed over its l * h KV lists.
    """

    def __init__(self, lists: Tensor, layers: list[int]) -> None:
        live: NDArray[Any] = lists[1].numpy()
        self.live = live if len(layers) == len(live) else live[layers]
        self.kv_lists = lists.shape[1] * lists.shape[3]
        self.by_sequence: list[list[int]] = lists.sum((1, 3)).T.tolist()


class DecodeCost(NamedTuple):
    """Cost of the tokens of one sequence in a decode burst, summed over its KV lists.

    Attributes:
        prompt_reads: Slots attended by the first step if it computes a prompt token; else 0.
        reads: Slots attended by the other steps.
        live: Tokens held at the end.
        held: Slots reserved at the end.
        most_live: Most tokens held after any step.
        most_held: Most slots reserved after any step.
        lists: Tokens held by each KV list of the layers without a window at the end, [l, h].
        steps: Slots attended up to each step of the burst, and tokens held after it, [2, k].
        kv_lists: KV lists of the sequence in all layers.
    """

    prompt_reads: int
    reads: int
    live: int
    held: int
    most_live: int
    most_held: int
    lists: NDArray[Any]
    steps: NDArray[Any]
    kv_lists: int


class BurstCounts:
    """Cache reads and contents of a decode burst, of all cache rows.

    Args:
        reads: Slots attended in each step, int32 [k, l, r, h].
        live: Tokens held after each step, int32 [k, l, r, h].
        page_slots: Slots of a page, a power of two.
        layers: Layers without a window.

    Attributes:
        most_live: Most tokens that all rows together held after a step.
    """

    def __init__(
        self, reads: NDArray[Any], live: NDArray[Any], page_slots: int, layers: list[int]
    ) -> None:
        self._live = live if len(layers) == live.shape[1] else live[:, layers]
        self._kv_lists = live.shape[1] * live.shape[3]
        held = (np.maximum(reads, live) + (page_slots - 1)) & -page_slots
        # over layers first, because that adds neighbouring numbers; int32 is wide enough
        by_row = [x.sum(1, dtype=x.dtype).sum(-1) for x in (reads, live, held)]  # [k, r] each
        self.most_live = int(by_row[1].sum(-1).max())
        peaks = [np.maximum.accumulate(x) for x in by_row[1:]]
        # reads up to each step, tokens and slots after it, and the peaks of both: [5, k, r]
        self._by_row = np.stack([by_row[0].cumsum(0), *by_row[1:], *peaks])

    def costs(
        self, rows: NDArray[Any], steps: NDArray[Any], prefill: NDArray[Any]
    ) -> list[DecodeCost]:
        """Return the cost of the first steps of sequences.

        Args:
            rows: int64 [b], cache rows of the sequences.
            steps: int64 [b], number of steps to count, at least 1.
            prefill: bool [b], True if the first step computed a prompt token.
        """
        last = steps - 1
        reads, *contents = self._by_row[:, last, rows]
        prompt_reads = self._by_row[0, 0, rows] * prefill
        numbers = np.stack([prompt_reads, reads - prompt_reads, *contents]).tolist()
        lists = self._live[last, :, rows]
        each = np.moveaxis(self._by_row[:2, :, rows], -1, 0)
        return list(map(DecodeCost, *numbers, lists, each, repeat(self._kv_lists)))


class Meter:
    """Counter of the cost of one request.

    Attributes:
        cached_tokens: Prompt tokens taken from a snapshot.
        tokens: Tokens of the request that are computed and counted.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self, *, traced: bool = False) -> None:
        """Reset reads and peaks at the start of a request or turn.

        Args:
            traced: True to keep the cost at each generated token.
        """
        self.cached_tokens = 0
        self._decode_reads = self._prefill_reads = 0  # over all KV lists
        self._peak = self._last = 0, 0  # tokens and reserved slots, over all KV lists
        self.tokens = self._slot_bytes = 0
        self._live: NDArray[Any] = np.zeros((0, 0), np.int32)
        self._kv_lists = 1
        self._traced = traced
        # at each generated token, over all KV lists
        self._trace_reads, self._trace_live = array("q"), array("q")

    @property
    def live_tokens(self) -> float:
        """Tokens held after the last forward pass."""
        return self._last[0] / self._kv_lists

    def step(
        self,
        counts: PassCounts,
        index: int,
        *,
        tokens: int,
        slot_bytes: int,
        prefill: bool,
        generates: bool,
    ) -> None:
        """Count one forward pass.

        Args:
            counts: Counts of all sequences of the pass.
            index: Index of this request among them.
            tokens: Tokens of the request that are computed after the pass.
            slot_bytes: Bytes of one slot.
            prefill: True if the pass counts as prefill.
            generates: True if a token is sampled after the pass.
        """
        self.tokens, self._slot_bytes = tokens, slot_bytes
        reads, live, held = counts.by_sequence[index]
        self._live, self._kv_lists = counts.live[:, index], counts.kv_lists
        if prefill:
            self._prefill_reads += reads
        else:
            self._decode_reads += reads
        if self._traced and generates:
            self._trace_reads.append(self._decode_reads)
            self._trace_live.append(live)
        self._last = live, held
        self._raise_peak(live, held)

    def decode(self, cost: DecodeCost, *, steps: int, tokens: int, slot_bytes: int) -> None:
        """Count the first steps of a decode burst; each of them generates a token.

        Args:
            cost: Cost of these steps.
            steps: Number of steps to count, at least 1.
            tokens: Tokens of the request that are computed after these steps.
            slot_bytes: Bytes of one slot.
        """
        self.tokens, self._slot_bytes, self._live = tokens, slot_bytes, cost.lists
        self._kv_lists = cost.kv_lists
        if self._traced:
            before = self._decode_reads - cost.prompt_reads
            reads, live = cost.steps.tolist()
            self._trace_reads.extend([before + count for count in reads[:steps]])
            self._trace_live.extend(live[:steps])
        self._prefill_reads += cost.prompt_reads
        self._decode_reads += cost.reads
        self._last = cost.live, cost.held
        self._raise_peak(cost.most_live, cost.most_held)

    def _raise_peak(self, live: int, held: int) -> None:
        most_live, most_held = self._peak
        self._peak = max(most_live, live), max(most_held, held)

    def report(self) -> RequestKV:
        """Return the statistics so far."""
        kv_lists, slot_bytes = self._kv_lists, self._slot_bytes
        return RequestKV(
            tokens=self.tokens,
            cached_tokens=self.cached_tokens,
            kv_reads=self._decode_reads / kv_lists,
            prefill_reads=self._prefill_reads / kv_lists,
            live_tokens=self._last[0] / kv_lists,
            compressed_tokens=int(self._live.sum()) / max(1, self._live.size),
            peak_live_tokens=self._peak[0] / kv_lists,
            live_bytes=self._last[0] * slot_bytes,
            peak_live_bytes=self._peak[0] * slot_bytes,
            allocated_bytes=self._last[1] * slot_bytes,
            peak_allocated_bytes=self._peak[1] * slot_bytes,
            cr_factors=torch.from_numpy(self.tokens / np.maximum(self._live, 1).astype(np.float64)),
            trace=self._report_trace() if self._traced else None,
        )

    def _report_trace(self) -> KVTrace:
        """Return a trace of copies, because the arrays continue to grow."""
        reads, live = (
            torch.from_numpy(np.array(x, np.float64) / self._kv_lists)
            for x in (self._trace_reads, self._trace_live)
        )
        return KVTrace(kv_reads=reads, live_tokens=live)


class TotalMeter:
    """Counter of the cost of all requests of an engine, in constant memory.

    Args:
        cache: The cache of the engine.
        rows: int64 [r], all rows of the cache.
        layers: Numbers of the layers without a window.
    """

    def __init__(self, cache: KVCache, rows: Tensor, layers: list[int]) -> None:
        self._cache, self._rows, self._layers = cache, rows, tuple(layers)
        num_layers, _, heads = cache.live(rows[:0]).shape
        self._kv_lists = num_layers * heads
        self._requests = self._tokens = 0
        self._reads = self._prefill_reads = 0.0
        self._held: NDArray[Any] | None = None  # float64 [l, h], summed over finished requests
        self._peak = 0  # tokens of all KV lists

    def live(self) -> Tensor:
        """Return the number of tokens that all KV lists hold now, int64 on the cache's device."""
        return self._cache.live(self._rows).sum()

    def step(self, live: int) -> None:
        """Update the peak after a forward pass or a burst that left `live` tokens in the cache."""
        self._peak = max(self._peak, live)

    def finish(self, request: RequestKV) -> None:
        """Add a finished request; the compression ratio skips requests without computed tokens."""
        self._requests += 1
        self._tokens += request.tokens
        self._reads += request.kv_reads
        self._prefill_reads += request.prefill_reads
        if request.tokens:
            held = (
                request.tokens / request.cr_factors.numpy()
            )  # numpy is quicker than torch on so few numbers
            self._held = held if self._held is None else self._held + held

    def report(self) -> TotalKV | None:
        """Return the statistics; None before any request with a computed token has finished."""
        if self._held is None:
            return None
        return TotalKV(
            requests=self._requests,
            tokens=self._tokens,
            kv_reads=self._reads,
            prefill_reads=self._prefill_reads,
            peak_live_tokens=self._peak / self._kv_lists,
            live_bytes=int(self.live()) * self._cache.slot_bytes,
            peak_live_bytes=self._peak * self._cache.slot_bytes,
            allocated_bytes=self._cache.allocated_bytes,
            peak_allocated_bytes=self._cache.peak_bytes,
            cr_factors=torch.from_numpy(self._tokens / self._held),
            layers=self._layers,
        )
