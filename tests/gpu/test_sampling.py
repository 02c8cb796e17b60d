"""Top-k, top-p and min-p on a GPU, beside the sampler of torch operations: whole vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.inference.sampler import SamplingRow, sample, stream_keys
from dms_train.kernels.layers.types import SamplingLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
KINDS = [
    SamplingParams(top_p=0.95, temperature=0.6),
    SamplingParams(top_k=20, top_p=0.95, temperature=0.6),
    SamplingParams(top_k=50),
    SamplingParams(min_p=0.05),
    SamplingParams(),
    SamplingParams(temperature=0.0, top_p=0.5),
    SamplingParams(top_p=0.999, temperature=2.0),
    SamplingParams(top_k=100_000, top_p=0.5, min_p=1e-4, temperature=1.5),
    SamplingParams(top_p=1e-6),
]


class Sampler:
    """The kernels' inputs for so many rows, which do not move."""

    def __init__(self, count: int, vocab: int, dtype: torch.dtype) -> None:
        from dms_train.kernels.layers import triton_sample

        whole = torch.zeros(4, count, dtype=torch.int64, device="cuda")
        self.keys, self.top_k, self.tokens, self.last = whole
        self.rows = torch.arange(count, device="cuda")
        self.shares = torch.ones(3, count, dtype=torch.float64, device="cuda")
        self.logits = torch.zeros(count, vocab, dtype=dtype, device="cuda")
        self.memory = triton_sample.sample_workspace(count, self.keys.device)
        self._sample = triton_sample.sample

    def set(self, logits: Tensor, rows: list[SamplingRow]) -> None:
        """Set what the next `run` draws."""
        params = [row.params for row in rows]
        self.logits.copy_(logits)
        self.keys.copy_(stream_keys(*torch.tensor([row.stream for row in rows]).T))
        self.top_k.copy_(torch.tensor([p.top_k for p in params]))
        shares = [[p.temperature, p.top_p, p.log_min_p] for p in params]
        self.shares.copy_(torch.tensor(shares, dtype=torch.float64).T)

    def run(self) -> None:
        """Draw a token for every row."""
        temperature, top_p, log_min_p = self.shares
        self._sample(
            self.logits,
            temperature,
            self.keys,
            self.rows,
            tokens=self.tokens,
            last=self.last,
            memory=self.memory,
            limits=SamplingLimits(self.top_k, top_p, log_min_p),
        )


def logits_like_a_model(count: int, vocab: int) -> Tensor:
    """A few likely tokens before many unlikely ones."""
    logits = 2.5 * torch.randn(count, vocab, device="cuda")
    likely = torch.randint(0, vocab, (count, 30), device="cuda")
    return logits.scatter_add_(1, likely, 6 + 6 * torch.rand(count, 30, device="cuda"))


def rows_of(count: int, seed: int) -> list[SamplingRow]:
    kinds = (KINDS[i % len(KINDS)] for i in range(count))
    return [SamplingRow(p, seed + i, i % 3, [], [1] * (i % 7)) for i, p in enumerate(kinds)]


@pytest.mark.parametrize(
    ("count", "vocab", "dtype"),
    [
        (1, 151_936, torch.bfloat16),
        (45, 128_256, torch.bfloat16),
        (200, 32_000, torch.float32),
        (9, 32_000, torch.float16),
    ],
)
def test_tokens_are_those_of_the_sampler(count: int, vocab: int, dtype: torch.dtype) -> None:
    """In a captured graph; logits as of a model, flat ones and ones with many equal."""
    torch.manual_seed(count)
    sampler = Sampler(count, vocab, dtype)
    sampler.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.run()
    likely = logits_like_a_model(count, vocab)
    for seed, logits in enumerate((likely, likely / 10, likely.round(), likely * 0, -likely)):
        rows = rows_of(count, 1000 * seed)
        sampler.set(logits, rows)
        graph.replay()
        expected = [s.token for s in sample(sampler.logits, rows)]
        assert sampler.tokens.tolist() == expected
        alone = Sampler(1, vocab, dtype)
        alone.set(logits[-1:], rows[-1:])
        alone.run()
        assert alone.tokens.tolist() == expected[-1:]


def test_draws_follow_the_softmax_of_what_top_p_leaves() -> None:
    """A chi-squared test of many rows with the same logits."""
    torch.manual_seed(0)
    count, vocab = 16_384, 500
    logits = 2 * torch.randn(vocab, device="cuda").expand(count, -1)
    sampler, params = Sampler(count, vocab, torch.float32), SamplingParams(top_p=0.6)
    sampler.set(logits, [SamplingRow(params, seed, 0, [], []) for seed in range(count)])
    sampler.run()
    shares = logits[0].double().softmax(0)
    ordered, order = shares.sort(descending=True)
    left = order[ordered.cumsum(0) - ordered < 0.6]
    expected = shares[left] / shares[left].sum() * count
    found = torch.bincount(sampler.tokens, minlength=vocab)[left]
    assert int(found.sum()) == count
    assert expected.min() > 5
    excess = ((found - expected) ** 2 / expected).sum() - (len(left) - 1)
    assert abs(excess) < 5 * (2 * len(left)) ** 0.5
