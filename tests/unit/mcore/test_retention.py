"""An evaluation counts for each KV head what the decisions of each text give."""

from __future__ import annotations

import pytest
import torch

from dms_train.families import LayerAttention
from dms_train.method.accounting import live_slots
from dms_train.method.plan import StepPlan
from tests.support import tiny

HARD = StepPlan(eviction="hard", channel_scale=0.0, loss="lm")


@pytest.mark.parametrize("window", [None, 7])
def test_kept_is_what_the_decisions_of_every_sample_leave(build, window):
    """A first layer with a window has no row, so that the only row is that of layer 1."""
    layers = tuple(LayerAttention(rotary_base=1e4, window=each) for each in (window, None))
    changes = {} if window is None else {"layers": layers}
    engine = build("qwen3", "dms", trains=False, alpha_offset=0.5, sizes=changes)
    batches = tiny.microbatches(0, 1)
    result = engine.evaluate(HARD, batches)
    texts = torch.cat([batch.tokens for batch in batches])
    logits = torch.stack([engine.record(HARD, text).decision_logits for text in texts])
    live = live_slots(logits > 0, engine.spec)[..., -1].double()  # [samples, layers, heads]
    expected = live.mean(0) / tiny.LENGTH
    assert 0 < expected.min() < expected.max() <= 1
    assert torch.tensor(result.kept, dtype=torch.float64).allclose(expected, atol=1e-12)
    assert 1 / expected.mean().item() == pytest.approx(result.cr_factor)
    assert result.kept_layers == ((0, 1) if window is None else (1,))


def test_nothing_is_counted_without_evictions_nor_in_training(build):
    engine = build("llama", "dms")
    plan = StepPlan(loss="lm")
    assert engine.evaluate(plan, tiny.microbatches(0, 1)).kept == ()
    engine.forward_backward(HARD, tiny.microbatches(0, 1))
    layers = [layer for model in engine._models for layer in model.decoder.layers]
    assert all(layer.self_attention.held is None for layer in layers)
