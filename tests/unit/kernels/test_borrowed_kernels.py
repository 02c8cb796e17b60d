"""The kernels through `kernels.dispatch` alone, as another engine would call them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import (
    SIGNAL,
    Decisions,
    FreePages,
    HeadNorms,
    PagedCache,
    SlotLogits,
    Step,
)
from dms_train.kernels.prefill.lists import Pages, Tokens
from tests.support import paged_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
WINDOW, PAGE, HEADS, GROUP, SIZE = 5, 4, 2, 2, 16
SCALE = 0.3
ROWS = torch.tensor([2, 0], device=DEVICE)  # of three


class Text(NamedTuple):
    """Tokens before RoPE and the decisions about them; float32, sequences first."""

    query: Tensor  # [b, T, h * g, d]
    key: Tensor  # [b, T, h, d]
    value: Tensor
    evicted: Tensor  # bool [b, h, T]
    cos: Tensor  # [T, d]
    sin: Tensor


def random_text(tokens: int) -> Text:
    draw = torch.Generator(DEVICE).manual_seed(7)
    put = {"generator": draw, "device": DEVICE}
    query = torch.randn(len(ROWS), tokens, HEADS * GROUP, SIZE, **put)
    key, value = torch.randn(2, len(ROWS), tokens, HEADS, SIZE, **put)
    evicted = torch.rand(len(ROWS), HEADS, tokens, **put) < 0.6
    angle = torch.arange(tokens, device=DEVICE)[:, None] * 30.0 ** -torch.linspace(
        0, 1, SIZE // 2, device=DEVICE
    )
    angle = torch.cat([angle, angle], 1).to(DEVICE)
    return Text(query, key, value, evicted, angle.cos(), angle.sin())


def rotated(x: Tensor, text: Text) -> Tensor:
    """RoPE on [b, T, heads, d]."""
    first, second = x.chunk(2, -1)
    cos, sin = text.cos[:, None].to(x.dtype), text.sin[:, None].to(x.dtype)
    return x * cos + torch.cat([-second, first], -1) * sin


def brute_force(text: Text) -> tuple[Tensor, Tensor]:
    """Attention in float64, [b, T, h * g, d], and live tokens at the end, [b, h]."""
    query, key = rotated(text.query.double(), text), rotated(text.key.double(), text)
    time = torch.arange(text.query.shape[1], device=DEVICE)
    distance = time[:, None] - time
    read = (distance >= 0) & ~(text.evicted[:, :, None] & (distance > WINDOW))
    grouped = query.unflatten(2, (HEADS, GROUP))
    scores = torch.einsum("bihgd,bjhd->bhgij", grouped, key) * SCALE
    weights = scores.masked_fill(~read[:, :, None], -torch.inf).softmax(-1)
    output = torch.einsum("bhgij,bjhd->bihgd", weights, text.value.double())
    return output.flatten(2, 3), read[:, :, -1].sum(-1)


def empty_cache(tokens: int) -> PagedCache:
    rows, places = 3, -(-tokens // PAGE) + 1
    pages = rows * HEADS * places
    put = {"dtype": torch.int32, "device": DEVICE}
    return PagedCache(
        pages=torch.full((pages + 1, 2, PAGE, SIZE), torch.nan, device=DEVICE),
        table=torch.zeros(rows, HEADS, places, **put),
        lengths=torch.zeros(rows, HEADS, **put),
        ring=torch.zeros(rows, HEADS, WINDOW + 1, **put),
        exponents=None,
        free=FreePages.all_of(pages, DEVICE),
    )


def prefill(kernels: dispatch.Kernels, cache: PagedCache, text: Text, n: int) -> Tensor:
    """Output [b, n, h * g, d] of the first n tokens."""
    tokens = [rotated(text.query, text), rotated(text.key, text), text.value]
    tokens = [x[:, :n].transpose(1, 2).contiguous() for x in tokens]
    stored, position = (cache.lengths, cache.ring, ROWS), torch.arange(n, device=DEVICE)
    rule, decided = Decisions(SIGNAL, shift=0), text.evicted[..., :n]
    state, chunk = kernels.plan_prompt(
        *stored, position.repeat(len(ROWS), 1), decided, rule, begins=True
    )
    lists = (ROWS[:, None] * HEADS + torch.arange(HEADS, device=DEVICE)).flatten()
    after = chunk.lengths.flatten()
    every = (cache.table.flatten(0, 1), cache.lengths.view(-1), after, lists, cache.free, PAGE)
    kernels.allocate_pages(*every)
    pages = Pages(cache.pages, cache.table[ROWS])
    output = kernels.extend_prompt(Tokens(*tokens), chunk, state, pages, window=WINDOW, scale=SCALE)
    kernels.release_pages(*every)
    kernels.commit_prefill(chunk, state, ring=cache.ring, rows=ROWS, evicts=True)
    return output.transpose(1, 2)


def decode(kernels: dispatch.PagedAttention, cache: PagedCache, text: Text, t: int) -> Tensor:
    """Output [b, h * g, d] of token t."""
    cos, sin = (x[t].expand(len(ROWS), -1).contiguous() for x in (text.cos, text.sin))
    step = Step(
        text.query[:, t].contiguous(),
        text.key[:, t].contiguous(),
        text.value[:, t].contiguous(),
        cos,
        sin,
        position=torch.full_like(ROWS, t),
        rows=ROWS,
        signal=text.evicted[..., t].contiguous(),
    )
    query = kernels.append(step, cache, Decisions(SIGNAL))
    memory = kernels.attention_workspace(query, cache, evicts=True)
    return kernels.attend(query, cache, ROWS, SCALE, memory)


@pytest.mark.parametrize(
    ("backend", "prompt"),
    [
        pytest.param("triton_kernels", 23, marks=NEEDS_TRITON),
        pytest.param("triton_kernels", 0, marks=NEEDS_TRITON),
        ("reference_kernels", 0),
    ],
)
def test_attention_over_compact_pages_equals_brute_force(backend: str, prompt: int) -> None:
    text, kernels = random_text(prompt + 9), getattr(dispatch, backend)()
    cache = empty_cache(text.query.shape[1])
    capacity = int(cache.free.left)
    outputs = [prefill(kernels, cache, text, prompt)] if prompt else []
    rest = range(prompt, text.query.shape[1])
    outputs += [decode(kernels, cache, text, t)[:, None] for t in rest]
    expected, live = brute_force(text)
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, rtol=1e-5, atol=1e-5)
    assert int(cache.free.fault) == 0
    assert torch.equal(cache.lengths[ROWS].long(), live)
    assert not cache.lengths[1].any()
    assert int(cache.free.left) == capacity - int((-(-live // PAGE)).sum())


@NEEDS_TRITON
def test_backends_agree_on_head_norms_scores_and_pages_of_single_heads() -> None:
    shape = paged_cases.Shape(d=SIZE, group=GROUP, heads=HEADS, device=DEVICE.type)
    lengths = torch.tensor([[3, 9], [14, 1], [20, 6]], dtype=torch.int32, device=DEVICE)
    step = paged_cases.random_step(shape, torch.full((3,), 30, device=DEVICE), 1)
    weights = torch.rand(2, SIZE, device=DEVICE) + 0.5
    norms, rule = HeadNorms(weights[0], weights[1], 1e-6), Decisions(SIGNAL)
    readers = torch.randint(1, 2**GROUP, (3, HEADS, shape.places), device=DEVICE).int()
    readers[..., 0] = 2**GROUP - 1  # every head reads something
    results = []
    for kernels in (dispatch.triton_kernels(), dispatch.reference_kernels()):
        cache = paged_cases.filled_cache(shape, lengths)
        query = kernels.append(step, cache, rule, norms=norms, rotated=torch.empty_like(step.query))
        logits = SlotLogits(
            torch.zeros(3 * HEADS, GROUP, 24, device=DEVICE),
            torch.zeros(3 * HEADS, GROUP, device=DEVICE),
        )
        memory = kernels.attention_workspace(query, cache)
        output = torch.empty_like(query)
        kernels.attend(query, cache, step.rows, SCALE, memory, output, logits, readers)
        results.append([query, output, *logits])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
