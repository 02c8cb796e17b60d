"""Which sequences compute how many tokens in the next step; integers only, no tensors.

A sequence waits for a cache row and pages. Once admitted it computes its prompt in chunks and then
one token a step, until it ends or is preempted: its cache is freed and computed again later, with
the same result (but see `CachePolicy.shareable` for conversations of several turns). A step holds
at most `batch_tokens` tokens, of decoding sequences first. Lower priorities go first, then earlier
arrivals. A group of steps may be planned at once, in which the same sequences decode.

How many pages a sequence will take is not known before, because the model decides what is evicted.
Sequences are admitted by the share of tokens that survived so far, with a margin; where that was
too little, the last ones are preempted. A step itself never lacks a page: it is planned with the
most that its tokens can take.

A sequence starts behind the longest snapshot of its first tokens, and pages that it shares with one
are copied before they change. The further continuations of a prompt wait for such a snapshot. So
does a prompt if another one is about to leave a snapshot of at least half of it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

_MARGIN = 1.2  # of the pages that a sequence is expected to take
_WATERMARK = 0.01  # share of the pool that admission leaves free
_DECAY = 0.98  # weight of the earlier observations of the survival rate


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """State of a sequence that the scheduler reads and sets.

    Attributes:
        arrival: Its request's number in the order of arrival.
        index: Its own number among the continuations of the request.
        priority: Lower ones go first.
        deadline: When it ends unfinished, on the clock of `Scheduler.schedule`; None for never.
        tokens: All prompts and generated tokens so far.
        prompt_end: Where the current prompt ends.
        computed: Tokens that are in the cache or were evicted from it.
        ahead: Sampled tokens behind `tokens` that are on the device only.
        limit: Tokens at which it ends; None for no limit.
        given_only: Whether all of its tokens are given. It ends when they are computed, but for the
            last one, behind which nothing follows.
        row: Cache row, or None while it has none.
        pages: Pages it holds, shared ones included.
        cuts: Numbers of tokens after which a snapshot is taken; a step ends there.
        leader: Continuation of the same prompt that computes it; None where there is no such one.
        finish_reason: Why it ended; None while it runs.
    """

    arrival: int
    index: int = 0
    priority: int = 0
    deadline: float | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_end: int = 0
    computed: int = 0
    ahead: int = 0
    limit: int | None = None
    given_only: bool = False
    row: int | None = None
    pages: int = 0
    cuts: tuple[int, ...] = ()
    leader: SequenceState | None = None
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """All tokens so far, those on the device included."""
        return len(self.tokens) + self.ahead

    @property
    def remaining(self) -> int:
        """Tokens that are not computed and have to be."""
        count = len(self.tokens)
        return count + self.ahead - (self.given_only and count > 1) - self.computed

    @property
    def runnable(self) -> bool:
        """Whether it has tokens to compute."""
        if self.finish_reason is not None or self.remaining <= 0:
            return False
        return self.limit is None or not self.ahead or self.length < self.limit

    @property
    def is_sampled(self) -> bool:
        """Whether its next token is sampled now: all others are computed."""
        return not self.remaining and not self.given_only

    @property
    def awaits_leader(self) -> bool:
        """Whether another sequence is about to compute its prompt."""
        leader = self.leader
        if leader is None or leader.finish_reason is not None:
            return False
        return leader.computed < leader.prompt_end - 1

    def next_tokens(self, most: int) -> int:
        """How many tokens a step of at most `most` computes.

        Where generated tokens are computed again, the newest one is not: it has a step of its own.
        """
        remaining = self.remaining
        if remaining <= 1:
            return min(remaining, most)
        cuts = [c for c in self.cuts if c > self.computed]
        if not self.given_only and self.computed < self.length - 1 >= self.prompt_end:
            cuts.append(self.length - 1)
        cut = min(cuts, default=self.length)
        return min(cut - self.computed, remaining, most)

    def tokens_left(self, most: int) -> int:
        """Tokens to sample up to its limit, up to `most`."""
        return most if self.limit is None else min(most, self.limit - self.length)

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller ones go first; no two sequences have the same."""
        return self.priority, self.arrival, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the steps of an engine may take.

    Attributes:
        rows: Sequences in the cache at the same time.
        batch_tokens: Tokens of a step.
        chunk: Tokens of one sequence in a step.
        kv_lists: Lists of pages of one sequence: layers times KV heads.
        page_slots: Tokens of a page of one KV list.
        window: Newest tokens of a sequence that are always kept.
        pages: Pages of the pool; None for no limit.
        decode_steps: Most steps of a group.
    """

    rows: int
    batch_tokens: int
    chunk: int
    kv_lists: int
    page_slots: int
    window: int = 0
    pages: int | None = None
    decode_steps: int = 1

    def most_pages(self, tokens: int) -> int:
        """Most pages that this many more tokens of a sequence can take."""
        return self.kv_lists * -(-tokens // self.page_slots)

    def tokens_within(self, pages: int) -> int:
        """Most tokens of a sequence that take no more than these pages."""
        return pages // self.kv_lists * self.page_slots


State = TypeVar("State", bound=SequenceState)
StateIn = TypeVar("StateIn", bound=SequenceState, contravariant=True)


class CacheMemory(Protocol[StateIn]):
    """What the scheduler asks of the cache."""

    def free_pages(self, least: int) -> float:
        """Pages that neither a row nor a snapshot holds; infinite without a limit.

        Args:
            least: Of so many pages or more, a lower bound is enough.
        """
        ...

    def most_copies(self, row: int, tokens: int) -> int:
        """Most pages of a row that are copied for its next tokens, because others hold them too.

        A single token is stored in a page that is taken or in one that is copied; that page is not
        counted here.
        """
        ...

    def max_tokens(self, sequence: StateIn) -> int | None:
        """Most tokens of a sequence that its next step may compute; None for any number."""
        ...

    def pages_of_steps(self, steps: int) -> int:
        """Most pages of a KV list that steps of one token each take or copy."""
        ...

    def free(self, row: int) -> None:
        """Empty a row."""
        ...

    def cached_tokens(self, sequence: StateIn) -> int:
        """Tokens of the longest snapshot that a sequence can start from."""
        ...

    def awaited(self, sequence: StateIn) -> SequenceState | None:
        """A sequence with a row whose next snapshot is worth waiting for; None for no such one."""
        ...

    def restore(self, sequence: StateIn) -> None:
        """Put that snapshot, if there is one, into the row of a sequence; sets `computed`."""
        ...

    def reclaim(self, keep_for: StateIn | None = None) -> bool:
        """Release the least recently used snapshot.

        Args:
            keep_for: The snapshot that this sequence would start from is kept.

        Returns:
            Whether there was one.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Schedule(Generic[State]):
    """The next step.

    Attributes:
        batch: Sequences that take part and the number of their tokens.
        placed: Sequences that were given a row.
        preempted: Sequences whose cache was freed for others.
        ended: Sequences with a `finish_reason` set by the scheduler; their cache is still theirs.
        pages: Most pages that the batch takes.
    """

    batch: list[tuple[State, int]] = field(default_factory=list)
    placed: list[State] = field(default_factory=list)
    preempted: list[State] = field(default_factory=list)
    ended: list[State] = field(default_factory=list)
    pages: int = 0


class Scheduler(Generic[State]):
    """Admits, orders and preempts sequences.

    Args:
        limits: Of the engine.
        memory: Of its cache.

    Attributes:
        limits: As given.
        memory: As given.
        preemptions: How many there were.
        survival: Measured share of the tokens behind the window that stay in the cache.
    """

    def __init__(self, limits: SchedulerLimits, memory: CacheMemory[State]) -> None:
        self.limits, self.memory = limits, memory
        self.preemptions = 0
        self.survival = 1.0
        self.waiting: list[State] = []  # without a row, in their order
        self.placed: list[State] = []  # with a row, in their order; idle ones among them
        self._free_rows = list(range(limits.rows - 1, -1, -1))
        self._seen = self._survived = 0.0

    @property
    def free_rows(self) -> list[int]:
        """Rows that no sequence has, ascending."""
        return sorted(self._free_rows)

    @property
    def full(self) -> bool:
        """Whether every row has a sequence."""
        return not self._free_rows

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return any(s.runnable for s in self.waiting) or any(s.runnable for s in self.placed)

    def add(self, sequence: State) -> None:
        """Queue a sequence without a row."""
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: State) -> None:
        """Forget a sequence, then free its row; a row that cannot be freed is not used again."""
        if sequence.row is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        row = sequence.row
        sequence.row, sequence.pages, sequence.computed = None, 0, 0
        self.placed.remove(sequence)
        self.memory.free(row)
        self._free_rows.append(row)

    def place(self, sequence: State) -> None:
        """Move a waiting sequence to a free row, behind what is cached of it."""
        self.remove(sequence)
        sequence.row, sequence.pages = self._free_rows.pop(), 0
        insort(self.placed, sequence, key=lambda s: s.order)
        self.memory.restore(sequence)

    def observe(self, tokens: int, live: float) -> None:
        """Note that `live` of a sequence's `tokens` are in the cache, mean over its KV lists."""
        behind = tokens - self.limits.window
        if behind > 0:
            survived = min(behind, max(0.0, live - self.limits.window))
            self._seen = _DECAY * self._seen + behind
            self._survived = _DECAY * self._survived + survived
            self.survival = self._survived / self._seen

    def expected_pages(self, tokens: int) -> int:
        """Pages that a sequence of this length is expected to hold, with the margin."""
        kept = min(tokens, self.limits.window)
        kept += math.ceil(self.survival * _MARGIN * (tokens - kept))
        return self.limits.most_pages(min(tokens, kept))

    def expected_growth(self, sequence: State) -> int:
        """Pages that a waiting sequence is expected to take beyond those that it can share.

        Pages of the window change while it decodes, so that they are not shared for long.
        """
        cached = self.memory.cached_tokens(sequence)
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
            plan: An empty one to fill, which has what was decided if the cache raises an error;
                None makes one.

        Returns:
            The step; its batch is empty if there is nothing to do.
        """
        step = _Step(self, allowed, Schedule() if plan is None else plan)
        step.end_late(now)
        step.extend()
        step.admit()
        return step.plan

    def group(self, plan: Schedule[State]) -> int:
        """How many steps of one token each the batch of a plan may take at once.

        That is `SchedulerLimits.decode_steps`, or 1 if pages may be lacking for as many.
        """
        steps = self.limits.decode_steps
        further = self.memory.pages_of_steps(steps) - self.memory.pages_of_steps(1)
        pages = plan.pages + further * self.limits.kv_lists * len(plan.batch)
        return steps if pages <= self.memory.free_pages(0) else 1


class _Step(Generic[State]):
    """A step while it is planned.

    Attributes:
        plan: What is decided so far.
    """

    def __init__(
        self, scheduler: Scheduler[State], allowed: Collection[State] | None, plan: Schedule[State]
    ) -> None:
        self.plan = plan
        self._scheduler, self._limits = scheduler, scheduler.limits
        self._allowed = allowed
        self._budget = scheduler.limits.batch_tokens

    def end_late(self, now: float) -> None:
        """End the sequences whose time is over."""
        known = self._scheduler.placed + self._scheduler.waiting
        for sequence in [s for s in known if s.deadline is not None and now >= s.deadline]:
            if self._may_run(sequence):
                self._end(sequence, "timeout")

    def extend(self) -> None:
        """Plan the sequences that have rows: those that decode, then those with prompts."""
        running = [s for s in self._scheduler.placed if self._may_run(s)]
        decoding = [s for s in running if s.computed >= s.prompt_end]
        prompts = [s for s in running if s.computed < s.prompt_end]
        for sequence in decoding + prompts:
            if sequence.row is not None:
                self._compute(sequence)

    def admit(self) -> None:
        """Give rows to waiting sequences, in their order, while they are expected to fit."""
        scheduler = self._scheduler
        if scheduler.waiting and scheduler.full and not scheduler.placed:
            raise RuntimeError("no cache row is left, because none of them could be freed")
        if not scheduler.waiting or (scheduler.full and self._idle() is None):
            return
        reserve = _WATERMARK * (self._limits.pages or 0)
        promised = self._promised()
        for sequence in scheduler.waiting.copy():
            if not self._may_run(sequence) or sequence.awaits_leader:
                continue
            awaited = scheduler.memory.awaited(sequence)
            if awaited is not None and self._may_run(awaited):
                continue
            growth = scheduler.expected_growth(sequence)
            least = math.ceil(growth + promised + reserve)
            while self._free(least) < least and scheduler.memory.reclaim(sequence):
                pass
            full = self._free(least) < least or self._budget == 0
            if (full or self.plan.preempted) and self.plan.batch:
                return
            if scheduler.full and not self._preempt(self._idle()):
                return
            self.plan.placed.append(sequence)  # before, as the cache may raise an error
            scheduler.place(sequence)
            planned = self.plan.pages
            self._compute(sequence)
            promised += max(0, growth - (self.plan.pages - planned))

    def _free(self, least: int) -> float:
        """Pages that nothing holds and the batch does not take; a lower bound from `least` on."""
        return self._scheduler.memory.free_pages(self.plan.pages + least) - self.plan.pages

    def _may_run(self, sequence: SequenceState) -> bool:
        return sequence.runnable and (self._allowed is None or sequence in self._allowed)

    def _end(self, sequence: State, reason: str) -> None:
        sequence.finish_reason = reason
        self.plan.ended.append(sequence)

    def _compute(self, sequence: State) -> None:
        """Add a sequence with a row to the batch, with as many tokens as there are pages for.

        Snapshots are released and others are preempted if there is no page otherwise. A sequence
        for which the whole cache is too small ends.
        """
        count = sequence.next_tokens(min(self._limits.chunk, self._budget))
        if count > 1:
            count = min(count, self._scheduler.memory.max_tokens(sequence) or count)
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
        """How many of the next tokens there are pages for, once others have given up theirs."""
        limits, memory = self._limits, self._scheduler.memory
        while (least := self._most_pages(sequence, 1)) > self._free(least):
            if not memory.reclaim() and not self._preempt(self._victim(sequence)):
                if self._scheduler.placed == [sequence]:
                    self._end(sequence, "memory")
                return 0
        most = self._most_pages(sequence, count)
        if most > self._free(most):
            spare = self._free(most) - most + limits.most_pages(count)
            count = max(1, limits.tokens_within(int(spare)))
        return count

    def _most_pages(self, sequence: State, count: int) -> int:
        """Most pages that the next tokens of a sequence with a row can take."""
        assert sequence.row is not None
        copies = self._scheduler.memory.most_copies(sequence.row, count)
        return self._limits.most_pages(count) + copies

    def _idle(self) -> State | None:
        """The last sequence with a row that has nothing to do and awaits no token, if any."""
        idle = [s for s in self._scheduler.placed if not self._may_run(s) and not s.ahead]
        return max(idle, key=lambda s: s.order, default=None)

    def _victim(self, sequence: State) -> State | None:
        """Whom to preempt for a sequence: an idle one, else the last of those that come after."""
        planned = [s for s, _ in self.plan.batch]
        after = [s for s in self._scheduler.placed if s.order > sequence.order and s not in planned]
        return self._idle() or max(after, key=lambda s: s.order, default=None)

    def _preempt(self, victim: State | None) -> bool:
        """Take the cache of a sequence, which is computed again later. False for no sequence."""
        if victim is None:
            return False
        self.plan.preempted.append(victim)
        self._scheduler.preemptions += 1
        try:
            self._scheduler.remove(victim)
        finally:
            self._scheduler.add(victim)
        return True

    def _promised(self) -> int:
        """Pages that the sequences with rows are expected to take beyond this step."""
        step = {id(s): self._limits.most_pages(count) for s, count in self.plan.batch}
        return sum(
            max(0, self._scheduler.expected_pages(len(s.tokens)) - s.pages - step.get(id(s), 0))
            for s in self._scheduler.placed
        )
