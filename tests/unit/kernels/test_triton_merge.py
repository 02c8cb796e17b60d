"""DMC's merge by kernels on a CPU, through Triton's interpreter, against torch in float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see tests/gpu", allow_module_level=True)

from dms_train.kernels.layers import triton_decide, triton_merge
from dms_train.method.base import LayerSizes
from dms_train.method.dmc.attention import DMCLayer
from dms_train.method.dmc.merge import merge
from dms_train.method.layer import Heads, LayerKernels
from dms_train.method.noise import LayerNoise
from dms_train.method.spec import PRESETS
from tests.support.eviction_channel_cases import documents, layer_pass
from tests.support.live_memory import saved_bytes

KERNELS = LayerKernels(triton_decide.decide, triton_decide.decide_merges, triton_merge.merge)


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
@pytest.mark.parametrize(("s", "d", "width"), [(1, 4, 12), (7, 8, 12), (70, 12, 12), (33, 16, 1)])
def test_states_and_gradients(s: int, d: int, width: int, hard: bool) -> None:
    draws = torch.Generator().manual_seed(s)
    key, value = torch.randn(2, s, 2, 3, d, generator=draws)
    alpha, weight = torch.rand(2, s, 2, 3, generator=draws)
    alpha = (alpha < 0.8).float() if hard else alpha
    alpha[0] = 0
    upstream = torch.randn(2, s, 2, 3, d, generator=draws)
    results = []
    for dtype, function in ((torch.float32, triton_merge.merge), (torch.float64, merge)):
        inputs = [x.to(dtype).requires_grad_() for x in (key, value, alpha, weight + 0.1)]
        states = function(*inputs, width)
        loss = sum((x * y.to(dtype)).sum() for x, y in zip(states, upstream, strict=True))
        # alpha of the first token has no effect, and no gradient where the width is 1
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        pairs = zip(inputs, gradients, strict=True)
        results.append([*states, *(torch.zeros_like(x) if y is None else y for x, y in pairs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_a_layer_of_kernels_computes_what_the_layer_of_torch_computes(packed: bool) -> None:
    spec, s, b, g, r, d = PRESETS["dmc"].override(alpha_offset=0.5), 37, 2, 3, 2, 8
    draws = torch.Generator().manual_seed(3)
    shapes = ((s, b, g, r, d), (s, b, g, d), (s, b, g, d))
    given = [torch.randn(shape, generator=draws) for shape in shapes]
    noise = LayerNoise(torch.tensor([5, -9]), 4, 2)
    where = documents(s, torch.device("cpu"))[0] if packed else None
    results = []
    for kernels, dtype in (
        (KERNELS, torch.float32),
        (None, torch.float64),
    ):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        layer = DMCLayer(spec, kernels)
        heads, decided = layer.prepare(Heads(*inputs), layer_pass(spec, noise, where, g))
        assert decided is not None
        found = [*heads, decided.log_keep, decided.stats[:, :3]]
        draws = torch.Generator().manual_seed(4)
        loss = sum((x * torch.randn(x.shape, generator=draws)).sum() for x in found)
        results.append([*found, *torch.autograd.grad(loss, inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("changes", [{}, {"merge_window": 3}], ids=["12", "3"])
def test_the_plan_counts_what_a_layer_keeps_of_the_method(changes: dict, fused: bool) -> None:
    spec = PRESETS["dmc"].override(**changes)
    layer = DMCLayer(spec, KERNELS if fused else None)
    s, b, g, r, d = 40, 2, 3, 2, 16
    shapes = ((s, b, g, r, d), (s, b, g, d), (s, b, g, d))
    heads = Heads(*(torch.ones(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes))
    step = layer_pass(spec, LayerNoise(torch.zeros(b, dtype=torch.int64), 1, 0), None, g)
    sizes = LayerSizes(samples=b, length=s, groups=g, queries=r, head=d, width=2, fused=fused)
    assert saved_bytes(lambda: layer.prepare(heads, step), heads) == spec.kept_bytes(sizes)
