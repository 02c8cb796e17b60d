"""The kernels of long prompts, run by Triton's interpreter, against masked dense float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from dms_train.kernels.errors import KernelError
from dms_train.kernels.prefill import sparse as prefill
from dms_train.kernels.prefill.lists import PrefillState, Tokens
from tests.support.prefill_cases import (
    InChunks,
    Prompt,
    assert_near,
    check_chunks,
    check_ragged,
    expected_output,
    in_one_go,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu runs the same on the GPU"
)

CASES = [
    Prompt(),
    Prompt(b=2, h=3, group=1, s=70, window=1, odds=0.9),
    Prompt(h=1, group=5, s=129, d=24, window=64, page_slots=16),
    Prompt(s=64, window=200),
    Prompt(s=1),
    Prompt(odds=0.0),
    Prompt(odds=1.0, window=3, s=200),
    Prompt(h=4, s=300, window=37, odds=0.95, page_slots=128),
    Prompt(d=64, s=100, window=5),
    Prompt(d=8, s=100, window=5),
    Prompt(b=2, h=3, s=70, window=9, odds=0.9, sinks=True),
]


@pytest.mark.parametrize("p", CASES)
def test_a_whole_prompt_equals_masked_dense_attention(p: Prompt) -> None:
    assert_near(*in_one_go(p))


@pytest.mark.parametrize(
    ("sizes", "shift"),
    [([150], 1), ([50, 50, 50], 1), ([1, 2, 147], 0), ([100, 1, 49], 21), ([64, 64, 22], 1)],
)
@pytest.mark.parametrize("odds", [0.3, 0.9, 1.0])
def test_a_prompt_in_chunks_equals_masked_dense_attention(
    sizes: list[int], shift: int, odds: float
) -> None:
    check_chunks(InChunks(Prompt(b=2, odds=odds), sizes, shift))


@pytest.mark.parametrize("evicts", [False, True])
def test_chunks_of_heads_with_sinks_equal_masked_dense_attention(evicts: bool) -> None:
    p = Prompt(b=2, s=90, odds=0.7 if evicts else 0.0, sinks=True)
    check_chunks(InChunks(p, [40, 50], 1))
    query, key, value, evicted = p.tensors()
    none = torch.zeros(p.b, p.h, dtype=torch.int32)
    state = PrefillState(none, none[:, 0], evicted[..., :0])
    chunk = prefill.count(evicted, none, kept=p.window + 1)
    pages = prefill.fresh_pages(key, p.s, 16)
    tokens = Tokens(query, key, value)
    out = prefill.extend_prompt(tokens, chunk, state, pages, **p.how, evicts=evicts)
    assert_near(out, expected_output(query, key, value, evicted, p))


@pytest.mark.parametrize("odds", [0.5, 1.0])
def test_lists_may_be_in_any_order_before_a_chunk(odds: float) -> None:
    sizes = [7, 40, 60, 43]
    check_chunks(InChunks(Prompt(b=2, odds=odds), sizes, 1, shuffled=True))


def test_sequences_of_one_batch_may_differ_in_length() -> None:
    check_ragged(Prompt(s=140, window=10), starts=[0, 30, 64], stops=[140, 100, 65])


def test_an_evicted_value_has_no_effect_even_if_it_is_huge() -> None:
    p = Prompt(s=100, window=4, odds=1.0)
    query, key, value, evicted = p.tensors()
    evicted[..., 10] = True
    none = torch.zeros(p.b, p.h, dtype=torch.int32)
    outs = []
    for x in (0.0, 1e30):
        value[:, :, 10] = x
        chunk = prefill.count(evicted, none)
        pages = prefill.fresh_pages(key, p.s, 16)
        outs.append(prefill.extend(Tokens(query, key, value), chunk, pages, **p.how))
    assert torch.equal(outs[0][:, :, 15:], outs[1][:, :, 15:])
    assert not torch.equal(outs[0][:, :, 10:15], outs[1][:, :, 10:15])


def test_scores_far_from_zero_do_not_overflow() -> None:
    p = Prompt(s=90, window=7)
    query, key, value, evicted = p.tensors()
    chunk = prefill.count(evicted, torch.zeros(p.b, p.h, dtype=torch.int32))
    pages = prefill.fresh_pages(key, p.s, 16)
    out = prefill.extend(Tokens(1e3 * query, key, value), chunk, pages, **p.how)
    exact = expected_output(1e3 * query, key, value, evicted, p)
    # rounding of scores near 1e3 dominates
    assert (out - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 150, 16)}, "3 query heads for 2 KV heads"),
        ({"query": torch.zeros(1, 4, 150, 16).half()}, "dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    p = Prompt()
    query, key, value, evicted = p.tensors()
    chunk = prefill.count(evicted, torch.zeros(p.b, p.h, dtype=torch.int32))
    given = {"query": query, "key": key, "value": value} | change
    pages = prefill.fresh_pages(key, p.s)
    with pytest.raises(KernelError, match=message):
        prefill.extend(Tokens(**given), chunk, pages, **p.how)
