"""The fused kernels beside attention on a CPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see tests/gpu", allow_module_level=True)

from dms_train.kernels.layers.triton_decide import decide_merges
from dms_train.kernels.layers.triton_gate import swiglu
from dms_train.kernels.layers.triton_merge import merge
from dms_train.kernels.layers.triton_norm import rms_norm
from dms_train.kernels.layers.triton_rope import rope_table, split_and_rotate
from dms_train.kernels.layers.types import EvictionChannel
from dms_train.method.spec import PRESETS
from tests.support import eviction_channel_cases

CPU = torch.device("cpu")
DMS_PRESETS = [name for name, spec in PRESETS.items() if spec.kind == "dms"]


@pytest.mark.parametrize("apart", [False, True], ids=["mixed", "apart"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(("channel", "clear"), [(0, False), (7, True), (11, False), (2, True)])
def test_rope_scales_and_reads_the_eviction_channel(
    channel: int, clear: bool, factor: float, apart: bool
) -> None:
    eviction_channel = EvictionChannel(channel, factor, clear)
    assert eviction_channel_cases.worst_rotation(eviction_channel, 12, CPU, apart=apart) < 1e-5


@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
@pytest.mark.parametrize("preset", DMS_PRESETS)
@pytest.mark.parametrize("length", [37, 3, 1030])
def test_decisions_and_their_cost(preset: str, eviction: str, noisy: bool, length: int) -> None:
    spec = PRESETS[preset].override(window=4, alpha_offset=0.1, eviction=eviction)
    assert eviction_channel_cases.worst_decision(spec, CPU, noisy=noisy, s=length) < 2e-5


@pytest.mark.parametrize(("channel", "clear"), [(0, False), (7, True)])
def test_rope_starts_again_at_every_document(channel: int, clear: bool) -> None:
    eviction_channel = EvictionChannel(channel, 0.3, clear)
    assert eviction_channel_cases.worst_packed_rotation(eviction_channel, 12, CPU) < 1e-5


@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
@pytest.mark.parametrize("preset", DMS_PRESETS)
@pytest.mark.parametrize("length", [37, 1030])
def test_decisions_stay_within_their_document(
    preset: str, eviction: str, noisy: bool, length: int
) -> None:
    spec = PRESETS[preset].override(window=4, alpha_offset=0.1, eviction=eviction)
    assert eviction_channel_cases.worst_packed_decision(spec, CPU, noisy=noisy, s=length) < 2e-5


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("counted", ["soft", "hard_st"])
@pytest.mark.parametrize("length", [37, 1030])
def test_decisions_to_merge(length: int, counted: str, noisy: bool, packed: bool) -> None:
    spec = PRESETS["dmc"].override(alpha_offset=0.1, alpha_in_loss=counted)
    worst = eviction_channel_cases.worst_merge_decision(
        spec, CPU, noisy=noisy, packed=packed, s=length
    )
    assert worst < 2e-5


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations(name: str) -> None:
    assert eviction_channel_cases.worst_gate(CPU, name) < 1e-5


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("t", "c"), [(1, 16), (9, 130), (3, 576), (2, 1100)])
def test_rms_norm_and_its_gradients(t: int, c: int, added: bool) -> None:
    assert eviction_channel_cases.worst_norm(CPU, torch.float32, t, c, added=added) < 2e-6


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_rms_norm_rounds_once(added: bool) -> None:
    assert eviction_channel_cases.worst_norm(CPU, torch.float16, 5, 200, added=added) < 1e-3


def _rotated(mixed: torch.Tensor) -> torch.Tensor:
    table = rope_table(torch.rand(3, 1, 1, 8))
    outputs = split_and_rotate(mixed, table, EvictionChannel(0, 1.0, False))
    return torch.cat([output.flatten() for output in outputs])


FUSED = {
    "swiglu": swiglu,
    "norm": lambda x: rms_norm(x, torch.ones(8), 1e-3),
    "rope": _rotated,
    "merge": lambda x: merge(x[..., 0, :], x[..., 1, :], x[..., 2, 0], x[..., 3, 0] + 1, 2)[0],
    "decide": lambda x: decide_merges(x[..., 0, 0], PRESETS["dmc"], None, None)[0],
}


@pytest.mark.parametrize("name", FUSED)
def test_a_second_derivative_is_refused_rather_than_wrong(name: str) -> None:
    x = torch.rand(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (first,) = torch.autograd.grad(FUSED[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()
