"""The fused training attention on a CPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.train_cases import Shape, distances, exact, leaves, outcome, positions_first

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see tests/gpu", allow_module_level=True)

from dms_train.kernels.errors import KernelError
from dms_train.kernels.options import ROW_TILE
from dms_train.kernels.train_attention import launch_plan
from dms_train.kernels.train_attention import triton_attention as triton_train
from dms_train.kernels.train_attention.launch_plan import TilePlan, TrainTiles

# (queries, keys) of a tile, forward and backward
TILES = [((16, 16), (16, 16)), ((32, 16), (16, 32)), ((32, 32), (32, 16))]
SHAPES = [
    Shape(1, 70, 2, 1, 16, 8),
    Shape(2, 97, 4, 2, 21, 5),
    Shape(1, 50, 3, 3, 32, 100),
    Shape(1, 1, 2, 1, 16, 4),
    Shape(1, 100, 2, 1, 16, 8, documents=(13, 1, 46, 40)),
    Shape(1, 90, 2, 2, 16, 40, documents=(50, 40)),
    Shape(1, 60, 2, 1, 16, 0, documents=(0, 33, 0, 27)),
    Shape(2, 64, 2, 2, 16, 2**31 - 1),
    Shape(2, 70, 4, 2, 21, 8, sinks=True),
    Shape(1, 60, 2, 1, 16, 9, documents=(0, 33, 0, 27), sinks=True),
]


@pytest.fixture
def tiles(request) -> Iterator[None]:
    forward, backward = (TrainTiles(*sizes, warps=4, stages=1) for sizes in request.param)
    plan = TilePlan(
        forward,
        backward,
        False,
        False,
        "ieee",
        processors=1,
        cache_bytes=1 << 13 + forward.block_m // 16,
    )
    with launch_plan.forced(plan):
        yield


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("tiles", TILES, indirect=True, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_equal_float64(shape, tiles, deterministic) -> None:
    inputs, d_out = leaves(shape, "cpu")
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = outcome(triton_train.dms_attention, inputs, d_out, shape, shape.cu_seqlens("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(distances(found, exact(inputs, d_out, shape))) < 2e-6


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
def test_partial_sums_of_a_group_are_added(tiles, monkeypatch) -> None:
    monkeypatch.setattr(triton_train, "heads_per_program", lambda _: 1)
    shape = Shape(1, 40, 6, 2, 16, 8)
    inputs, d_out = leaves(shape, "cpu")
    found = outcome(triton_train.dms_attention, inputs, d_out, shape, None)
    assert max(distances(found, exact(inputs, d_out, shape))) < 2e-6


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
def test_tiles_evicted_for_good_are_left_out(tiles) -> None:
    shape = Shape(1, 64, 1, 1, 16, 8, evicted=1.0)
    inputs, _ = leaves(shape, "cpu")
    inputs[3].data[..., :16] = -torch.inf
    inputs[1].data[:, :16] = float("nan")  # never loaded by queries behind the window
    out = triton_train.dms_attention(*inputs, shape.window, 0.25)
    assert out[:, :16].isnan().any()
    assert not out[:, 32:].isnan().any()
    _, _, _, _, counts = triton_train._attend(*inputs, None, shape.window, 0.25, None)
    assert counts[0].tolist()[:2] == [0, 0]


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
@pytest.mark.parametrize("d", [16, 21], ids=["aligned", "unaligned"])
def test_the_output_has_the_order_of_the_queries(tiles, d: int) -> None:
    shape = Shape(2, 50, 4, 2, d, 8)
    inputs, d_out = leaves(shape, "cpu")
    inputs = [*map(positions_first, inputs[:3]), inputs[3]]
    found = outcome(triton_train.dms_attention, inputs, positions_first(d_out), shape, None)
    assert found[0].transpose(0, 1).is_contiguous()
    assert max(distances(found, exact(inputs, d_out, shape))) < 2e-6
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        out = triton_train.dms_attention(*fake, shape.window, 0.2)
    assert out.stride() == found[0].stride()


def test_rows_of_any_alignment_are_taken() -> None:
    x = torch.randn(2, 5, 3, 20)[..., :19]
    view = triton_train.aligned(x)
    assert torch.equal(view[..., :19].transpose(1, 2), x)
    assert all(stride * 4 % 16 == 0 for stride in view.stride()[:-1])


@pytest.mark.parametrize("table", ["_HOPPER", "_PORTABLE", "_FLOAT32"])
def test_forward_tiles_cover_the_rows_that_backward_tiles_read(table) -> None:
    for forward, backward in getattr(launch_plan, table).values():
        assert forward.block_m % backward.block_m == 0
        assert ROW_TILE % forward.block_m == 0


def test_a_head_too_large_is_one_line() -> None:
    with pytest.raises(KernelError, match="head size 320: the fused kernels take up to 256"):
        launch_plan.plan_tiles(torch.bfloat16, 320, torch.device("cpu"))


def test_packed_documents_must_be_one_sample() -> None:
    x = torch.zeros(2, 8, 1, 16)
    with pytest.raises(KernelError, match="cu_seqlens with 2 samples"):
        triton_train.dms_attention(x, x, x, None, 4, 0.25, torch.tensor([0, 8]))


def test_shapes_are_known_without_running() -> None:
    shape = Shape(2, 50, 4, 2, 24, 8)
    inputs, d_out = leaves(shape, "cpu")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        out = triton_train.dms_attention(*fake, shape.window, 0.2)
        grads = torch.autograd.grad(out, fake, mode.from_tensor(d_out))
    assert out.shape == d_out.shape
    assert [g.shape for g in grads] == [x.shape for x in inputs]


def test_mixed_dtypes_are_refused() -> None:
    x = torch.zeros(1, 8, 1, 16)
    with pytest.raises(KernelError, match="the fused kernels take one dtype"):
        triton_train.dms_attention(x, x.half(), x, torch.zeros(1, 1, 8), 4, 0.25)


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
def test_a_decision_that_is_not_a_number_is_propagated(tiles) -> None:
    inputs, _ = leaves(Shape(1, 64, 1, 1, 16, 8), "cpu")
    inputs[3].data[..., :16] = float("nan")
    out = triton_train.dms_attention(*inputs, 8, 0.25)
    assert out[:, 40:].isnan().all()


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
def test_an_expanded_gradient_is_taken(tiles) -> None:
    shape = Shape(1, 40, 4, 2, 16, 8)
    inputs, _ = leaves(shape, "cpu")
    row = torch.randn(1, 1, 1, 16)
    expanded, dense = row.expand(1, 40, 4, 16), row.repeat(1, 40, 4, 1)
    found = outcome(triton_train.dms_attention, inputs, expanded, shape, None)
    assert max(distances(found, exact(inputs, dense, shape))) < 2e-6


def _loss(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, sinks: Tensor | None = None) -> Tensor:
    out = triton_train.dms_attention(q * 1.5, k, v, log_keep, 8, 0.25, sinks=sinks)
    return (out**2).sum()


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_compiled_and_recomputed_it_gives_the_same_gradients(tiles, sinks: bool) -> None:
    inputs, _ = leaves(Shape(1, 40, 4, 2, 16, 8, sinks=sinks), "cpu")
    plain = torch.autograd.grad(_loss(*inputs), inputs)
    whole = torch.compile(_loss, fullgraph=True, backend="aot_eager")
    for loss in (whole(*inputs), checkpoint(_loss, *inputs, use_reentrant=False)):
        for found, expected in zip(torch.autograd.grad(loss, inputs), plain, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("tiles", TILES[:1], indirect=True, ids=str)
def test_a_second_derivative_is_refused_rather_than_wrong(tiles) -> None:
    inputs, _ = leaves(Shape(1, 40, 4, 2, 16, 8), "cpu")
    first = torch.autograd.grad(_loss(*inputs), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (_loss(*inputs) + first[0].square().sum()).backward()
