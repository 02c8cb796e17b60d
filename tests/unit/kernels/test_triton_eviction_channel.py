"""The fused kernels beside attention on a CPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see tests/gpu", allow_module_level=True)

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


def test_swiglu() -> None:
    assert eviction_channel_cases.worst_swiglu(CPU) < 1e-5


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("t", "c"), [(1, 16), (9, 130), (3, 576), (2, 1100)])
def test_rms_norm_and_its_gradients(t: int, c: int, added: bool) -> None:
    assert eviction_channel_cases.worst_norm(CPU, torch.float32, t, c, added=added) < 2e-6


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_rms_norm_rounds_once(added: bool) -> None:
    assert eviction_channel_cases.worst_norm(CPU, torch.float16, 5, 200, added=added) < 1e-3
