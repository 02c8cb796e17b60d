"""The importance that KVzap's scorer predicts, and its loss, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.kvzap import attention
from dms_train.method.kvzap.attention import KVzapLayer, importance
from dms_train.method.layer import Heads, LayerPass
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS

METHOD = PRESETS["kvzap"].override(window=3, alpha_scale=0.5)
LENGTHS = [[7, 5], [12]]


def heads() -> Heads:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(12, 2, 2, 3, 4, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 12, 2, 2, 4, generator=draw, dtype=torch.float64)
    return Heads(query, key, value)


def by_loop(given: Heads, lengths) -> torch.Tensor:
    """Largest weight of each token from queries more than three tokens later, [b, g, s]."""
    found = torch.zeros(2, 2, 12, dtype=torch.float64)
    for sample in range(2):
        begin = 0
        for length in lengths[sample]:
            for g in range(2):
                for r in range(3):
                    for i in range(begin, begin + length):
                        keys = given.key[begin : i + 1, sample, g]
                        weights = (keys @ given.query[i, sample, g, r] / 2).softmax(0)
                        for j in range(begin, i - 3):
                            found[sample, g, j] = max(found[sample, g, j], weights[j - begin])
            begin += length
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("block", [256, 5])
def test_importance_and_loss_equal_loops(monkeypatch, packed, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    documents = PackedDocuments.of([torch.tensor(x) for x in LENGTHS], 12) if packed else None
    given, expected = heads(), by_loop(heads(), LENGTHS if packed else [[12], [12]])
    torch.testing.assert_close(importance(given.query, given.key, 3, documents), expected)
    step = LayerPass(
        plan=StepPlan(eviction="soft", channel_scale=0.0),
        options=METHOD,
        target=0.75,
        documents=documents,
        noise=None,
        rotate=lambda query, key: (query, key),
        sum_ranks=lambda x: x,
        first_rank=True,
        heads=2,
        recorded=False,
    )
    layer = KVzapLayer(METHOD.spec)
    channel = given.query[:, :, :, 0, 0].clone()
    cleared = given.query.clone()
    cleared[:, :, :, 0, 0] = 0  # what the attention sees
    _, decided = layer.prepare(given, step)
    seen = by_loop(given._replace(query=cleared), LENGTHS if packed else [[12], [12]])
    total = 0.0
    for sample in range(2):
        for g in range(2):
            for j in range(12):
                if seen[sample, g, j] > 0:
                    predicted = 0.5 * channel[j, sample, g].item()
                    total += (predicted + math.log(seen[sample, g, j])) ** 2
    stats = EvictionStats.of(decided.stats)
    assert stats.own_loss.sum().item() == pytest.approx(total, rel=1e-5)
    assert layer.loss(stats, 48, 0.75, METHOD).item() == pytest.approx(total / 2 / 48, rel=1e-5)
    assert not decided.log_keep.any()


def test_the_threshold_marks_tokens_by_their_predicted_importance():
    channel = torch.tensor([[[0.0]], [[9.9]], [[10.1]]])
    layer = KVzapLayer(METHOD.spec)  # offset 5, scale 0.5
    query = torch.zeros(3, 1, 1, 2, 4)
    query[..., 0, 0] = channel
    assert layer.hard(query, query[..., 0, :])[:, 0, 0].tolist() == [False, False, True]
