"""Reported slots, reads and ratios equal a count over the visible keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dms_train.method import accounting
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible

WORKED = torch.tensor([c == "1" for c in "0111010000"])


def spec(window: int, shift: int = 1, eviction: str = "delayed") -> DMSSpec:
    return PRESETS["dms"].override(window=window, decision_shift=shift, eviction=eviction)


def test_worked_example_reads_38_of_55_slots_and_holds_6() -> None:
    live = accounting.live_slots(WORKED, spec(3))
    assert live.tolist() == [1, 2, 3, 4, 4, 4, 4, 5, 5, 6]
    assert live.max() == 6
    assert accounting.kv_reads(WORKED, spec(3)) == 38
    assert accounting.cr_factor(WORKED, spec(3)) == pytest.approx(10 / 6)


def test_nvidias_eight_tokens_compress_by_one_point_six() -> None:
    evicts = torch.tensor([c == "1" for c in "01101001"])
    assert accounting.cr_factor(evicts, spec(2)) == 1.6


@given(
    length=st.integers(1, 20),
    window=st.integers(1, 12),
    shift=st.sampled_from([0, 1]),
    eviction=st.sampled_from(["delayed", "immediate"]),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_every_count_equals_the_visible_keys(
    length: int, window: int, shift: int, eviction: str, seed: int, share: float
) -> None:
    s = spec(window, shift, eviction)
    evicts = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(seed)) < share
    counted = visible(evicts, s).sum(-1)
    assert torch.equal(accounting.live_slots(evicts, s), counted)
    assert accounting.kv_reads(evicts, s) == pytest.approx(counted.sum(-1).double().mean().item())
    mean_live = counted[..., -1].double().mean().item()
    assert accounting.cr_factor(evicts, s) == pytest.approx(length / mean_live)


def test_ratio_is_tokens_over_mean_slots_not_a_mean_of_ratios() -> None:
    evicts = torch.tensor([[False] * 10, [True] * 10])
    live = accounting.live_slots(evicts, spec(1))[:, -1]
    assert live.tolist() == [10, 2]
    assert accounting.cr_factor(evicts, spec(1)) == pytest.approx(10 / 6)


def test_a_text_inside_the_window_does_not_compress() -> None:
    assert accounting.cr_factor(torch.ones(5, dtype=torch.bool), spec(4)) == 1.0
