"""Kernels around a chunk of prompts read and write what plain loops do."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import (
    ALWAYS,
    EVICTION_CHANNEL,
    NEVER,
    SIGNAL,
    Decisions,
    FreePages,
)
from dms_train.kernels.errors import KernelError
from dms_train.kernels.prefill import triton_state
from dms_train.kernels.prefill.lists import EDGE, Pages, PrefillState, recent_tokens
from dms_train.kernels.prefill.sparse import count

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
WINDOW, PAGE, HEADS, ROWS = 5, 4, 2, 4
RECENT = recent_tokens(WINDOW)


def on_device(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Planned:
    """A chunk of three prompts planned by the kernel, and the same by loops over its tokens."""

    ROWS, REAL, PADDED = (2, 0, 3), (9, 1, 130), 130

    def __init__(self, rule: Decisions, seen: list[int]) -> None:
        self.prepare(rule, seen)
        self.plan()

    def prepare(self, rule: Decisions, seen: list[int]) -> None:
        self.rule, self.seen, self.begins = rule, seen, not any(seen)
        self.recent = 0 if self.begins else RECENT
        draw = torch.Generator().manual_seed(1)
        shape = (ROWS, HEADS, WINDOW + 1)
        self.ring = torch.randint(0, 90, shape, dtype=torch.int32, generator=draw)
        self.lengths = torch.randint(40, 99, (ROWS, HEADS), dtype=torch.int32, generator=draw)
        self.signal = torch.rand(3, self.PADDED, HEADS, generator=draw) < 0.6
        self.signal = self.signal.transpose(1, 2)  # as a model has it
        self.position = torch.full((3, self.PADDED), -1)
        for i, (before, real) in enumerate(zip(seen, self.REAL, strict=True)):
            self.position[i, :real] = before + torch.arange(real)

    def plan(self) -> None:
        given = (self.lengths, self.ring, torch.tensor(self.ROWS), self.position)
        signal = self.signal.to(DEVICE) if self.rule.source == SIGNAL else None
        self.state, self.chunk = triton_state.plan_prompt(
            *(x.to(DEVICE) for x in given), signal, self.rule, begins=self.begins
        )

    def entry(self, i: int, h: int, place: int) -> int | None:
        """Entry of the ring for a token before the chunk; None where it has none."""
        token = self.seen[i] - self.recent + place
        if place >= self.recent or token < max(0, self.seen[i] - WINDOW - 1):
            return None
        return int(self.ring[self.ROWS[i], h, token % (WINDOW + 1)])

    def slot(self, i: int, h: int, place: int) -> int:
        entry = self.entry(i, h, place)
        if entry is None:
            return -1
        if self.rule.source == NEVER:
            return int(self.lengths[self.ROWS[i], h]) - self.recent + place
        return entry // 2

    def evicted(self, i: int, h: int, place: int) -> bool:
        if self.rule.source != SIGNAL:
            return self.rule.source == ALWAYS
        decides = place - self.recent + self.rule.shift
        if 0 <= decides < self.REAL[i]:
            return bool(self.signal[i, h, decides])
        return (self.entry(i, h, place) or 0) % 2 == 1


RULES = [Decisions(NEVER), Decisions(ALWAYS), *(Decisions(SIGNAL, shift=s) for s in (0, 1, 6))]


@pytest.mark.parametrize("rule", RULES, ids=["never", "always", "now", "next", "immediate"])
@pytest.mark.parametrize("seen", [[0, 0, 0], [3, 1, 20]], ids=["first", "later"])
@pytest.mark.parametrize("at_a_time", [None, 1, 2])
def test_a_chunk_is_planned_from_the_ring_and_its_decisions(rule, seen, at_a_time, monkeypatch):
    if at_a_time is not None:  # loops over the edges and positions of a longer chunk
        monkeypatch.setattr(triton_state, "_EDGES", at_a_time)
        monkeypatch.setattr(triton_state, "_POSITIONS", 32 * at_a_time)
    plan = Planned(rule, seen)
    state, chunk = plan.state, plan.chunk
    assert state.seen.tolist() == seen
    assert state.evicted.shape[-1] == plan.recent
    assert chunk.kept == WINDOW + 1
    for i, row in enumerate(plan.ROWS):
        held = min(seen[i], WINDOW + 1)
        start, stop = plan.recent - held, plan.recent + plan.REAL[i]
        assert (int(chunk.start[i]), int(chunk.stop[i])) == (start, stop)
        for h in range(HEADS):
            length = 0 if plan.begins else int(plan.lengths[row, h])
            assert int(state.lengths[i, h]) == length
            if plan.begins:
                assert state.slots is None
            else:
                slots = [plan.slot(i, h, place) for place in range(plan.recent)]
                assert state.slots[i, h].tolist() == slots
            marks = [plan.evicted(i, h, place) for place in range(plan.recent + plan.PADDED)]
            assert chunk.evicted[i, h].tolist() == marks
            stays = [
                start <= place < stop and (place >= stop - WINDOW - 1 or not mark)
                for place, mark in enumerate(marks)
            ]
            edges = [length - held + sum(stays[:edge]) for edge in range(0, len(stays), EDGE)]
            assert chunk.edges[i, h].tolist() == [*edges, length - held + sum(stays)]
            assert int(chunk.lengths[i, h]) == length - held + sum(stays)


def test_prompts_may_share_the_memory_of_their_positions():
    plan = Planned(Decisions(SIGNAL, shift=1), [0, 0, 0])
    plan.position = torch.arange(plan.PADDED).expand(3, -1)
    plan.plan()
    assert plan.state.seen.tolist() == [0, 0, 0]
    assert plan.chunk.stop.tolist() == [plan.PADDED] * 3


@pytest.mark.parametrize("source", [SIGNAL, EVICTION_CHANNEL, NEVER])
def test_a_source_that_does_not_fit_the_signal_is_refused(source):
    plan = Planned(Decisions(SIGNAL, shift=1), [3, 1, 20])
    given = (plan.lengths, plan.ring, torch.tensor(plan.ROWS), plan.position)
    signal = None if source == SIGNAL else plan.signal
    with pytest.raises(KernelError, match=rf"source {source} with"):
        triton_state.plan_prompt(*given, signal, Decisions(source), begins=False)


@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.parametrize(
    ("recent", "seen", "real"),
    [(0, [0, 0, 0], [9, 3, 140]), (RECENT, [3, 40, 70], [2, 9, 130])],
    ids=["first", "later"],
)
def test_a_chunk_is_counted_and_noted_in_the_ring(recent, seen, real, evicts):
    b, n, rows = 3, max(real), [1, 3, 0]
    evicted = torch.rand(b, HEADS, recent + n, generator=torch.manual_seed(2)) < 0.5 * evicts
    held = [min(tokens, WINDOW + 1) for tokens in seen] if recent else [0] * b
    older = on_device([[7 * (s > WINDOW + 1), 4 * (s > WINDOW + 1)] for s in seen])
    start, stop = [recent - h for h in held], [recent + r for r in real]
    chunk = count(
        evicted.to(DEVICE), older, kept=WINDOW + 1, start=on_device(start), stop=on_device(stop)
    )
    before = PrefillState(
        older + on_device(held)[:, None], on_device(seen), chunk.evicted[..., :recent]
    )
    ring = torch.full((ROWS, HEADS, WINDOW + 1), -7, dtype=torch.int32, device=DEVICE)
    place = on_device(rows, torch.int64)
    reads = triton_state.commit_prefill(chunk, before, ring=ring, rows=place, evicts=evicts)
    for i in range(b):
        for h in range(HEADS):
            wanted = real[i] * int(older[i, h])
            for query in range(recent, stop[i]):
                near = range(start[i], query + 1)
                wanted += sum(query - j <= WINDOW or not evicted[i, h, j] for j in near)
            assert int(reads[i, h]) == wanted
            after, end = seen[i] + real[i], int(chunk.lengths[i, h])
            for token in range(after - WINDOW - 1, after):
                entry = int(ring[rows[i], h, token % (WINDOW + 1)])
                back = after - token
                marked = int(evicted[i, h, stop[i] - back]) if token >= 0 else 0
                noted = 2 * (end - back) + marked if token >= 0 else 0
                assert entry == (noted if evicts else -7)
    assert (ring[2] == -7).all()


def lists_with_leaving_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths [2, 2], and slots of tokens that leave, [2, 2, RECENT]: all over, none, the last."""
    draw, lengths = random.Random(3), [[30, 9], [6, 40]]
    leaving = torch.full((2, 2, RECENT), -1, dtype=torch.int32)
    some = [draw.sample(range(30), 6), [], list(range(6)), draw.sample(range(30, 40), 6)]
    for number, slots in enumerate(some):
        leaving.view(4, -1)[number, RECENT - len(slots) :] = torch.tensor(slots)
    return on_device(lengths), leaving.to(DEVICE)


def test_pages_that_a_chunk_changes():
    lengths, slots = lists_with_leaving_tokens()
    changed = triton_state.changed_pages(lengths, slots, 70, PAGE)
    for number in range(4):
        held = [slot for slot in slots.view(4, -1)[number].tolist() if slot >= 0]
        behind = (int(lengths.view(-1)[number]) - len(held)) // PAGE
        wanted = [place >= behind or place in {s // PAGE for s in held} for place in range(70)]
        assert changed.view(4, -1)[number].tolist() == wanted


def test_the_last_tokens_of_a_list_fill_its_gaps():
    lengths, leaving = lists_with_leaving_tokens()
    size, places = 3, 10
    table = torch.randperm(4 * places, generator=torch.manual_seed(4)).int().view(2, 2, places)
    content = torch.randn(4 * places, 2, PAGE, size, generator=torch.manual_seed(5)).to(DEVICE)
    pages = Pages(content.clone(), table.to(DEVICE))
    triton_state.close_gaps(pages, lengths, leaving)
    for number in range(4):
        before, after = (
            x[table.view(4, -1)[number].long()].transpose(1, 2).flatten(0, 1)
            for x in (content, pages.pages)
        )
        gone = {slot for slot in leaving.view(4, -1)[number].tolist() if slot >= 0}
        length = int(lengths.view(-1)[number])
        cut = length - len(gone)
        for slot in range(cut):
            if slot not in gone:
                assert torch.equal(after[slot], before[slot])
        stays = [before[slot].flatten().tolist() for slot in range(length) if slot not in gone]
        assert sorted(x.flatten().tolist() for x in after[:cut]) == sorted(stays)


def test_a_shared_page_is_copied_before_it_changes():
    """Lists 0 and 2 hold the pages 1 to 3 together with a snapshot; list 1 has two of its own."""
    pages = torch.randn(12, 2, PAGE, 3, generator=torch.manual_seed(6)).to(DEVICE)
    before, free = pages.clone(), FreePages.all_of(11, DEVICE)
    free.left.fill_(6)  # 11 to 6
    table = on_device([[1, 2, 3, 0], [4, 5, 0, 0], [1, 2, 3, 0]])
    free.holders[1:4] = 3
    changed = on_device([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]], torch.bool)
    lists = on_device([0, 1, 2], torch.int64)
    lengths = on_device([3 * PAGE, 2 * PAGE, 2 * PAGE + 1])
    dispatch.triton_kernels().copy_shared_pages(table, lengths, changed, lists, pages, free)
    assert table[1].tolist() == [4, 5, 0, 0]
    assert [table[0, 1].item(), *table[2, :2].tolist()] == [2, 1, 2]
    copies = [table[0, 0].item(), table[0, 2].item(), table[2, 2].item()]
    assert len(set(copies)) == 3
    assert min(copies) > 5
    for copy, page in zip(copies, (1, 3, 3), strict=True):
        assert torch.equal(pages[copy], before[page])
    assert torch.equal(pages[:6], before[:6])
    assert free.holders[1:6].tolist() == [2, 3, 1, 1, 1]
    assert (int(free.left), int(free.fault)) == (3, 0)
    taken = on_device([2], torch.int64)
    free.left.fill_(0)
    dispatch.triton_kernels().copy_shared_pages(table, lengths, ~changed[2:], taken, pages, free)
    assert int(free.fault)  # no page is left for a copy
