"""The kernel that chooses the token that leaves, and the attention's logits, beside plain loops."""

from __future__ import annotations

import pytest
import torch

from dms_train.kernels.decode import reference
from dms_train.kernels.decode.types import (
    CHOSEN,
    DECAYED,
    LEAST,
    MAXIMUM,
    MEAN,
    OLDEST,
    SUM,
    SUMMED,
    AttentionTuning,
    Choice,
    Decisions,
    SlotLogits,
)
from tests.support import paged_cases as problems
from tests.support.paged_cases import Shape

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, START = 11, (0, 3, 40)
WAYS = {
    "oldest": (OLDEST, (2, 0, 3), (5, 1, 4), {}),
    "heavy": (SUMMED, (6, 4, 3), (3, 2, 2), {"reduce": MEAN}),
    "heavy_max": (SUMMED, (7, 1, 3), (0, 1, 2), {"reduce": MAXIMUM}),
    "least": (LEAST, (6, 9, 3), (0, 1, 0), {"reduce": SUM}),
    "least_together": (LEAST, (6, 5, 3), (0, 1, 0), {"together": True}),
    "decayed": (DECAYED, (6, 9, 3), (0, 1, 0), {}),
}


def with_positions(shape):
    cache = problems.empty_cache(shape)
    slots = shape.places * shape.page_slots
    positions = torch.zeros(shape.rows, shape.heads, slots, dtype=torch.int32, device=DEVICE)
    return cache._replace(positions=positions), torch.zeros_like(positions, dtype=torch.float32)


@pytest.mark.parametrize(
    ("way", "heads"), [*((way, 2) for way in WAYS), ("least_together", 3)], ids=str
)
def test_the_same_tokens_leave_as_in_loops(way, heads):
    """Step by step: slots, positions, scores and output; rows begin at different times."""
    from dms_train.kernels.decode import triton_append, triton_attention, triton_choose

    kind, limit, recent, how = WAYS[way]
    shape = Shape(window=0, heads=heads, group=heads, device=DEVICE)
    limits = [torch.tensor(x, device=DEVICE) for x in (limit, recent)]
    choice, scale = Choice(kind, *limits, **how), 16**-0.5
    cache, scores = with_positions(shape)
    loops = problems.copied(cache)
    summed, rule = scores.cpu().double(), Decisions(CHOSEN)
    logits = SlotLogits(
        torch.zeros(3 * heads, heads, 64, device=DEVICE),
        torch.zeros(3 * heads, heads, device=DEVICE),
    )
    tuning = AttentionTuning(tile=16, per_sm=2)
    draw = shape.draw()
    for t in range(STEPS):
        at = t - torch.tensor(START, device=DEVICE)
        step = problems.random_step(shape, at.clamp(min=-1), t)._replace(signal=None)
        rotated = triton_append.append(step, cache, rule)
        memory = triton_attention.attention_workspace(rotated, cache, tuning)
        output = triton_attention.attend(rotated, cache, step.rows, scale, memory, logits=logits)
        brought = -torch.rand(3, heads, generator=draw, device=DEVICE)
        triton_choose.choose(
            cache,
            choice,
            step.rows,
            step.position,
            logits=None if kind == DECAYED else logits,
            scores=scores,
            brought=brought,
        )
        plain = problems.on_cpu(step)
        query = reference.append(plain, loops, rule)
        expected = reference.attend(query, loops, plain.rows, scale)
        reference.choose(loops, choice, plain, query, scale, summed, brought.cpu())
        busy = (at >= 0).cpu()
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(output.cpu().double()[busy], expected[busy], **close)
        for x, y in ((cache.ring, loops.ring), (cache.lengths, loops.lengths)):
            assert torch.equal(x.cpu(), y)
        assert torch.equal(cache.positions.cpu(), loops.positions)
        if kind in (SUMMED, DECAYED):
            torch.testing.assert_close(scores.cpu().double(), summed, **close)
    assert int(cache.lengths[0].max()) < STEPS  # slots were used again
    assert int(cache.free.fault) == 0


@pytest.mark.parametrize("per_sm", [1, 20])
def test_weights_follow_from_logits(per_sm):
    """KV lists that one program attends, and those that several share."""
    from dms_train.kernels.decode import triton_attention

    shape = Shape(device=DEVICE)
    lengths = torch.tensor([[0, 5], [1, 64], [33, 16]], dtype=torch.int32, device=DEVICE)
    cache = problems.filled_cache(shape, lengths)
    query = torch.randn(3, 4, 16, generator=shape.draw(), device=DEVICE)
    rows = torch.tensor([2, 0, 1], device=DEVICE)
    tuning = AttentionTuning(tile=16, per_sm=per_sm)
    memory = triton_attention.attention_workspace(query, cache, tuning)
    logits = SlotLogits(torch.zeros(6, 2, 64, device=DEVICE), torch.zeros(6, 2, device=DEVICE))
    triton_attention.attend(query, cache, rows, 0.25, memory, logits=logits)
    for i, row in enumerate(rows.tolist()):
        for head in range(2):
            key, _ = reference.live_slots(problems.copied(cache), row, head)
            queries = query[i, 2 * head : 2 * head + 2].cpu().double()
            found = (
                logits.logits[2 * i + head, :, : len(key)] - logits.totals[2 * i + head, :, None]
            )
            expected = (queries @ key.T * 0.25).softmax(-1)
            torch.testing.assert_close(found.cpu().double().exp2(), expected, rtol=1e-5, atol=1e-5)
