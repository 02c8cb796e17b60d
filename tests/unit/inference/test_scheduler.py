"""The scheduler against a simulated cache that evicts as it likes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from dms_train.inference.scheduler import Schedule, Scheduler, SchedulerLimits, SequenceState

SMALL = SchedulerLimits(rows=4, batch_tokens=24, chunk=8, kv_lists=3, page_slots=4, window=4)


def limits(**changes) -> SchedulerLimits:
    values = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return SchedulerLimits(**{**values, **changes})


def sequence(arrival: int, prompt: int, **fields) -> SequenceState:
    return SequenceState(arrival=arrival, tokens=[0] * prompt, prompt_end=prompt, **fields)


class SimulatedCache:
    """KV lists that keep the window and a random share of what lies behind it."""

    def __init__(self, scheduler: Scheduler, survival: float, seed: int = 0) -> None:
        self.scheduler, self.survival = scheduler, survival
        self.random = random.Random(seed)
        self.lists: dict[int, list[int]] = {}  # slots of each list, by row
        self.pages = scheduler.limits.pages

    def used(self) -> int:
        size = self.scheduler.limits.page_slots
        return sum(-(-slots // size) for lists in self.lists.values() for slots in lists)

    def run(self, plan: Schedule[SequenceState]) -> None:
        """Compute a step, and check that it has room whatever is kept."""
        limits = self.scheduler.limits
        for _, row in plan.preempted:
            del self.lists[row]
        assert sum(count for _, count in plan.batch) <= limits.batch_tokens
        assert len({s.row for s, _ in plan.batch}) == len(plan.batch) <= limits.rows
        for state, count in plan.batch:
            assert 0 < count <= min(limits.chunk, state.remaining)
            lists = self.lists.setdefault(state.row, [0] * limits.kv_lists)
            self.lists[state.row] = [slots + count for slots in lists]
        assert self.pages is None or self.used() <= self.pages
        for state, count in plan.batch:
            state.computed += count
            self.lists[state.row] = [self.kept(state.computed) for _ in self.lists[state.row]]
            size = limits.page_slots
            state.pages = sum(-(-slots // size) for slots in self.lists[state.row])
            if not state.remaining:
                mean = sum(self.lists[state.row]) / limits.kv_lists
                self.scheduler.observe(state.computed, mean)

    def kept(self, tokens: int) -> int:
        behind = max(0, tokens - self.scheduler.limits.window)
        share = min(1.0, max(0.0, self.random.gauss(self.survival, 0.1)))
        return tokens - behind + round(behind * share)

    def finish(self, state: SequenceState) -> None:
        row = self.scheduler.remove(state)
        if row is not None:
            self.lists.pop(row, None)


def simulate(
    scheduler: Scheduler, cache: SimulatedCache, states: list[SequenceState], lengths: list[int]
) -> list[SequenceState]:
    """Run until all have as many tokens as `lengths` says; the states in the order of their end."""
    ended = []
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
                    state.finish_reason = "length"
        for state in [*(s for s, _ in plan.batch), *plan.ended]:
            if state.finish_reason is not None:
                cache.finish(state)
                ended.append(state)
    assert cache.used() == 0
    assert scheduler.free_rows == list(range(scheduler.limits.rows))
    return ended


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("survival", [0.1, 0.5, 1.0])
def test_all_finish_within_the_pages_of_the_pool(seed, survival):
    draw = random.Random(seed)
    count = draw.randint(1, 30)
    prompts = [draw.randint(1, 60) for _ in range(count)]
    lengths = [prompt + draw.randint(1, 40) for prompt in prompts]
    longest = SMALL.most_pages(max(lengths))
    scheduler = Scheduler(limits(pages=longest + draw.randint(0, 2 * longest)))
    cache = SimulatedCache(scheduler, survival, seed)
    states = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for state in states:
        scheduler.add(state)
    ended = simulate(scheduler, cache, states, lengths)
    assert len(ended) == count
    assert {s.finish_reason for s in ended} == {"length"}
    assert [len(s.tokens) for s in states] == lengths


def test_a_full_pool_preempts_the_last_and_the_first_never_waits():
    prompts = [20] * 6
    lengths = [60] * 6
    scheduler = Scheduler(limits(rows=6, pages=SMALL.most_pages(60) + 12))
    cache = SimulatedCache(scheduler, survival=1.0)
    scheduler.survival = 0.1  # wrong, as after prompts of another kind
    states = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for state in states:
        scheduler.add(state)
    ended = simulate(scheduler, cache, states, lengths)
    assert [s.arrival for s in ended] == sorted(s.arrival for s in ended)
    assert scheduler.preemptions > 0
    assert scheduler.survival > 0.9


def test_without_a_limit_nothing_is_preempted():
    scheduler = Scheduler(SMALL)
    states = [sequence(i, 30) for i in range(9)]
    for state in states:
        scheduler.add(state)
    simulate(scheduler, SimulatedCache(scheduler, survival=1.0), states, [50] * 9)
    assert scheduler.preemptions == 0


def test_a_sequence_that_outgrows_the_pool_ends_and_the_others_finish():
    scheduler = Scheduler(limits(pages=SMALL.most_pages(24)))
    states = [sequence(0, 8), sequence(1, 8), sequence(2, 8)]
    for state in states:
        scheduler.add(state)
    simulate(scheduler, SimulatedCache(scheduler, survival=1.0), states, [90, 20, 20])
    assert [s.finish_reason for s in states] == ["memory", "length", "length"]
    assert len(states[0].tokens) >= 16


def test_decoding_goes_before_prompts_and_prompts_fill_the_step():
    scheduler = Scheduler(limits(rows=3, batch_tokens=10, chunk=8))
    decoding = sequence(0, 4)
    scheduler.add(decoding)
    cache = SimulatedCache(scheduler, survival=1.0)
    cache.run(scheduler.schedule(0.0))
    decoding.tokens.append(0)
    long, other = sequence(1, 30), sequence(2, 30)
    scheduler.add(long)
    scheduler.add(other)
    batch = scheduler.schedule(0.0).batch
    assert batch == [(decoding, 1), (long, 8), (other, 1)]


def test_lower_priority_numbers_go_first_then_earlier_arrivals():
    scheduler = Scheduler(limits(rows=1, batch_tokens=8))
    states = [
        sequence(0, 4, priority=1),
        sequence(1, 4),
        sequence(2, 4),
        sequence(3, 4, priority=-1),
    ]
    for state in states:
        scheduler.add(state)
    ended = simulate(scheduler, SimulatedCache(scheduler, survival=1.0), states, [6] * 4)
    assert [s.arrival for s in ended] == [3, 1, 2, 0]


@pytest.mark.parametrize("placed", [True, False])
def test_a_sequence_ends_at_its_deadline(placed):
    scheduler = Scheduler(limits(rows=1))
    late = sequence(0, 6, deadline=5.0)
    blocker = sequence(1, 6, priority=-1)
    cache = SimulatedCache(scheduler, survival=1.0)
    scheduler.add(late)
    if not placed:
        scheduler.add(blocker)
    cache.run(scheduler.schedule(now=4.9))
    late.tokens.append(0)
    assert (late.row is not None) == placed
    plan = scheduler.schedule(now=5.0)
    assert plan.ended == [late]
    assert late.finish_reason == "timeout"
    assert late not in [s for s, _ in plan.batch]


def test_only_those_that_may_take_part_do_and_the_others_give_way():
    scheduler = Scheduler(limits(pages=SMALL.most_pages(16)))
    first, second = sequence(0, 12), sequence(1, 12)
    cache = SimulatedCache(scheduler, survival=1.0)
    scheduler.add(first)
    for _ in range(2):
        cache.run(scheduler.schedule(0.0))
    first.tokens.append(0)
    scheduler.add(second)
    plan = scheduler.schedule(0.0, {second})
    assert [s for s, _ in plan.batch] == [second]
    cache.run(plan)
    plan = scheduler.schedule(0.0, {second})
    assert [s for s, _ in plan.preempted] == [first]
    assert (first.row, first.computed, first.pages) == (None, 0, 0)


def test_expected_pages_follow_the_measured_survival():
    scheduler = Scheduler(limits(kv_lists=1, page_slots=1, window=10))
    assert scheduler.expected_pages(100) == 100  # nothing is known: all may survive
    for _ in range(200):
        scheduler.observe(tokens=110, live=10 + 25)
    assert scheduler.survival == pytest.approx(0.25)
    assert 10 + 0.25 * 90 < scheduler.expected_pages(100) < 10 + 0.35 * 90
    assert scheduler.expected_pages(7) == 7


def test_the_scheduler_needs_no_torch():
    code = "import sys, dms_train.inference.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
