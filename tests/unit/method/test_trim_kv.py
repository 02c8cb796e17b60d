"""Token retention: loss, bias and policy against loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dms_train.inference.policies.base import NewTokens, RequestSizes
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels.train_attention import blockwise, reference
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import LayerPass
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.trim_kv import attention
from dms_train.method.trim_kv.attention import TrimKVLayer, retained
from tests.unit.inference.policies.rules import HEADS, LENGTH, Rule, compact, dense, run, text

METHOD = PRESETS["trim_kv"].override(alpha_scale=1.0, alpha_offset=1.5)
DOCUMENTS = [[7, 5], [12]]


def layer_pass(target: float, documents: PackedDocuments | None = None, **plan) -> LayerPass:
    return LayerPass(
        plan=StepPlan(**{"eviction": "soft", "channel_scale": 0.0} | plan),
        options=METHOD,
        target=target,
        documents=documents,
        noise=None,
        rotate=lambda query, key: (query, key),
        sum_ranks=lambda x: x,
        first_rank=True,
        heads=2,
        recorded=False,
    )


def by_loop(activation, target, lengths):
    """Tokens held after the last token, read by all queries, and beyond the capacity."""
    s, b, g = activation.shape
    live, reads, excess = ([0.0] * b for _ in range(3))
    for sample in range(b):
        for head in range(g):
            begin = 0
            for length in lengths[sample]:
                beta = [
                    1 / (1 + math.exp(activation[begin + i, sample, head].item() - 1.5))
                    for i in range(length)
                ]
                capacity = max(1.0, (1 - target) * length)
                for t in range(length):
                    held = sum(beta[i] ** (t - i) for i in range(t + 1))
                    reads[sample] += held / s
                    excess[sample] += max(0.0, held - capacity) / (t + 1)
                live[sample] += held
                begin += length
    return live, reads, excess


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("block", [256, 5])
def test_statistics_and_capacity_loss_equal_loops(monkeypatch, packed, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    activation = torch.randn(12, 2, 2, generator=generator, dtype=torch.float64)
    lengths = DOCUMENTS if packed else [[12], [12]]
    documents = PackedDocuments.of([torch.tensor(x) for x in DOCUMENTS], 12) if packed else None
    layer = TrimKVLayer(METHOD.spec)
    decided = layer.decide(activation, layer_pass(0.75, documents))
    beta = (1 / (1 + (activation - 1.5).exp())).permute(1, 2, 0)
    torch.testing.assert_close(decided.log_keep.exp(), beta)
    live, reads, excess = by_loop(activation, 0.75, lengths)
    stats = EvictionStats.of(decided.stats)
    assert stats.live.tolist() == pytest.approx(live, rel=1e-5)
    assert stats.reads.tolist() == pytest.approx(reads, rel=1e-5)
    assert stats.own_loss.tolist() == pytest.approx(excess, rel=1e-5)
    assert min(excess) > 0
    doubled = PRESETS["trim_kv"].override(capacity_weight=2.0)
    loss = layer.loss(stats, 48, 0.75, doubled)
    assert loss.item() == pytest.approx(2 * sum(excess) / len(excess) / 48, rel=1e-5)


def test_the_gradient_of_the_sums_survives_the_blocks(monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", 4)
    log_beta = -torch.rand(1, 2, 9, generator=torch.Generator().manual_seed(2)).double()
    log_beta.requires_grad_()
    assert torch.autograd.gradcheck(retained, (log_beta,))


def test_a_bias_that_grows_with_distance_equals_a_loop():
    """Weights are beta^(i - j) exp(score), with packed documents and without, gradients too."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, heads, 4, generator=draw).double() for heads in (4, 2, 2))
    beta = torch.rand(1, 2, 70, generator=draw).double() * 0.5 + 0.5
    for bounds in ([0, 70], [0, 30, 70]):
        out = torch.zeros_like(q)
        for begin, end in itertools.pairwise(bounds):
            for i in range(begin, end):
                for h in range(4):
                    j = torch.arange(begin, i + 1)
                    weights = (k[0, j, h // 2] @ q[0, i, h] * 0.3).exp()
                    weights = weights * beta[0, h // 2, j] ** (i - j)
                    out[0, i, h] = (weights / weights.sum()) @ v[0, j, h // 2]
        bounds_given = None if len(bounds) == 2 else torch.tensor(bounds, dtype=torch.int32)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, beta.log())]
        found = blockwise.dms_attention(*leaves, None, 0.3, bounds_given)
        torch.testing.assert_close(found, out)
        same = [x.clone().requires_grad_() for x in (q, k, v, beta.log())]
        expected = reference.dms_attention(*same, None, 0.3, bounds_given)
        torch.testing.assert_close(expected, out)
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, two in zip(leaves, same, strict=True):
            torch.testing.assert_close(one.grad, two.grad)


class Retention(Rule):
    """Token by token: the least beta^(t - i) leaves, at the end of the prompt and afterwards."""

    beta: torch.Tensor

    def evict(self, t):
        if t + 1 >= self.request.prompt:
            for g in range(HEADS):
                score = {j: float(self.beta[g, j]) ** (t - j) for j in self.held[g]}
                self.cut(g, score, set(), self.budget)


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunk", [40, 7])
@pytest.mark.parametrize("own", [{"budget": 6}, {"cr": 3.0}, {}], ids=str)
def test_the_policy_keeps_what_a_loop_keeps(build, chunk, own):
    requests = [RequestSizes(24, LENGTH, 0), RequestSizes(11, LENGTH + 8, 1)]
    data = text(len(requests))
    draw = torch.Generator().manual_seed(5)
    beta = torch.rand(len(requests), HEADS, LENGTH, generator=draw) * 0.3 + 0.7
    policy = build_policy("trim_kv", own, METHOD.override(budget=9).spec)
    cache = build(policy, len(requests))
    attend = cache.attend

    def with_signal(layer, rows, query, arrival: NewTokens):
        signal = beta.log()[rows].gather(
            2, arrival.position.clamp(min=0)[:, None].expand(-1, HEADS, -1)
        )
        return attend(layer, rows, query, arrival._replace(signal=signal))

    cache.attend = with_signal
    outputs, reads, kept = run(cache, data, requests, chunk=chunk)
    for row, request in enumerate(requests):
        rule = Retention(data, row, request, **(own or {"budget": 9}))
        rule.beta = beta[row]
        expected, read, after = rule.go()
        torch.testing.assert_close(outputs[row], expected)
        assert torch.equal(reads[row], read)
        for tokens, held in kept[row]:
            assert held == after[tokens - 1]
