"""The fused kernels beside attention, compiled: RoPE, eviction decisions, activation."""

from __future__ import annotations

import pytest
import torch

from dms_train.method.spec import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("apart", [False, True], ids=["mixed", "apart"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    ("channel", "clear", "d"), [(0, False, 64), (7, True, 96), (127, False, 128), (2, True, 12)]
)
def test_rope_scales_and_reads_the_eviction_channel(
    channel: int, clear: bool, d: int, factor: float, apart: bool
) -> None:
    from dms_train.kernels.layers.types import EvictionChannel
    from tests.support import eviction_channel_cases

    eviction_channel = EvictionChannel(channel, factor, clear)
    assert eviction_channel_cases.worst_rotation(eviction_channel, d, GPU, apart=apart) < 2e-5


@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
@pytest.mark.parametrize("preset", [n for n, spec in PRESETS.items() if spec.kind == "dms"])
@pytest.mark.parametrize("length", [37, 3, 5000])
def test_decisions_and_their_cost(preset: str, eviction: str, noisy: bool, length: int) -> None:
    from tests.support import eviction_channel_cases

    spec = PRESETS[preset].override(window=4, alpha_offset=0.1, eviction=eviction)
    assert eviction_channel_cases.worst_decision(spec, GPU, noisy=noisy, s=length) < 5e-5


@pytest.mark.parametrize(("channel", "clear", "d"), [(0, False, 64), (7, True, 128)])
def test_rope_starts_again_at_every_document(channel: int, clear: bool, d: int) -> None:
    from dms_train.kernels.layers.types import EvictionChannel
    from tests.support import eviction_channel_cases

    eviction_channel = EvictionChannel(channel, 0.3, clear)
    assert eviction_channel_cases.worst_packed_rotation(eviction_channel, d, GPU) < 2e-5


@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("preset", [n for n, spec in PRESETS.items() if spec.kind == "dms"])
@pytest.mark.parametrize("length", [37, 5000])
def test_decisions_stay_within_their_document(preset: str, noisy: bool, length: int) -> None:
    from tests.support import eviction_channel_cases

    spec = PRESETS[preset].override(window=4, alpha_offset=0.1)
    assert eviction_channel_cases.worst_packed_decision(spec, GPU, noisy=noisy, s=length) < 5e-5


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "plain"])
@pytest.mark.parametrize("length", [37, 5000])
def test_decisions_to_merge(length: int, noisy: bool, packed: bool) -> None:
    from tests.support import eviction_channel_cases

    spec = PRESETS["dmc"].override(alpha_offset=0.1)
    worst = eviction_channel_cases.worst_merge_decision(
        spec, GPU, noisy=noisy, packed=packed, s=length
    )
    assert worst < 5e-5


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations(name: str) -> None:
    from tests.support import eviction_channel_cases

    assert eviction_channel_cases.worst_gate(GPU, name) < 1e-5


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("t", "c"), [(1, 16), (9001, 64), (700, 130), (5000, 576), (300, 9000)])
def test_rms_norm_and_its_gradients(
    t: int, c: int, dtype: torch.dtype, limit: float, added: bool
) -> None:
    from tests.support import eviction_channel_cases

    assert eviction_channel_cases.worst_norm(GPU, dtype, t, c, added=added) < limit


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_gradients_of_rms_norm_repeat_bit_for_bit(added: bool) -> None:
    from dms_train.kernels.layers import triton_norm

    generator = torch.Generator(GPU).manual_seed(0)
    x, update, d_out = torch.randn(3, 4096, 576, device=GPU, generator=generator).bfloat16()
    weight = torch.ones(576, device=GPU).bfloat16().requires_grad_()
    x.requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        if added:
            return torch.autograd.grad(
                triton_norm.add_norm(x, update, weight, 1e-5), (x, weight), (d_out, d_out)
            )
        return torch.autograd.grad(triton_norm.rms_norm(x, weight, 1e-5), (x, weight), d_out)

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


def test_weight_gradients_are_added_to_the_fp32_buffer_by_the_product() -> None:
    from dms_train.mcore import compat

    assert compat.accumulate_in_place(GPU)
    generator = torch.Generator(GPU).manual_seed(0)
    inputs = torch.randn(512, 96, device=GPU, generator=generator).bfloat16()
    d_out = torch.randn(512, 160, device=GPU, generator=generator).bfloat16()
    sums = torch.randn(160, 96, device=GPU, generator=generator)
    expected = sums.double() + d_out.double().t() @ inputs.double()
    compat._add_weight_gradient(inputs, d_out, sums)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-3)
