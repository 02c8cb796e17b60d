"""Scheduler: decides which sequences compute how many tokens in the next step; no tensors.

A sequence waits for a batch slot and pages. Once admitted, it computes its prompt in chunks and
then one token per step, until it ends or is preempted. Preemption frees its cache, which is
computed again later with the same result (`CachePolicy.shareable` describes the exception:
conversations of several turns).

A step holds at most `max_num_batched_tokens` tokens; decoding sequences come first. Lower
priority values go first, then earlier arrivals. A decode burst plans several steps at once.

The scheduler cannot know how many pages a sequence will take, because the model decides which
tokens are evicted. It admits sequences by the measured share of tokens that survive, plus a margin.
If that estimate was too low, it preempts the most recent sequences. A step itself never runs out of
pages, because it is planned with the most pages that its tokens can take.

A sequence starts after the longest snapshot of its first tokens. Pages shared with a snapshot are
copied before they change. The further continuations of a prompt wait for the snapshot of that
prompt. A prompt also waits for another one that is about to take a snapshot of at least half of it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dms_train.inference.sequence_state import FINISHED, PREEMPTED, RUNNING, SequenceState

_MARGIN = 1.2  # factor on the pages that a sequence is expected to take
_WATERMARK = 0.01  # share of the pool that admission leaves free
_DECAY = 0.98  # weight of the earlier observations of the survival rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step and sizes of the cache.

    Attributes:
        max_num_seqs: Number of batch slots: sequences in the cache at the same time.
        max_num_batched_tokens: Most tokens of a step.
        prefill_chunk: Most tokens of one sequence in a step.
        kv_lists: KV lists of one sequence, each with its own pages: layers times KV heads.
        page_slots: Tokens that a page of one KV list holds.
        window: Number of the newest tokens of a sequence that are always kept.
        pages: Pages of the pool; None for no limit.
        decode_steps: Most steps of a decode burst.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    kv_lists: int
    page_slots: int
    window: int = 0
    pages: int | None = None
    decode_steps: int = 1

    def most_pages(self, tokens: int) -> int:
        """Return the most pages that this many more tokens of a sequence can take."""
        return self.kv_lists * -(-tokens // self.page_slots)

    def tokens_within(self, pages: int) -> int:
        """Return the most tokens of a sequence that take no more than these pages."""
        return pages // self.kv_lists * self.page_slots


State = TypeVar("State", bound=SequenceState)
StateIn = TypeVar("StateIn", bound=SequenceState, contravariant=True)


class CacheManager(Protocol[StateIn]):
    """Part of `KVCacheManager` that the scheduler calls."""

    def free_pages(self, least: int) -> float:
        """Return the number of pages that neither a batch slot nor a snapshot holds.

        Args:
            least: A lower bound is enough once it reaches this number.

        Returns:
            Infinity if the pool has no limit.
        """
        ...

    def most_copies(self, batch_slot: int, tokens: int) -> int:
        """Return the most shared pages of a batch slot that its next tokens cause to be copied.

        A single token is stored in a new page or in a copied one; that page is not counted here.
        """
        ...

    def max_tokens(self, sequence: StateIn) -> int | None:
        """Return the most tokens that the next step may compute; None for no limit."""
        ...

    def prepare_burst(self, batch_slots: list[int], steps: int, spare: float) -> int:
        """Copy shared pages, and return the most pages that decode steps take afterwards.

        Args:
            batch_slots: Batch slots that take part in every step.
            steps: Number of steps.
            spare: Most pages to copy shared pages into, so that the steps need fewer.
        """
        ...

    def free(self, batch_slot: int) -> None:
        """Free the cache of a batch slot."""
        ...

    def cached_tokens(self, sequence: StateIn) -> int:
        """Return the length of the longest snapshot that a sequence can start from."""
        ...

    def find_prefix_leader(self, sequence: StateIn) -> SequenceState | None:
        """Return an admitted sequence about to take a snapshot worth waiting for, if any."""
        ...

    def restore(self, sequence: StateIn) -> None:
        """Restore the longest snapshot, if any, and set `num_computed_tokens`."""
        ...

    def reclaim(self, keep_for: StateIn | None = None) -> bool:
        """Release the least recently used snapshot.

        Args:
            keep_for: Keep the snapshot that this sequence would start from.

        Returns:
            False if there was no snapshot to release.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Schedule(Generic[State]):
    """The next step.

    Attributes:
        batch: Sequences that take part, each with its number of tokens.
        admitted: Sequences that were given a batch slot in this step.
        preempted: Sequences whose cache was freed for others.
        ended: Sequences that the scheduler has finished. Their cache is not freed yet.
        pages: Most pages that the batch takes.
    """

    batch: list[tuple[State, int]] = field(default_factory=list)
    admitted: list[State] = field(default_factory=list)
    preempted: list[State] = field(default_factory=list)
    ended: list[State] = field(default_factory=list)
    pages: int = 0


class Scheduler(Generic[State]):
    """Scheduler that admits, orders and preempts sequences.

    Args:
        limits: Limits of the engine.
        cache_manager: Manager of the engine's cache.

    Attributes:
        limits: As given.
        cache_manager: As given.
        preemptions: Number of preemptions so far.
        survival: Measured share of the tokens beyond the window that stay in the cache.
        waiting: Sequences without a batch slot, in scheduling order.
        admitted: Sequences with a batch slot, in scheduling order; finished ones whose cache is
            kept are among them.
    """

    def __init__(self, limits: SchedulerLimits, cache_manager: CacheManager[State]) -> None:
        self.limits, self.cache_manager = limits, cache_manager
        self.preemptions = 0
        self.survival = 1.0
        self.waiting: list[State] = []
        self.admitted: list[State] = []
        self._free_batch_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._seen_tokens = self._survived_tokens = 0.0  # decayed sums beyond the window

    @property
    def free_batch_slots(self) -> list[int]:
        """Batch slots that no sequence holds, ascending."""
        return sorted(self._free_batch_slots)

    @property
    def full(self) -> bool:
        """True if every batch slot has a sequence."""
        return not self._free_batch_slots

    @property
    def has_work(self) -> bool:
        """True if a step can compute at least one token."""
        return any(s.runnable for s in self.waiting) or any(s.runnable for s in self.admitted)

    def add(self, sequence: State) -> None:
        """Queue a sequence that holds no batch slot."""
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: State) -> None:
        """Forget a sequence and free its batch slot.

        If freeing fails, the slot is not used again, because its cache is in an unknown state.
        """
        if sequence.batch_slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        batch_slot = sequence.batch_slot
        sequence.batch_slot, sequence.pages, sequence.num_computed_tokens = None, 0, 0
        self.admitted.remove(sequence)
        self.cache_manager.free(batch_slot)
        self._free_batch_slots.append(batch_slot)

    def admit(self, sequence: State) -> None:
        """Give a waiting sequence a batch slot, and restore its longest snapshot."""
        self.remove(sequence)
        sequence.batch_slot, sequence.pages = self._free_batch_slots.pop(), 0
        sequence.status = RUNNING
        insort(self.admitted, sequence, key=lambda s: s.order)
        self.cache_manager.restore(sequence)

    def observe(self, tokens: int, live: float) -> None:
        """Update `survival` from a sequence.

        Args:
            tokens: Number of its computed tokens.
            live: Number of them that are in the cache, averaged over its KV lists.
        """
        beyond_window = tokens - self.limits.window
        if beyond_window > 0:
            survived = min(beyond_window, max(0.0, live - self.limits.window))
            self._seen_tokens = _DECAY * self._seen_tokens + beyond_window
            self._survived_tokens = _DECAY * self._survived_tokens + survived
            self.survival = self._survived_tokens / self._seen_tokens

    def expected_pages(self, tokens: int) -> int:
        """Return the pages that a sequence of this length is expected to hold, plus the margin."""
        kept = min(tokens, self.limits.window)
        kept += math.ceil(self.survival * _MARGIN * (tokens - kept))
        return self.limits.most_pages(min(tokens, kept))

    def expected_growth(self, sequence: State) -> int:
        """Return the pages that a waiting sequence is expected to take beyond its shared pages.

        Pages of the window do not count as shared, because decoding soon changes them.
        """
        cached = self.cache_manager.cached_tokens(sequence)
        window = self.limits.most_pages(min(cached, self.limits.window))
        shared = max(0, self.expected_pages(cached) - window)
        return self.expected_pages(len(sequence.tokens)) - shared

    def schedule(
        self,
        now: float,
        allowed: Collection[State] | None = None,
        plan: Schedule[State] | None = None,
    ) -> Schedule[State]:
        """Plan the next step.

        Args:
            now: Seconds, on the clock of the deadlines.
            allowed: Sequences that may take part; None for all.
            plan: Empty plan to fill. If the cache raises an error, it holds the decisions so far.
                None creates a plan.

        Returns:
            The step. Its batch is empty if there is nothing to do.
        """
        step = _Step(self, allowed, Schedule() if plan is None else plan)
        step.end_overdue(now)
        step.plan_admitted()
        step.admit_waiting()
        return step.plan

    def burst_steps(self, plan: Schedule[State], decoding: Collection[State]) -> int:
        """Return the number of decode steps that sequences may take in one burst.

        Args:
            plan: The next step.
            decoding: Those of its sequences that compute one token.

        Returns:
            `SchedulerLimits.decode_steps`, or 1 if the free pages may not suffice for them.
        """
        steps = self.limits.decode_steps
        if steps == 1:
            return 1
        slots = [s.batch_slot for s in decoding if s.batch_slot is not None]
        spare = self.cache_manager.free_pages(0) - plan.pages
        others = plan.pages - self.limits.kv_lists * len(decoding)
        pages = others + self.cache_manager.prepare_burst(slots, steps, spare)
        return steps if pages <= self.cache_manager.free_pages(0) else 1


class _Step(Generic[State]):
    """Planner of one step.

    Attributes:
        plan: Decisions so far.
    """

    def __init__(
        self, scheduler: Scheduler[State], allowed: Collection[State] | None, plan: Schedule[State]
    ) -> None:
        self.plan = plan
        self._scheduler, self._limits = scheduler, scheduler.limits
        self._cache_manager = scheduler.cache_manager
        self._allowed = allowed
        self._budget = scheduler.limits.max_num_batched_tokens

    def end_overdue(self, now: float) -> None:
        """Finish the sequences whose deadline has passed."""
        known = self._scheduler.admitted + self._scheduler.waiting
        for sequence in [s for s in known if s.deadline is not None and now >= s.deadline]:
            if self._may_run(sequence):
                self._end(sequence, "timeout")

    def plan_admitted(self) -> None:
        """Plan the admitted sequences: those that decode first, then those with prompts."""
        running = [s for s in self._scheduler.admitted if self._may_run(s)]
        decoding = [s for s in running if s.num_computed_tokens >= s.prompt_end]
        prompts = [s for s in running if s.num_computed_tokens < s.prompt_end]
        for sequence in decoding + prompts:
            if sequence.batch_slot is not None:  # an earlier one may have preempted it
                self._plan_tokens(sequence)

    def admit_waiting(self) -> None:
        """Admit waiting sequences, in their order, while they are expected to fit."""
        scheduler = self._scheduler
        if scheduler.waiting and scheduler.full and not scheduler.admitted:
            raise RuntimeError("no batch slot is left, because none of them could be freed")
        if not scheduler.waiting or (scheduler.full and self._idle() is None):
            return
        reserve = _WATERMARK * (self._limits.pages or 0)
        promised = self._promised_pages()
        running = sum(self._may_run(s) for s in scheduler.admitted)
        for sequence in scheduler.waiting.copy():
            if not self._may_run(sequence) or sequence.awaits_prefix_leader:
                continue
            leader = self._cache_manager.find_prefix_leader(sequence)
            if leader is not None and self._may_run(leader):
                continue
            growth = scheduler.expected_growth(sequence)
            least = math.ceil(growth + promised + reserve)
            while self._free(least) < least and self._cache_manager.reclaim(sequence):
                pass
            burst = self._burst_growth(running + 1)
            least = math.ceil(growth + promised + max(reserve, burst))
            full = self._free(least) < least or self._budget == 0
            if (full or self.plan.preempted) and self.plan.batch:
                return
            if scheduler.full and not self._preempt(self._idle()):
                return
            self.plan.admitted.append(sequence)  # first, because `admit` may raise an error
            scheduler.admit(sequence)
            running += 1
            planned = self.plan.pages
            self._plan_tokens(sequence)
            promised += max(0, growth - (self.plan.pages - planned))

    def _burst_growth(self, sequences: int) -> float:
        """Return the pages that a burst of so many sequences is expected to take."""
        burst = self._limits.most_pages(self._limits.decode_steps)
        return burst * sequences * self._scheduler.survival

    def _free(self, least: int) -> float:
        """Return the free pages that the batch does not take; a lower bound from `least` on."""
        return self._cache_manager.free_pages(self.plan.pages + least) - self.plan.pages

    def _may_run(self, sequence: SequenceState) -> bool:
        return sequence.runnable and (self._allowed is None or sequence in self._allowed)

    def _end(self, sequence: State, reason: str) -> None:
        sequence.finish(reason)
        self.plan.ended.append(sequence)

    def _plan_tokens(self, sequence: State) -> None:
        """Add an admitted sequence to the batch, with as many tokens as there are pages for.

        If there is no page, snapshots are released and other sequences are preempted. A sequence
        ends if it holds the whole cache and needs more.
        """
        count = sequence.next_tokens(min(self._limits.prefill_chunk, self._budget))
        if count > 1:
            count = min(count, self._cache_manager.max_tokens(sequence) or count)
        if count == 0:
            return
        pages = self._most_pages(sequence, count)
        if pages > self._free(pages):
            count = self._make_room(sequence, count)
            pages = self._most_pages(sequence, count) if count else 0
        if count:
            self.plan.batch.append((sequence, count))
            self.plan.pages += pages
            self._budget -= count

    def _make_room(self, sequence: State, count: int) -> int:
        """Free pages of others, and return how many of the next `count` tokens have pages then."""
        limits = self._limits
        while not self._has_room(sequence, 1):
            if not self._cache_manager.reclaim() and not self._preempt(self._victim(sequence)):
                if self._scheduler.admitted == [sequence]:
                    self._end(sequence, "memory")
                return 0
        if not self._has_room(sequence, count):
            most = self._most_pages(sequence, count)
            spare = self._free(most) - most + limits.most_pages(count)
            count = max(1, limits.tokens_within(int(spare)))
        return count

    def _has_room(self, sequence: State, count: int) -> bool:
        """Return whether the next `count` tokens of an admitted sequence have pages."""
        for _ in range(2):  # reading the free pages can show that none is shared any more
            most = self._most_pages(sequence, count)
            if most <= self._free(most):
                return True
        return False

    def _most_pages(self, sequence: State, count: int) -> int:
        """Return the most pages that the next `count` tokens of an admitted sequence can take."""
        assert sequence.batch_slot is not None
        copies = self._cache_manager.most_copies(sequence.batch_slot, count)
        return self._limits.most_pages(count) + copies

    def _idle(self) -> State | None:
        """Return the last admitted sequence with no work and no in-flight token, if any."""
        idle = [
            s
            for s in self._scheduler.admitted
            if not self._may_run(s) and not s.num_inflight_tokens
        ]
        return max(idle, key=lambda s: s.order, default=None)

    def _victim(self, sequence: State) -> State | None:
        """Return the sequence to preempt for another one: an idle one, else the last after it."""
        planned = [s for s, _ in self.plan.batch]
        after = [
            s for s in self._scheduler.admitted if s.order > sequence.order and s not in planned
        ]
        return self._idle() or max(after, key=lambda s: s.order, default=None)

    def _preempt(self, victim: State | None) -> bool:
        """Free the cache of a sequence and queue it again; return False if there is no victim."""
        if victim is None:
            return False
        self.plan.preempted.append(victim)
        self._scheduler.preemptions += 1
        if victim.status is not FINISHED:  # a conversation between turns stays finished
            victim.status = PREEMPTED
        try:
            self._scheduler.remove(victim)
        finally:
            self._scheduler.add(victim)
        return True

    def _promised_pages(self) -> int:
        """Return the pages that admitted sequences are expected to take after this step."""
        step = {id(s): self._limits.most_pages(count) for s, count in self.plan.batch}
        return sum(
            max(0, self._scheduler.expected_pages(len(s.tokens)) - s.pages - step.get(id(s), 0))
            for s in self._scheduler.admitted
        )
