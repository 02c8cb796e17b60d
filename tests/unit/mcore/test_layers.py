"""The choice of layers; Transformer Engine's names meet those of a model without it.

Without Transformer Engine megatron-core puts mocks in its place, so nothing here builds its layers:
`tests/golden/layer_names.json` was recorded with the real ones (`tests/gpu/test_layers.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dms_train.kernels import dispatch
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import backend as layers
from dms_train.mcore.model import weights
from tests.support import layers_worker

NAMES = json.loads((Path(__file__).parents[2] / "golden" / "layer_names.json").read_text())
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("family", NAMES)
def test_names_of_parameters_and_of_checkpoints_meet(family: str, view: ParallelView) -> None:
    here = layers_worker.recorded(layers_worker.build("local", family, view))
    assert any("layer_norm_weight" in name for name in NAMES[family]["parameters"])
    plain = sorted(weights.plain_name(name) for name in NAMES[family]["parameters"])
    assert plain == here["parameters"]
    assert NAMES[family]["checkpoint"] == here["checkpoint"]


@pytest.mark.parametrize("wanted", ["auto", "local"])
def test_a_cpu_trains_with_megatrons_own_layers(wanted: str) -> None:
    layer_backend = layers.choose(wanted, CPU)
    assert not layer_backend.fuses_norm
    assert layer_backend.norm is layers.RMSNorm
    assert layer_backend.describe(None).startswith("local (")


def test_norms_are_kernels_where_the_attention_is() -> None:
    layer_backend = layers.choose("local", GPU, fused=True)
    assert layer_backend.norm is layers.FusedRMSNorm
    assert layer_backend.describe(None) == "local (as configured), norms by triton"
    assert layers.choose("local", GPU).norm is layers.RMSNorm


@pytest.mark.skipif(not dispatch.is_supported(CPU), reason="needs triton's interpreter")
def test_the_fused_norm_computes_the_same(view: ParallelView) -> None:
    config = layers_worker.build("local", "llama", view)._config
    norms = [kind(config, 32, eps=1e-2) for kind in (layers.RMSNorm, layers.FusedRMSNorm)]
    for norm in norms:
        norm.weight.data.copy_(torch.linspace(-1, 2, 32))
    x = torch.randn(3, 2, 32)
    torch.testing.assert_close(norms[1](x), norms[0](x))


@pytest.mark.skipif(not dispatch.is_supported(CPU), reason="needs triton's interpreter")
@pytest.mark.parametrize("kind", [layers.RMSNorm, layers.FusedRMSNorm])
def test_a_centered_norm_adds_one_in_float32(view: ParallelView, kind: type) -> None:
    """In float16, against float64: output and both gradients are rounded once."""
    config = replace(
        layers_worker.build("local", "llama", view)._config,
        layernorm_zero_centered_gamma=True,
        params_dtype=torch.float16,
    )
    norm = kind(config, 32, eps=1e-2)
    norm.weight.data.copy_(torch.linspace(-0.05, 0.05, 32))
    x = torch.randn(3, 2, 32).half().requires_grad_()
    exact, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    found = norm(x)
    wanted = exact * (exact.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * (1 + weight)
    factors = torch.randn(3, 2, 32).half()
    found.backward(factors)
    wanted.backward(factors.double())
    for a, b in ((found, wanted), (x.grad, exact.grad), (norm.weight.grad, weight.grad)):
        assert (a.double() - b).abs().max() < 2**-11 * b.abs().max()


def test_auto_takes_transformer_engine_where_it_can_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers.te, "HAVE_TE", True)
    assert layers.choose("auto", GPU).name == "transformer_engine"
    assert layers.choose("local", GPU).name == "local"
    assert layers.choose("auto", CPU).name == "local"


def test_overlapped_communication_needs_megatrons_own_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers.te, "HAVE_TE", True)
    assert layers.choose("auto", GPU, overlaps=True).name == "local"
    with pytest.raises(ModelError, match=r"transformer_engine: parallel\.tp_comm_overlap"):
        layers.choose("transformer_engine", GPU, overlaps=True)


@pytest.mark.parametrize(
    ("device", "found", "reason"), [(CPU, True, "needs a GPU"), (GPU, False, "cannot be imported")]
)
def test_it_is_refused_where_it_cannot_run(
    device: torch.device, found: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.te, "HAVE_TE", found)
    with pytest.raises(
        ModelError, match=f"parallel.layers=transformer_engine: .*{reason}"
    ) as refused:
        layers.choose("transformer_engine", device)
    assert "\n" not in str(refused.value)
