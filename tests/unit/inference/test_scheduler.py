"""The scheduler against a simulated cache with random evictions."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from dms_train.inference.scheduler import Schedule, Scheduler, SchedulerLimits
from dms_train.inference.sequence_state import (
    FINISHED,
    PREEMPTED,
    RUNNING,
    WAITING,
    SequenceState,
)

SMALL = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=24,
    prefill_chunk=8,
    kv_lists=3,
    page_slots=4,
    window=4,
)


def limits(**changes) -> SchedulerLimits:
    values = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return SchedulerLimits(**{**values, **changes})


def sequence(arrival: int, prompt: int, **fields) -> SequenceState:
    return SequenceState(arrival=arrival, tokens=[0] * prompt, prompt_end=prompt, **fields)


class SimulatedCache:
    """KV lists that keep the window and a random share of the tokens beyond it.

    A snapshot holds pages. Batch slots that start from it share them until they copy them.
    """

    def __init__(self, limits: SchedulerLimits, survival: float, seed: int = 0) -> None:
        self.limits, self.survival = limits, survival
        self.random = random.Random(seed)
        self.lists: dict[int, list[int]] = {}  # slots of each list, by batch slot
        self.shared: dict[int, int] = {}  # pages that count for a snapshot, by batch slot
        self.snapshots: dict[int, int] = {}  # pages of snapshots, by number of their tokens
        self.most: dict[int, int] = {}  # tokens of a step, by sequence
        self.sharing = False
        self.scheduler = Scheduler(limits, self)

    def used(self) -> int:
        own = sum(self.pages_of(row) - self.shared.get(row, 0) for row in self.lists)
        return own + sum(self.snapshots.values())

    def pages_of(self, row: int) -> int:
        return sum(-(-slots // self.limits.page_slots) for slots in self.lists[row])

    def free_pages(self, least: int = 0) -> float:
        return float("inf") if self.limits.pages is None else self.limits.pages - self.used()

    def most_copies(self, row: int, tokens: int) -> int:
        return min(self.shared.get(row, 0), self.limits.kv_lists if tokens == 1 else 10**9)

    def prepare_burst(self, rows: list[int], steps: int, spare: float) -> int:
        self.spare = spare
        each = steps if self.sharing else -(-steps // self.limits.page_slots)
        return each * self.limits.kv_lists * len(rows)

    def max_tokens(self, state: SequenceState) -> int | None:
        return self.most.get(id(state))

    def free(self, row: int) -> None:
        self.lists.pop(row, None)
        self.shared.pop(row, None)

    def cached_tokens(self, state: SequenceState) -> int:
        return max((n for n in self.snapshots if n < len(state.tokens)), default=0)

    def find_prefix_leader(self, state: SequenceState) -> None:
        return None

    def restore(self, state: SequenceState) -> None:
        state.num_computed_tokens = self.cached_tokens(state)
        if state.num_computed_tokens:
            self.shared[state.batch_slot] = self.snapshots[state.num_computed_tokens]
            slots = self.shared[state.batch_slot] // self.limits.kv_lists * self.limits.page_slots
            self.lists[state.batch_slot] = [slots] * self.limits.kv_lists

    def reclaim(self, keep_for: SequenceState | None = None) -> bool:
        kept = None if keep_for is None else self.cached_tokens(keep_for)
        for tokens in self.snapshots:
            if tokens != kept:
                del self.snapshots[tokens]
                self.shared.clear()  # the batch slots now hold the shared pages alone
                return True
        return False

    def run(self, plan: Schedule[SequenceState]) -> None:
        """Compute a step; check that the pages suffice even if no token is evicted."""
        limits = self.limits
        assert sum(count for _, count in plan.batch) <= limits.max_num_batched_tokens
        assert len({s.batch_slot for s, _ in plan.batch}) == len(plan.batch) <= limits.max_num_seqs
        for state, count in plan.batch:
            assert 0 < count <= min(limits.prefill_chunk, state.remaining)
            lists = self.lists.setdefault(state.batch_slot, [0] * limits.kv_lists)
            self.lists[state.batch_slot] = [slots + count for slots in lists]
            left = 2 * limits.kv_lists if count == 1 else self.shared.get(state.batch_slot, 0)
            self.shared[state.batch_slot] = max(0, self.shared.get(state.batch_slot, 0) - left)
        assert self.free_pages() >= 0
        for state, count in plan.batch:
            state.num_computed_tokens += count
            self.lists[state.batch_slot] = [
                self.kept(state.num_computed_tokens) for _ in self.lists[state.batch_slot]
            ]
            state.pages = self.pages_of(state.batch_slot)
            if not state.remaining:
                mean = sum(self.lists[state.batch_slot]) / limits.kv_lists
                self.scheduler.observe(state.num_computed_tokens, mean)

    def kept(self, tokens: int) -> int:
        beyond_window = max(0, tokens - self.limits.window)
        share = min(1.0, max(0.0, self.random.gauss(self.survival, 0.1)))
        return tokens - beyond_window + round(beyond_window * share)


def simulate(cache: SimulatedCache, lengths: list[int]) -> list[SequenceState]:
    """Run until all have as many tokens as in `lengths`; return the states in order of ending."""
    ended, scheduler = [], cache.scheduler
    for step in range(100_000):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule(now=float(step))
        assert plan.batch or plan.ended, "a step that does nothing would be repeated for ever"
        cache.run(plan)
        for state, _ in plan.batch:
            if not state.remaining:
                state.tokens.append(0)
                if len(state.tokens) >= lengths[state.arrival]:
                    state.finish("length")
        for state in [*(s for s, _ in plan.batch), *plan.ended]:
            if state.finish_reason is not None:
                scheduler.remove(state)
                ended.append(state)
    assert cache.lists == {}
    assert scheduler.free_batch_slots == list(range(scheduler.limits.max_num_seqs))
    return ended


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("survival", [0.1, 0.5, 1.0])
def test_all_finish_within_the_pages_of_the_pool(seed, survival):
    draw = random.Random(seed)
    count = draw.randint(1, 30)
    prompts = [draw.randint(1, 60) for _ in range(count)]
    lengths = [prompt + draw.randint(1, 40) for prompt in prompts]
    longest = SMALL.most_pages(max(lengths))
    cache = SimulatedCache(limits(pages=longest + draw.randint(0, 2 * longest)), survival, seed)
    states = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for state in states:
        cache.scheduler.add(state)
    ended = simulate(cache, lengths)
    assert len(ended) == count
    assert {s.finish_reason for s in ended} == {"length"}
    assert [len(s.tokens) for s in states] == lengths


def test_a_full_pool_preempts_the_last_and_the_first_never_waits():
    prompts = [20] * 6
    lengths = [60] * 6
    cache = SimulatedCache(limits(max_num_seqs=6, pages=SMALL.most_pages(60) + 12), survival=1.0)
    scheduler = cache.scheduler
    scheduler.survival = 0.1  # wrong, as after prompts of another kind
    states = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for state in states:
        scheduler.add(state)
    ended = simulate(cache, lengths)
    assert [s.arrival for s in ended] == sorted(s.arrival for s in ended)
    assert scheduler.preemptions > 0
    assert scheduler.survival > 0.9


def test_the_most_recent_sequence_is_preempted_for_the_first() -> None:
    """Not the one before it: with 18 pages taken and one free, the first of three needs three."""
    cache = SimulatedCache(limits(pages=19), survival=1.0)
    states = [sequence(arrival, 8) for arrival in range(3)]
    for state in states:
        cache.scheduler.add(state)
        cache.scheduler.admit(state)
        cache.lists[state.batch_slot] = [8] * SMALL.kv_lists
        state.num_computed_tokens, state.pages = 8, 6
        state.tokens.append(0)
    plan = cache.scheduler.schedule(now=0.0)
    assert plan.preempted == [states[2]]
    assert [state for state, _ in plan.batch] == states[:2]


def test_without_a_limit_nothing_is_preempted():
    cache = SimulatedCache(SMALL, survival=1.0)
    for state in [sequence(i, 30) for i in range(9)]:
        cache.scheduler.add(state)
    simulate(cache, [50] * 9)
    assert cache.scheduler.preemptions == 0


def test_a_sequence_that_outgrows_the_pool_ends_and_the_others_finish():
    cache = SimulatedCache(limits(pages=SMALL.most_pages(24)), survival=1.0)
    states = [sequence(0, 8), sequence(1, 8), sequence(2, 8)]
    for state in states:
        cache.scheduler.add(state)
    simulate(cache, [90, 20, 20])
    assert [s.finish_reason for s in states] == ["memory", "length", "length"]
    assert len(states[0].tokens) >= 16


def test_continuations_of_one_prompt_take_turns_in_a_full_pool():
    cache = SimulatedCache(limits(pages=SMALL.most_pages(24)), survival=1.0)
    states = [sequence(0, 8, index=index) for index in range(3)]
    for state in states:
        cache.scheduler.add(state)
    assert simulate(cache, [20]) == states
    assert [s.finish_reason for s in states] == ["length"] * 3
    assert cache.scheduler.preemptions > 0


def test_decoding_goes_before_prompts_and_prompts_fill_the_step():
    cache = SimulatedCache(limits(max_num_seqs=3, max_num_batched_tokens=10), survival=1.0)
    scheduler, decoding = cache.scheduler, sequence(0, 4)
    scheduler.add(decoding)
    cache.run(scheduler.schedule(0.0))
    decoding.tokens.append(0)
    long, other = sequence(1, 30), sequence(2, 30)
    scheduler.add(long)
    scheduler.add(other)
    batch = scheduler.schedule(0.0).batch
    assert batch == [(decoding, 1), (long, 8), (other, 1)]


def test_lower_priority_numbers_go_first_then_earlier_arrivals():
    cache = SimulatedCache(limits(max_num_seqs=1, max_num_batched_tokens=8), survival=1.0)
    states = [
        sequence(0, 4, priority=1),
        sequence(1, 4),
        sequence(2, 4),
        sequence(3, 4, priority=-1),
    ]
    for state in states:
        cache.scheduler.add(state)
    ended = simulate(cache, [6] * 4)
    assert [s.arrival for s in ended] == [3, 1, 2, 0]


def test_admitted_sequences_are_planned_by_priority_not_by_batch_slot():
    cache = SimulatedCache(limits(max_num_seqs=2), survival=1.0)
    scheduler, states = cache.scheduler, [sequence(0, 4), sequence(1, 4, priority=-1)]
    for state in states:
        scheduler.add(state)
        cache.run(scheduler.schedule(0.0))
        for each in scheduler.admitted:
            each.tokens.append(0)
    assert scheduler.schedule(0.0).batch == [(states[1], 1), (states[0], 1)]


def test_a_step_computes_as_many_tokens_of_a_prompt_as_the_policy_takes():
    cache, state = SimulatedCache(SMALL, survival=1.0), sequence(0, 7)
    cache.most[id(state)] = 3
    cache.scheduler.add(state)
    counts = []
    while state.remaining:
        plan = cache.scheduler.schedule(0.0)
        counts.append(plan.batch[0][1])
        cache.run(plan)
    assert counts == [3, 3, 1]


@pytest.mark.parametrize("admitted", [True, False])
def test_a_sequence_ends_at_its_deadline(admitted):
    cache = SimulatedCache(limits(max_num_seqs=1), survival=1.0)
    late = sequence(0, 6, deadline=5.0)
    blocker, scheduler = sequence(1, 6, priority=-1), cache.scheduler
    scheduler.add(late)
    if not admitted:
        scheduler.add(blocker)
    cache.run(scheduler.schedule(now=4.9))
    late.tokens.append(0)
    assert (late.batch_slot is not None) == admitted
    plan = scheduler.schedule(now=5.0)
    assert plan.ended == [late]
    assert (late.status, late.finish_reason) == (FINISHED, "timeout")
    assert late not in [s for s, _ in plan.batch]


def test_only_those_that_may_take_part_do_and_the_others_give_way():
    cache = SimulatedCache(limits(pages=SMALL.most_pages(16)), survival=1.0)
    first, second, scheduler = sequence(0, 12), sequence(1, 12), cache.scheduler
    scheduler.add(first)
    assert first.status is WAITING
    for _ in range(2):
        cache.run(scheduler.schedule(0.0))
    first.tokens.append(0)
    scheduler.add(second)
    plan = scheduler.schedule(0.0, {second})
    assert [s for s, _ in plan.batch] == [second]
    assert (first.status, second.status) == (RUNNING, RUNNING)
    cache.run(plan)
    plan = scheduler.schedule(0.0, {second})
    assert plan.preempted == [first]
    assert (first.batch_slot, first.num_computed_tokens, first.pages) == (None, 0, 0)
    assert (first.status, first in scheduler.waiting) == (PREEMPTED, True)


def test_a_finished_sequence_that_gives_way_stays_finished():
    cache = SimulatedCache(limits(max_num_seqs=1), survival=1.0)
    first, second, scheduler = sequence(0, 4), sequence(1, 4), cache.scheduler
    scheduler.add(first)
    cache.run(scheduler.schedule(0.0))
    first.finish("length")
    scheduler.add(second)
    assert scheduler.schedule(0.0).preempted == [first]
    assert (first.status, second.status) == (FINISHED, RUNNING)


def test_expected_pages_follow_the_measured_survival():
    scheduler = SimulatedCache(limits(kv_lists=1, page_slots=1, window=10), 1.0).scheduler
    assert scheduler.expected_pages(100) == 100  # nothing is known: all may survive
    for _ in range(200):
        scheduler.observe(tokens=110, live=10 + 25)
    assert scheduler.survival == pytest.approx(0.25)
    assert 10 + 0.25 * 90 < scheduler.expected_pages(100) < 10 + 0.35 * 90
    assert scheduler.expected_pages(7) == 7


def test_the_scheduler_needs_no_torch():
    code = "import sys, dms_train.inference.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("seed", range(25))
def test_all_finish_with_snapshots_in_a_small_pool(seed):
    """Sequences start from snapshots, which are released where pages are needed."""
    draw = random.Random(seed)
    prompts = [draw.randint(1, 60) for _ in range(20)]
    lengths = [prompt + draw.randint(1, 40) for prompt in prompts]
    longest = SMALL.most_pages(max(lengths))
    cache = SimulatedCache(limits(pages=2 * longest), 0.5, seed)
    cache.snapshots = {8: SMALL.most_pages(8), 20: SMALL.most_pages(20)}
    states = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for state in states:
        cache.scheduler.add(state)
    ended = simulate(cache, lengths)
    assert {s.finish_reason for s in ended} == {"length"}
    assert [len(s.tokens) for s in states] == lengths


def test_continuations_wait_for_the_prompt_and_others_do_not():
    cache = SimulatedCache(SMALL, survival=1.0)
    scheduler, leader = cache.scheduler, sequence(0, 12, snapshot_points=(11,))
    following, other = sequence(1, 12, prefix_leader=leader), sequence(2, 3)
    for state in (leader, following, other):
        scheduler.add(state)
    plan = scheduler.schedule(0.0)
    assert plan.batch == [(leader, 8), (other, 3)]
    cache.run(plan)
    plan = scheduler.schedule(0.0)
    assert plan.batch == [(leader, 3)]  # the snapshot leaves out the last token of the prompt
    cache.run(plan)
    cache.snapshots = {11: SMALL.most_pages(11)}
    plan = scheduler.schedule(0.0)
    assert plan.batch == [(leader, 1), (following, 1)]
    assert following.num_computed_tokens == 11


def test_a_snapshot_is_released_before_a_sequence_is_preempted():
    cache = SimulatedCache(limits(pages=SMALL.most_pages(28)), survival=1.0)
    cache.snapshots = {8: SMALL.most_pages(8)}
    state = sequence(0, 5)
    cache.scheduler.add(state)
    simulate(cache, [24])
    assert (state.finish_reason, len(state.tokens)) == ("length", 24)
    assert cache.snapshots == {}
    assert cache.scheduler.preemptions == 0


@pytest.mark.parametrize(("sharing", "needed"), [(True, 24), (False, 6)])
def test_a_decode_burst_needs_its_pages(sharing, needed):
    """Four tokens of a KV list copy a shared page each, or fill one page of four slots."""
    cache = SimulatedCache(limits(pages=1000, decode_steps=4), survival=1.0)
    cache.sharing, scheduler = sharing, cache.scheduler
    states = [sequence(0, 5, max_total_tokens=30), sequence(1, 6, max_total_tokens=30)]
    for state in states:
        scheduler.add(state)
    cache.run(scheduler.schedule(now=0.0))
    for state in states:
        state.tokens.append(0)
    assert cache.used() == 12
    scheduler.add(sequence(2, 5))
    with_prompt = scheduler.schedule(now=1.0)  # it runs beside the burst
    scheduler.remove(with_prompt.batch[-1][0])
    for plan, beside in ((scheduler.schedule(now=2.0), 0), (with_prompt, 6)):
        for missing, steps in ((1, 1), (0, 4)):
            cache.limits = limits(pages=12 + needed + beside - missing)
            assert scheduler.burst_steps(plan, states) == steps
            assert cache.spare == needed - 6 - missing  # besides the pages of a single step


@pytest.mark.parametrize(
    ("survival", "pages", "admitted"),
    [(1.0, 36, 4), (1.0, 35, 3), (0.0, 37, 6), (0.0, 199, 32), (0.0, 200, 33)],
)
def test_admission_leaves_the_pages_of_a_burst(survival, pages, admitted):
    """A sequence takes two pages of each of three lists, and a burst of four tokens a third.

    Where its tokens are expected to be evicted, a hundredth of the pages stays free.
    """
    many = limits(max_num_seqs=40, pages=pages, window=8, decode_steps=4, prefill_chunk=8)
    cache = SimulatedCache(replace(many, max_num_batched_tokens=1000), 1.0)
    cache.scheduler.survival = survival
    for arrival in range(40):
        cache.scheduler.add(sequence(arrival, 8))
    assert len(cache.scheduler.schedule(now=0.0).admitted) == admitted


def test_what_a_conversation_keeps_does_not_grow():
    many = limits(max_num_seqs=9, pages=6 + 36, window=8, decode_steps=4)
    cache = SimulatedCache(replace(many, max_num_batched_tokens=1000), 1.0)
    kept = sequence(0, 8)
    cache.scheduler.add(kept)
    cache.run(cache.scheduler.schedule(now=0.0))
    kept.finish("stop")
    for arrival in range(1, 9):
        cache.scheduler.add(sequence(arrival, 8))
    assert len(cache.scheduler.schedule(now=1.0).admitted) == 4


def test_no_snapshot_is_released_for_the_pages_of_a_burst():
    many = limits(max_num_seqs=9, pages=11, window=8, decode_steps=4)
    cache = SimulatedCache(replace(many, max_num_batched_tokens=1000), 1.0)
    cache.snapshots = {100: 1}
    cache.scheduler.add(sequence(0, 8))
    cache.scheduler.add(sequence(1, 1))
    assert len(cache.scheduler.schedule(now=0.0).admitted) == 1
    assert cache.snapshots


def test_a_sequence_takes_part_in_steps_up_to_its_most_tokens():
    state = sequence(0, 5, max_total_tokens=8, num_inflight_tokens=1)
    assert [state.tokens_left(most) for most in (1, 2, 4)] == [1, 2, 2]
