"""State of one sequence in the scheduler; integers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class SequenceStatus(Enum):
    """Stage of a sequence.

    Attributes:
        WAITING: Queued; holds no batch slot.
        RUNNING: Holds a batch slot and takes part in steps.
        PREEMPTED: Queued again; its cache was freed for another sequence.
        FINISHED: Has a `finish_reason`. A conversation keeps its batch slot until its next turn.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# Python 3.11 takes six times as long for `SequenceStatus.FINISHED` as for a module's own name.
WAITING, RUNNING, PREEMPTED, FINISHED = SequenceStatus


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """State of a sequence that the scheduler reads and sets.

    Attributes:
        arrival: Arrival number of the request.
        index: Index among the continuations of the request.
        priority: Lower values go first.
        deadline: Time at which the sequence ends unfinished, on the clock of `Scheduler.schedule`;
            None for no deadline.
        tokens: All prompts and generated tokens so far.
        prompt_end: Number of tokens up to the end of the current prompt.
        num_computed_tokens: Number of tokens that were computed: they are in the cache or were
            evicted from it.
        num_inflight_tokens: Number of sampled tokens that are still on the device and not yet in
            `tokens`.
        max_total_tokens: Number of tokens at which the sequence ends; None for no limit.
        score_only: True if all tokens are given and none is sampled. The sequence ends without
            computing its last token, because no token follows it.
        batch_slot: Cache row that the sequence holds; None if it holds none.
        pages: Number of pages that the sequence holds, shared pages included.
        snapshot_points: Numbers of computed tokens at which a snapshot is taken. A step ends there.
        prefix_leader: Continuation of the same prompt that computes the prompt for this sequence;
            None if there is none.
        status: Stage of the sequence.
        finish_reason: Reason for the end; None until the sequence has finished.
    """

    arrival: int
    index: int = 0
    priority: int = 0
    deadline: float | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_end: int = 0
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    max_total_tokens: int | None = None
    score_only: bool = False
    batch_slot: int | None = None
    pages: int = 0
    snapshot_points: tuple[int, ...] = ()
    prefix_leader: SequenceState | None = None
    status: SequenceStatus = WAITING
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Number of tokens so far, in-flight tokens included."""
        return len(self.tokens) + self.num_inflight_tokens

    @property
    def remaining(self) -> int:
        """Number of known tokens that are still to be computed."""
        count = len(self.tokens)
        needed = count + self.num_inflight_tokens - (self.score_only and count > 1)
        return needed - self.num_computed_tokens

    @property
    def runnable(self) -> bool:
        """True if a step can compute a token of the sequence."""
        if self.status is FINISHED or self.remaining <= 0:
            return False
        most = self.max_total_tokens
        return most is None or not self.num_inflight_tokens or self.length < most

    @property
    def is_sampled(self) -> bool:
        """True if the next token is sampled, because all known tokens are computed."""
        return not self.remaining and not self.score_only

    @property
    def awaits_prefix_leader(self) -> bool:
        """True if `prefix_leader` has not finished the prompt yet."""
        leader = self.prefix_leader
        if leader is None or leader.status is FINISHED:
            return False
        return leader.num_computed_tokens < leader.prompt_end - 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Unique sort key; smaller keys go first."""
        return self.priority, self.arrival, self.index

    def finish(self, reason: str) -> None:
        """End the sequence."""
        self.status, self.finish_reason = FINISHED, reason

    def next_tokens(self, most: int) -> int:
        """Return the number of tokens that a step of at most `most` tokens computes.

        After a preemption, the newest generated token gets a step of its own, as before.
        """
        remaining = self.remaining
        if remaining <= 1:
            return min(remaining, most)
        ends = [point for point in self.snapshot_points if point > self.num_computed_tokens]
        newest = self.length - 1
        if not self.score_only and self.num_computed_tokens < newest >= self.prompt_end:
            ends.append(newest)
        end = min(ends, default=self.length)
        return min(end - self.num_computed_tokens, remaining, most)

    def tokens_left(self, most: int) -> int:
        """Return the number of tokens, at most `most`, to sample up to `max_total_tokens`."""
        total = self.max_total_tokens
        return most if total is None else min(most, total - self.length)
