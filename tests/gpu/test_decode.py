"""The decode kernels on a GPU: sizes the interpreter is too slow for, bf16, FP8, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from dms_train.kernels.decode.types import FP8, SIGNAL, Decisions
from tests.support import paged_cases as problems
from tests.support.paged_cases import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(query, cache, rows, scale, tuning=None, sinks=None):
    from dms_train.kernels.decode import triton_attention as triton_decode

    memory = triton_decode.attention_workspace(query, cache, tuning)
    output = triton_decode.attend(query, cache, rows, scale, memory, sinks=sinks)
    assert int(memory.arrived.abs().sum()) == 0
    return output


def append(step, cache, rule):
    from dms_train.kernels.decode import triton_append

    return triton_append.append(step, cache, rule)


def lengths_of(s: Shape, longest: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(s.seed)
    drawn = torch.randint(0, longest + 1, (s.rows, s.heads), generator=draw)
    drawn[-1, -1] = longest
    return drawn.int().to(s.device)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [  # dtype, d, rows, KV heads, group, slots of a page
    (BF16, 128, 32, 8, 4, 16),
    (BF16, 128, 1, 1, 1, 64),
    (BF16, 64, 3, 8, 4, 16),
    (BF16, 80, 40, 2, 7, 16),
    (BF16, 256, 5, 3, 20, 32),
    (F16, 128, 7, 2, 6, 16),
    (F16, 96, 1, 8, 8, 64),
    (F32, 64, 3, 8, 4, 16),
    (F32, 256, 2, 2, 2, 16),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("longest", "sinks"), [(1500, False), (1500, True), (40, False)])
def test_attention_equals_float64(size, longest, sinks):
    dtype, d, rows, heads, group, page_slots = size
    shape = Shape(
        rows=rows, heads=heads, group=group, d=d, dtype=dtype, page_slots=page_slots,
        places=-(-longest // page_slots), device="cuda", seed=rows,
    )  # fmt: skip
    lengths = lengths_of(shape, longest)
    problems.check_attend(attend, shape, lengths, TOLERANCE[dtype], sinks=sinks)


@pytest.mark.parametrize(("d", "group"), [(64, 1), (96, 4), (128, 4), (128, 8)])
def test_attention_over_fp8_pages_equals_float64(d, group):
    shape = Shape(
        rows=9, heads=4, group=group, d=d, dtype=BF16, cache_dtype=FP8, page_slots=16, places=100,
        device="cuda",
    )  # fmt: skip
    problems.check_attend(attend, shape, lengths_of(shape, 1600), 1e-2)


@pytest.mark.parametrize("cache", ["same", "fp8"])
@pytest.mark.parametrize(
    ("name", "window", "d"),
    [(name, 5, 16) for name in sorted(problems.rules(5))]
    + [("kv_list", 1, 64), ("immediate_shifted", 8, 128), ("window", 1, 24)],
)
def test_append_equals_the_loops(name, cache, window, d):
    shape = Shape(
        window=window, d=d, dtype=F32, cache_dtype=FP8 if cache == "fp8" else None, device="cuda"
    )
    problems.check_append(append, shape, problems.rules(window)[name], 40)


@pytest.mark.parametrize("preset", ["dms", "dms_fastdms"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_text_equals_the_visibility_rule(preset, dtype):
    shape = Shape(rows=4, heads=2, group=4, d=64, window=8, dtype=dtype, places=80, device="cuda")
    problems.check_visibility(append, attend, shape, preset, 300)
    problems.check_visibility(append, attend, shape, preset, 100, eviction="immediate")


@pytest.mark.parametrize("cache", ["same", "fp8"])
def test_a_captured_step_replays_like_eager_steps(cache):
    """300 replays of one graph; the same tokens, slots and outputs as 300 calls."""
    from dms_train.kernels.decode import triton_append
    from dms_train.kernels.decode import triton_attention as triton_decode

    shape = Shape(
        rows=4, heads=2, group=4, d=64, window=8, dtype=torch.bfloat16, places=80, device="cuda",
        cache_dtype=FP8 if cache == "fp8" else None, page_slots=4,
    )  # fmt: skip
    rule = Decisions(SIGNAL, shift=1)
    captured, eager = problems.empty_cache(shape), problems.empty_cache(shape)
    at = torch.zeros(shape.rows, dtype=torch.int32, device="cuda")
    held = problems.random_step(shape, at, 0)
    memory = triton_decode.attention_workspace(held.query, captured)
    output = torch.empty_like(held.query)

    def step(x, into):
        rotated = triton_append.append(x, into, rule)
        return triton_decode.attend(rotated, into, x.rows, 0.125, memory, output)

    step(held._replace(rows=torch.full_like(held.rows, -1)), captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(held, captured)
    for t in range(300):
        fresh = problems.random_step(shape, at + t, t)
        for buffer, value in zip(held, fresh, strict=True):
            if value is not None:
                buffer.copy_(value)
        graph.replay()
        replayed = output.clone()
        assert torch.equal(replayed, step(fresh, eager)), t
    assert torch.equal(captured.lengths, eager.lengths)
    assert torch.equal(captured.ring, eager.ring)
    assert int(captured.free.fault) == 0
