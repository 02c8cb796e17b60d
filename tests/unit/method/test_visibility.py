"""The visibility rule against worked examples and a literal loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dms_train.method.dms.spec import DMSSpec
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import align_to_keys, outside_window, visible

NVIDIA = """
1.......
11......
111.....
.111....
..111...
..1111..
..1.111.
..1.1111
"""
FASTDMS = """
1.......
11......
111.....
1111....
1.111...
1..111..
1..1111.
1..1.111
"""


def spec(window: int, shift: int = 1, eviction: str = "delayed") -> DMSSpec:
    return PRESETS["dms"].override(window=window, decision_shift=shift, eviction=eviction)


def table(text: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in text.split()])


def decisions(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def by_loop(evicts: list[bool], s: DMSSpec) -> Tensor:
    """The rule in words: a key outside the window is invisible if its decision is to evict."""
    length = len(evicts)
    delay = s.decision_shift + (s.window if s.eviction == "immediate" else 0)
    rows = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            gone = i - j > s.window and evicts[j + delay]
            rows[i, j] = not gone
    return rows


@pytest.mark.parametrize(("shift", "expected"), [(1, NVIDIA), (0, FASTDMS)])
def test_eight_tokens_equal_what_the_public_implementations_show(shift: int, expected: str) -> None:
    assert torch.equal(visible(decisions("01101001"), spec(2, shift)), table(expected))


def test_ten_tokens_keep_the_slots_of_the_worked_example() -> None:
    rows = visible(decisions("0111010000"), spec(3))
    assert rows.sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 5, 5, 6]
    assert rows[-1].nonzero().flatten().tolist() == [3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("distance", "seen"), [(3, True), (4, True), (5, False), (6, False)])
def test_an_evicted_key_is_seen_up_to_the_window_and_no_further(
    shift: int, distance: int, seen: bool
) -> None:
    evicts = torch.zeros(12, dtype=torch.bool)
    evicts[2 + shift] = True
    assert visible(evicts, spec(4, shift))[2 + distance, 2].item() is seen


def test_immediate_eviction_reads_the_decision_when_the_key_leaves_the_window() -> None:
    evicts = decisions("00000100")  # taken at position 5, which governs key 5 - (3 + 1)
    rows = visible(evicts, spec(3, 1, "immediate"))
    expected = torch.ones(8, 8, dtype=torch.bool).tril()
    expected[5:, 1] = False
    assert torch.equal(rows, expected)


specs = st.builds(
    spec, st.integers(1, 9), st.sampled_from([0, 1]), st.sampled_from(["delayed", "immediate"])
)
bits = st.lists(st.booleans(), min_size=1, max_size=14)


@given(evicts=bits, s=specs)
def test_rule_equals_its_description(evicts: list[bool], s: DMSSpec) -> None:
    assert torch.equal(visible(torch.tensor(evicts), s), by_loop(evicts, s))


@given(evicts=bits, s=specs, shorter=st.integers(1, 14))
def test_more_tokens_never_change_earlier_rows(
    evicts: list[bool], s: DMSSpec, shorter: int
) -> None:
    whole = visible(torch.tensor(evicts), s)
    n = min(shorter, len(evicts))
    assert torch.equal(visible(torch.tensor(evicts[:n]), s), whole[:n, :n])


@given(evicts=bits, s=specs)
def test_a_key_that_is_gone_stays_gone(evicts: list[bool], s: DMSSpec) -> None:
    rows = visible(torch.tensor(evicts), s)
    returned = rows[1:] & ~rows[:-1]
    own = torch.eye(len(evicts), dtype=torch.bool)[1:]
    assert torch.equal(returned, own)


def test_nothing_evicted_is_causal_and_everything_evicted_is_a_window() -> None:
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(visible(torch.zeros(9, dtype=torch.bool), spec(3)), causal)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    everything = visible(torch.ones(9, dtype=torch.bool), spec(3))
    assert torch.equal(everything, causal & (distance <= 3))


def test_decisions_of_heads_and_samples_are_independent() -> None:
    evicts = torch.rand(2, 3, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = visible(evicts, spec(2))
    assert rows.shape == (2, 3, 11, 11)
    for sample in range(2):
        for head in range(3):
            assert torch.equal(rows[sample, head], visible(evicts[sample, head], spec(2)))


def test_alignment_moves_decisions_to_their_keys_and_keeps_the_rest() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert align_to_keys(values, spec(2, 0), 9.0).tolist() == [1, 2, 3, 4]
    assert align_to_keys(values, spec(2, 1), 9.0).tolist() == [2, 3, 4, 9]
    assert align_to_keys(values, spec(2, 1, "immediate"), 9.0).tolist() == [4, 9, 9, 9]
    assert align_to_keys(values, spec(9, 1, "immediate"), 9.0).tolist() == [9, 9, 9, 9]


def test_leaving_the_window_depends_on_positions_not_on_indices() -> None:
    late = outside_window(torch.tensor([7]), torch.tensor([3, 4, 5]), 2)
    assert late.tolist() == [[True, True, False]]
