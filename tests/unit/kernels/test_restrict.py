"""Top-k, top-p and min-p of the kernel, in Triton's interpreter, against loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.kernels import dispatch
from dms_train.kernels.layers.types import SamplingLimits
from tests.support import sampling_truth

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if not dispatch.is_supported(DEVICE):
    pytest.skip("needs triton", allow_module_level=True)

triton_restrict = pytest.importorskip("dms_train.kernels.layers.triton_restrict")
triton_sample = pytest.importorskip("dms_train.kernels.layers.triton_sample")

KINDS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=40),
    SamplingParams(min_p=0.05),
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.7, min_p=0.01),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=1_000_000, top_p=0.99999),
    SamplingParams(min_p=1.0),
]


def sampled(logits: Tensor, params: list[SamplingParams], keys: Tensor, memory=None) -> list[int]:
    """Return the tokens that the kernel draws for rows, each of them in use."""
    temperature, top_p, log_min_p = torch.tensor(
        [[p.temperature, p.top_p, p.log_min_p] for p in params], dtype=torch.float64, device=DEVICE
    ).T.contiguous()
    top_k = torch.tensor([p.top_k for p in params], device=DEVICE)
    rows = torch.arange(len(params), device=DEVICE)
    tokens, last = torch.full_like(rows, -7), torch.full_like(rows, -7)
    memory = memory or triton_sample.sample_workspace(len(params), DEVICE)
    limits = SamplingLimits(top_k, top_p, log_min_p)
    triton_sample.sample(
        logits, temperature, keys, rows, tokens=tokens, last=last, memory=memory, limits=limits
    )
    assert torch.equal(tokens, last)
    assert not memory.arrived.any()
    between_launches(memory.restricted)
    return tokens.tolist()


def between_launches(memory) -> None:
    """Check the counters that the next launch adds to."""
    assert not memory.arrived.any()
    assert not memory.sums.any()
    assert not memory.near.any()
    assert not memory.total.any()


def random_keys(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "listed"), [(1, 4096), (7, 4), (1025, 16), (3000, 4096)])
def test_tokens_are_drawn_from_what_is_left(
    monkeypatch, vocab: int, listed: int, dtype: torch.dtype
) -> None:
    """Rows have different parameters; 16-bit logits are often equal."""
    monkeypatch.setattr(triton_restrict, "LISTED", listed)
    torch.manual_seed(vocab)
    logits = (2 * torch.randn(len(KINDS), vocab, device=DEVICE)).to(dtype)
    keys = random_keys(len(KINDS))
    expected = [sampling_truth.drawn(*row) for row in zip(logits, KINDS, keys, strict=True)]
    assert sampled(logits, KINDS, keys) == expected


def equal(vocab: int) -> Tensor:
    return torch.full((vocab,), -3.0)


def signs_of_zero(vocab: int) -> Tensor:
    """They are equal."""
    return torch.tensor([-0.0, 0.0]).repeat(vocab // 2)


def few_values(vocab: int) -> Tensor:
    return torch.randn(vocab).round()


def excluded_tokens(vocab: int) -> Tensor:
    return torch.where(torch.arange(vocab) % 5 == 1, torch.randn(vocab), -torch.inf)


def large(vocab: int) -> Tensor:
    return 1e30 * torch.randn(vocab)


def of_both_signs(vocab: int) -> Tensor:
    return 100 * torch.randn(vocab)


@pytest.mark.parametrize(
    ("make", "temperature"),
    [
        (equal, 1.0),
        (signs_of_zero, 1.0),
        (few_values, 3.0),
        (excluded_tokens, 1.0),
        (large, 1.0),
        (of_both_signs, 1e3),
        (of_both_signs, 10.0),
    ],
)
def test_of_equal_logits_the_first_are_left(make, temperature: float) -> None:
    """Also where a share is reached exactly, and where logits are far apart or close together."""
    torch.manual_seed(0)
    shares = (0.1, 0.25, 0.5, 0.75, 0.9)
    how = [{"top_p": share} for share in shares]
    how += [{"top_k": k, "top_p": 0.5} for k in (1, 2, 64, 200)] + [{"top_k": k} for k in (5, 300)]
    params = [SamplingParams(temperature=temperature, **fields) for fields in how]
    logits = make(300).repeat(len(params), 1).to(DEVICE)
    keys = random_keys(len(params))
    expected = [sampling_truth.drawn(*row) for row in zip(logits, params, keys, strict=True)]
    assert sampled(logits, params, keys) == expected


def peaked() -> Tensor:
    """1,000 tokens from 0 down to -20, the others far below."""
    return torch.cat([torch.linspace(0.0, -20.0, 1000), torch.full((8000,), -100.0)])


def flat() -> Tensor:
    return torch.zeros(9000)


def rising() -> Tensor:
    """The listed tokens that fit are not the best ones."""
    return torch.linspace(-10.0, 0.0, 9000)


def heavy_tail() -> Tensor:
    """One token near the best logit, and many a little further away."""
    return torch.cat([torch.zeros(1), torch.full((8999,), -12.5)])


@pytest.mark.parametrize(
    ("make", "fields", "searched"),
    [
        (peaked, {"top_p": 0.95}, 0),
        (peaked, {"top_p": 0.99, "temperature": 0.1}, 0),
        (peaked, {"top_p": 0.99, "temperature": 1e6}, 1),
        (peaked, {"top_k": 500}, 0),
        (peaked, {"top_k": 500, "temperature": 0.5}, 0),
        (peaked, {"top_k": 700}, 1),
        (peaked, {"top_k": 700, "top_p": 0.5}, 1),
        (flat, {"top_p": 0.5}, 1),
        (rising, {"top_k": 5}, 1),
        (heavy_tail, {"top_p": 0.95}, 0),
        (heavy_tail, {"top_p": 0.99}, 1),
    ],
)
def test_the_whole_vocabulary_is_searched_where_listed_tokens_do_not_suffice(
    make, fields, searched: int
) -> None:
    """Listed are logits that are at most 12 times the temperature below the best one."""
    params = [SamplingParams(**fields)] * 3
    logits, keys = make().repeat(3, 1).to(DEVICE), random_keys(3)
    expected = [sampling_truth.drawn(*row) for row in zip(logits, params, keys, strict=True)]
    memory = triton_sample.sample_workspace(len(params), DEVICE)
    assert sampled(logits, params, keys, memory) == expected
    assert memory.restricted.open.tolist() == [searched] * 3


def test_top_p_counts_the_tokens_that_are_not_listed() -> None:
    """The best token has 0.963 of the whole weight, and 0.995 of that of the listed tokens.

    A share that is a little larger than the first keeps one more token.
    """
    logits = torch.full((1, 9000), -12.5, device=DEVICE)
    logits[0, 0], logits[0, 1] = 0.0, -5.3
    memory = triton_sample.sample_workspace(1, DEVICE)
    total = logits.double().exp().sum()
    first = float(logits[0, :1].double().exp().sum() / total)
    params = [SamplingParams(top_p=first + 1e-4)]
    sampled(logits, params, random_keys(1), memory)
    rank = triton_restrict.Order.of(logits)
    lowest = int(memory.restricted.lowest[1, 0]) & ((1 << rank.token_bits) - 1)
    assert (1 << rank.token_bits) - 1 - lowest == 1
    assert memory.restricted.open.tolist() == [0]
    listed = float(logits[0, :1].double().exp().sum() / logits[0, :2].double().exp().sum())
    assert listed > params[0].top_p


def test_every_token_that_is_left_is_drawn_and_no_other() -> None:
    """Top-p 0.004 leaves exactly four of 1000 equal tokens."""
    keys = torch.arange(25, device=DEVICE) * 7919
    for params in (SamplingParams(top_p=0.004), SamplingParams(top_k=4)):
        logits = torch.zeros(len(keys), 1000, device=DEVICE)
        assert set(sampled(logits, [params] * len(keys), keys)) == {0, 1, 2, 3}


def test_a_row_draws_the_same_token_alone_and_in_a_batch(monkeypatch) -> None:
    """Whatever the number of programs that share a vocabulary."""
    torch.manual_seed(3)
    logits = torch.randn(len(KINDS), 2500, device=DEVICE).bfloat16()
    keys = random_keys(len(KINDS))
    together = sampled(logits, KINDS, keys)
    alone = [
        sampled(logits[i : i + 1], KINDS[i : i + 1], keys[i : i + 1])[0] for i in range(len(KINDS))
    ]
    assert alone == together
    monkeypatch.setattr(triton_restrict, "_PROGRAMS", 1)
    assert sampled(logits, KINDS, keys) == together


def test_a_place_that_is_not_used_writes_nothing_for_a_sequence() -> None:
    logits = torch.randn(3, 50, device=DEVICE)
    rows = torch.tensor([1, -1, 0], device=DEVICE)
    half = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    tokens, last = torch.zeros_like(rows), torch.full((3,), -7, device=DEVICE)
    limits = SamplingLimits(torch.full_like(rows, 3), half, half.log())
    memory = triton_sample.sample_workspace(4, DEVICE)
    triton_sample.sample(
        logits, half, rows, rows, tokens=tokens, last=last, memory=memory, limits=limits
    )
    assert last.tolist() == [int(tokens[2]), int(tokens[0]), -7]
    between_launches(memory.restricted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinite_logit_is_drawn_with_and_without_limits(dtype: torch.dtype) -> None:
    """As the host does; logits of any dtype are read as float32."""
    logits = torch.linspace(-1, 1, 90, device=DEVICE, dtype=dtype).repeat(len(KINDS), 1)
    keys = random_keys(len(KINDS))
    assert sampled(logits, KINDS, keys) == sampled(logits.float(), KINDS, keys)
    logits[:, 17] = torch.inf
    assert sampled(logits, KINDS, keys) == [17] * len(KINDS)
