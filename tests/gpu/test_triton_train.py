"""The fused training attention on a GPU: against float64, compiled, recomputed, replayed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.train_cases import Shape, distances, exact, leaves, outcome, positions_first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
if torch.cuda.is_available():
    from dms_train.kernels.train_attention.launch_plan import forced, plan_tiles
    from dms_train.kernels.train_attention.triton_attention import dms_attention

ERRORS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 5e-6}


def random_shapes(count: int) -> list[Shape]:
    draw = random.Random(0)
    shapes = []
    for _ in range(count):
        hk, r = draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 4, 7))
        dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        d = draw.choice((64, 64, 128, 128, 128, 16, 40, 80, 96, 123, 192, 256))
        packed = draw.random() < 0.3
        lengths = [draw.choice((1, 17, 128, 200, 333)) for _ in range(draw.randint(1, 5))]
        s = sum(lengths) if packed else draw.choice((1, 63, 64, 65, 128, 300, 513, 777))
        documents = tuple(lengths) if packed else ()
        b = 1 if packed else draw.choice((1, 2))
        window = draw.choice((1, 16, 64, 100, 256))
        evicted = draw.choice((0.0, 0.2, 0.5, 1.0))
        sinks = draw.random() < 0.3
        shapes.append(Shape(b, s, hk * r, hk, d, window, dtype, documents, evicted, sinks))
    return shapes


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("shape", random_shapes(16), ids=str)
def test_output_and_gradients_equal_float64(shape, deterministic) -> None:
    inputs, d_out = leaves(shape, "cuda")
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = outcome(dms_attention, inputs, d_out, shape, shape.cu_seqlens("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(distances(found, exact(inputs, d_out, shape))) < ERRORS[shape.dtype]


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_programs_that_walk_over_a_group_in_sections(d, packed) -> None:
    documents = (500, 0, 700, 33) if packed else ()
    shape = Shape(1 if packed else 2, 1233, 12, 3, d, 100, torch.bfloat16, documents)
    plan = plan_tiles(shape.dtype, d, torch.device("cuda"))
    inputs, d_out = leaves(shape, "cuda")
    with forced(plan._replace(processors=1, cache_bytes=1 << 20)):
        found = outcome(dms_attention, inputs, d_out, shape, shape.cu_seqlens("cuda"))
    assert max(distances(found, exact(inputs, d_out, shape))) < ERRORS[shape.dtype]


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_64_keys(packed) -> None:
    documents = (500, 0, 700, 33) if packed else ()
    shape = Shape(1 if packed else 2, 1233, 9, 3, 64, 100, torch.bfloat16, documents)
    plan = plan_tiles(shape.dtype, 64, torch.device("cuda"))
    inputs, d_out = leaves(shape, "cuda")
    with forced(plan._replace(forward=plan.forward._replace(block_n=64))):
        found = outcome(dms_attention, inputs, d_out, shape, shape.cu_seqlens("cuda"))
    assert max(distances(found, exact(inputs, d_out, shape))) < ERRORS[shape.dtype]


@pytest.mark.parametrize("d", [64, 123, 192])
def test_the_output_has_the_order_of_the_queries(d) -> None:
    shape = Shape(3, 700, 9, 3, d, 100, torch.bfloat16)
    inputs, d_out = leaves(shape, "cuda")
    inputs = [*map(positions_first, inputs[:3]), inputs[3]]
    found = outcome(dms_attention, inputs, positions_first(d_out), shape, None)
    assert found[0].transpose(0, 1).is_contiguous()
    assert max(distances(found, exact(inputs, d_out, shape))) < ERRORS[shape.dtype]


def test_the_deterministic_mode_repeats_every_bit() -> None:
    shape = Shape(1, 3000, 8, 2, 128, 128, torch.bfloat16)
    inputs, d_out = leaves(shape, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (outcome(dms_attention, inputs, d_out, shape, None) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _loss(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor) -> Tensor:
    return (dms_attention(q * 1.5, k, v, log_keep, 64, 0.1).float() ** 2).sum()


def test_compiled_and_recomputed_it_gives_the_same_gradients() -> None:
    inputs, _ = leaves(Shape(2, 300, 4, 2, 64, 64, torch.bfloat16), "cuda")
    plain = torch.autograd.grad(_loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(_loss, fullgraph=True)(*inputs), inputs)
    again = torch.autograd.grad(checkpoint(_loss, *inputs, use_reentrant=False), inputs)
    for a, b, c in zip(plain, compiled, again, strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm()
        assert (a - c).norm() <= 2e-3 * a.norm()


def test_a_replayed_graph_follows_its_inputs() -> None:
    shape = Shape(1, 500, 4, 2, 128, 64, torch.bfloat16)
    inputs, d_out = leaves(shape, "cuda")
    outcome(dms_attention, inputs, d_out, shape, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outcome(dms_attention, inputs, d_out, shape, None)
    others, _ = leaves(shape, "cuda", seed=1)
    with torch.no_grad():
        for x, y in zip(inputs, others, strict=True):
            x.copy_(y)
    graph.replay()
    assert max(distances(found, exact(inputs, d_out, shape))) < ERRORS[shape.dtype]


def test_memory_grows_with_the_length_not_its_square() -> None:
    def peak(s: int) -> int:
        inputs, d_out = leaves(Shape(1, s, 4, 2, 64, 64, torch.bfloat16), "cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcome(dms_attention, inputs, d_out, Shape(1, s, 4, 2, 64, 64), None)
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) <= 4.4 * peak(4096)
