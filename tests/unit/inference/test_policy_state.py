"""A cache keeps state for its policy by row, for as long as the row has its request."""

from __future__ import annotations

import torch

from dms_train.inference.cache.policy_state import PolicyState
from dms_train.inference.policies.base import CachePolicy, RequestSizes

CPU = torch.device("cpu")


class Remembers(CachePolicy):
    """Asks for three queries."""

    recent_queries = 3


class Forgets(CachePolicy):
    """Asks for no queries."""


def taking_part(state, row, first, count, padding=0):
    """A pass of a row with tokens at `first` and so on; the query of position p is p + 1."""
    position = torch.tensor([[*range(first, first + count), *[-1] * padding]])
    query = (position + 1).view(1, 1, 1, -1, 1).float()
    rows = torch.tensor([row])
    found = state.sequences(0, rows, position, query)
    state.store(0, rows, found.lists)
    return found


def test_the_newest_queries_for_any_passes_and_padding():
    for passes in ([7], [1] * 7, [2, 5], [5, 1, 1], [3, 4]):
        for padding in (0, 2):
            state, first = PolicyState(Remembers(), layers=1, rows=2, device=CPU), 0
            for count in passes:
                found = taking_part(state, 1, first, count, padding)
                first += count
                newest = [max(0, first - back) for back in (2, 1, 0)]
                assert found.query.flatten().tolist() == newest
            assert (found.start.tolist(), found.end.tolist()) == ([7 - passes[-1]], [7])


def test_a_row_that_is_freed_knows_nothing_and_others_all():
    state = PolicyState(Remembers(), layers=1, rows=2, device=CPU)
    for row in (0, 1):
        state.assign(row, RequestSizes(5, 9, row))
        taking_part(state, row, 0, 4)
    state.reset(torch.tensor([0]))
    found = taking_part(state, 0, 0, 1)
    assert found.query.flatten().tolist() == [0, 0, 1]
    assert found.prompt.tolist() == found.limit.tolist() == [0]
    found = taking_part(state, 1, 4, 1)
    assert found.query.flatten().tolist() == [3, 4, 5]
    assert (found.prompt.tolist(), found.limit.tolist(), found.seed.tolist()) == ([5], [9], [1])


def test_a_snapshot_is_of_its_time_and_goes_to_any_row():
    state = PolicyState(Forgets(), layers=1, rows=2, device=CPU)
    state.store(0, torch.tensor([0]), {"pages": torch.arange(6.0).view(1, 1, 3, 2)})
    stored = state.snapshot(0)
    state.store(0, torch.tensor([0]), {"pages": torch.ones(1, 1, 5, 2)})  # grows
    state.restore(1, stored)
    rows, position = torch.tensor([0, 1]), torch.tensor([[5], [3]])
    lists = state.sequences(0, rows, position, torch.zeros(2, 1, 1, 1, 1)).lists
    assert torch.equal(lists["pages"][0, 0], torch.ones(5, 2))
    assert lists["pages"][1, 0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert state.nbytes == 2 * 5 * 2 * 4
