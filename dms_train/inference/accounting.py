"""Cache statistics: reads, tokens and bytes, of one request and of an engine.

`cr_factor` is tokens seen over tokens held, as in `method.accounting`. Token counts are averaged
over layers and KV heads, so that a model without compression reads t + 1 at position t. A token
that several sequences share counts for each of them; the bytes allocated count it once.

Shape letters: l layers, h KV heads, b sequences, k decode steps.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from dms_train.inference.cache.interface import KVCache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVTrace:
    """What a continuation had cost when each of its g tokens was generated.

    Attributes:
        kv_reads: float64 [g], `RequestKV.kv_reads` by then; the first token costs none.
        live_tokens: float64 [g], tokens held then.
    """

    kv_reads: Tensor
    live_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestKV:
    """The cache of one request so far, at its end when it finished.

    Attributes:
        tokens: Tokens seen, evicted ones included.
        cached_tokens: Prompt tokens that a snapshot held, so that they were not computed.
        kv_reads: Slots attended, summed over the decode steps.
        prefill_reads: Slots attended, summed over the prompt's queries.
        live_tokens: Tokens held.
        peak_live_tokens: Most tokens held after any forward pass.
        live_bytes: Of the tokens held, all layers and heads.
        peak_live_bytes: Most of them.
        allocated_bytes: Of the slots reserved for them.
        peak_allocated_bytes: Most of them.
        cr_factors: float64 [l, h], tokens seen over tokens held.
        trace: The costs at each generated token; None unless asked for.
    """

    tokens: int
    cached_tokens: int
    kv_reads: float
    prefill_reads: float
    live_tokens: float
    peak_live_tokens: float
    live_bytes: int
    peak_live_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    cr_factors: Tensor
    trace: KVTrace | None = None

    @property
    def cr_factor(self) -> float:
        """Tokens seen over mean tokens held."""
        return self.tokens / self.live_tokens if self.live_tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TotalKV:
    """All requests of an engine together.

    Attributes:
        requests: Finished ones; each of `n` continuations counts.
        tokens: Tokens seen by them.
        kv_reads: As in `RequestKV`, summed.
        prefill_reads: Likewise.
        peak_live_tokens: Most tokens held at the same time.
        live_bytes: Of tokens held now.
        peak_live_bytes: Most of them.
        allocated_bytes: Of the memory that holds tokens now, page tables included.
        peak_allocated_bytes: Most of them.
        cr_factors: float64 [l, h], tokens seen over tokens held when requests finished.
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

    @property
    def cr_factor(self) -> float:
        """Tokens seen over mean tokens held."""
        return 1.0 / (1.0 / self.cr_factors).mean().item()


class PassCounts:
    """Cache reads and contents of one forward pass, copied to the host at once.

    Attributes:
        live: Tokens held afterwards, [l, b, h] on the CPU.
        sums: Slots attended, tokens held and slots reserved of each sequence, over its l * h KV
            lists.
    """

    def __init__(self, reads: Tensor, live: Tensor, held: Tensor) -> None:
        """All integers [l, b, h] of one type."""
        both = torch.stack([reads, live, held]).cpu()
        self.live = both[1]
        self.sums: list[list[int]] = both.sum((1, 3)).T.tolist()


class GroupCounts:
    """The same of a group of decode steps.

    Attributes:
        live: Tokens held after each step, [k, l, b, h] on the CPU.
        reads: Slots attended by each sequence up to each step, [k][b], over its KV lists.
        held: Tokens held and slots reserved after each step, [2][k][b].
        most: Most of them up to each step, [2][k][b].
    """

    def __init__(self, reads: Tensor, live: Tensor, page_slots: int) -> None:
        """From slots attended in each step and tokens held after it, integers [k, l, b, h]."""
        self.live = live
        filled = torch.maximum(reads, live)
        reserved = (filled + page_slots - 1) // page_slots * page_slots
        sums = torch.stack([reads, live, reserved]).sum((2, 4))
        self.reads: list[list[int]] = sums[0].cumsum(0).tolist()
        self.held: list[list[list[int]]] = sums[1:].tolist()
        self.most: list[list[list[int]]] = sums[1:].cummax(1).values.tolist()


class Meter:
    """Counts for one request; peaks and reads start again with `restart`.

    Attributes:
        cached_tokens: Prompt tokens that a snapshot held.
        tokens: Tokens of the request that are computed and counted.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self, *, traced: bool = False) -> None:
        """Reset reads and peaks, as at the start of another turn.

        Args:
            traced: Whether to keep the costs at each generated token.
        """
        self.cached_tokens = 0
        self._decode_reads = self._prefill_reads = 0  # over all KV lists
        self._peak = (0.0, 0, 0)
        self._last = (0.0, 0, 0)
        self.tokens = 0
        self._live = torch.zeros(0, 0)
        self._traced = traced
        self._trace = array("d"), array("d")  # reads and tokens held at each generated token

    @property
    def live_tokens(self) -> float:
        """Tokens held after the last forward pass."""
        return self._last[0]

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
            counts: Of all sequences of the pass.
            index: Which of them this request is.
            tokens: Tokens of the request that are computed now.
            slot_bytes: Bytes of one slot.
            prefill: Whether the pass computed prompt tokens.
            generates: Whether a token is sampled behind it.
        """
        self.tokens = tokens
        reads, live, held = counts.sums[index]
        self._live = counts.live[:, index]
        if prefill:
            self._prefill_reads += reads
        else:
            self._decode_reads += reads
        if self._traced and generates:
            self._note(self._decode_reads, live)
        self._last = self._contents(live, held, slot_bytes)
        self._raise_peak(self._last)

    def decode(
        self,
        counts: GroupCounts,
        index: int,
        *,
        steps: int,
        tokens: int,
        slot_bytes: int,
        prefill: bool,
    ) -> None:
        """Count the first steps of a group, of which each generates a token.

        Args:
            counts: Of all sequences of the group.
            index: Which of them this request is.
            steps: How many count, at least 1.
            tokens: Tokens of the request that are computed after these.
            slot_bytes: Bytes of one slot.
            prefill: Whether the first step computed a prompt token.
        """
        self.tokens, last = tokens, steps - 1
        self._live = counts.live[last, :, index]
        of_prompt = counts.reads[0][index] if prefill else 0
        before = self._decode_reads - of_prompt
        self._prefill_reads += of_prompt
        self._decode_reads = before + counts.reads[last][index]
        if self._traced:
            for step in range(steps):
                self._note(before + counts.reads[step][index], counts.held[0][step][index])
        live, held = (part[last][index] for part in counts.held)
        self._last = self._contents(live, held, slot_bytes)
        live, held = (part[last][index] for part in counts.most)
        self._raise_peak(self._contents(live, held, slot_bytes))

    def _note(self, reads: int, live: int) -> None:
        """Keep what a generated token has cost, over all KV lists."""
        reads_until, live_then = self._trace
        reads_until.append(reads / self._live.numel())
        live_then.append(live / self._live.numel())

    def _contents(self, live: int, held: int, slot_bytes: int) -> tuple[float, int, int]:
        """Mean of the live tokens, their bytes and the bytes reserved."""
        return live / self._live.numel(), live * slot_bytes, held * slot_bytes

    def _raise_peak(self, now: tuple[float, int, int]) -> None:
        (a, b, c), (x, y, z) = self._peak, now
        self._peak = (max(a, x), max(b, y), max(c, z))

    def report(self) -> RequestKV:
        """The numbers so far."""
        kv_lists = max(1, self._live.numel())
        return RequestKV(
            tokens=self.tokens,
            cached_tokens=self.cached_tokens,
            kv_reads=self._decode_reads / kv_lists,
            prefill_reads=self._prefill_reads / kv_lists,
            live_tokens=self._last[0],
            peak_live_tokens=self._peak[0],
            live_bytes=self._last[1],
            peak_live_bytes=self._peak[1],
            allocated_bytes=self._last[2],
            peak_allocated_bytes=self._peak[2],
            cr_factors=self.tokens / self._live.double().clamp(min=1),
            trace=self._report_trace() if self._traced else None,
        )

    def _report_trace(self) -> KVTrace:
        """Copies, because the arrays grow."""
        if not self._trace[0]:
            nothing = torch.zeros(0, dtype=torch.float64)
            return KVTrace(kv_reads=nothing, live_tokens=nothing)
        reads, live = (torch.frombuffer(bytearray(x), dtype=torch.float64) for x in self._trace)
        return KVTrace(kv_reads=reads, live_tokens=live)


class TotalMeter:
    """Counts for an engine; what it keeps does not grow with the requests."""

    def __init__(self, cache: KVCache, rows: Tensor) -> None:
        self._cache, self._rows = cache, rows
        self._requests = self._tokens = 0
        self._reads = self._prefill_reads = 0.0
        self._held: Tensor | None = None  # float64 [l, h], summed over finished requests
        self._peak_tokens, self._peak_bytes = 0.0, 0

    def step(self, live: Tensor | None = None) -> None:
        """Update the peaks after a forward pass.

        Args:
            live: Tokens held after each of several steps, integers [k, l, rows, h]; None to ask
                the cache.
        """
        live = self._cache.live(self._rows)[None] if live is None else live
        total = int(live.sum((1, 2, 3)).max())
        self._peak_tokens = max(self._peak_tokens, total / (live.shape[1] * live.shape[3]))
        self._peak_bytes = max(self._peak_bytes, total * self._cache.slot_bytes)

    def finish(self, request: RequestKV) -> None:
        """Add a finished request; one without a computed token holds nothing."""
        self._requests += 1
        self._tokens += request.tokens
        self._reads += request.kv_reads
        self._prefill_reads += request.prefill_reads
        if request.tokens:
            held = request.tokens / request.cr_factors
            self._held = held if self._held is None else self._held + held

    def report(self) -> TotalKV | None:
        """The totals; None before any request with a computed token has finished."""
        if self._held is None:
            return None
        return TotalKV(
            requests=self._requests,
            tokens=self._tokens,
            kv_reads=self._reads,
            prefill_reads=self._prefill_reads,
            peak_live_tokens=self._peak_tokens,
            live_bytes=int(self._cache.live(self._rows).sum()) * self._cache.slot_bytes,
            peak_live_bytes=self._peak_bytes,
            allocated_bytes=self._cache.allocated_bytes,
            peak_allocated_bytes=self._cache.peak_bytes,
            cr_factors=self._tokens / self._held,
        )
