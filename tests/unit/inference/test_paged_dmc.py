"""DMC's states in FP8 pages and in snapshots, against loops over the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged_merging import MergingPagedCache
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.llm import LLM
from dms_train.inference.policies.dmc import DMCPolicy
from dms_train.kernels import dispatch
from dms_train.kernels.decode import reference
from dms_train.kernels.decode.types import FP8
from dms_train.method.dmc.spec import DMCSpec
from dms_train.method.spec import PRESETS
from tests.support import plain_dmc
from tests.unit.inference.conftest import random_ids

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
B, H, R, D, PAGE = 2, 2, 2, 16, 4
CHUNKS = (11, 1, 1, 1, 6, *(1,) * 16)
LENGTH = sum(CHUNKS)
HALF_STEP = 2.0**-4  # of e4m3, relative to a number of 2**-6 or more
SMALLEST = 2.0**-9  # the least number of e4m3; shifts of a page's content round half of it again


def dmc(alpha_offset: float) -> DMCSpec:
    spec = PRESETS["dmc"].override(alpha_offset=alpha_offset)
    assert isinstance(spec, DMCSpec)
    return spec


def empty(spec: DMCSpec) -> MergingPagedCache:
    pool = DevicePool(
        head_size=D, dtype=torch.float32, stored=FP8, device=DEVICE, page_slots=PAGE, pages=200
    )
    return MergingPagedCache(pool, DMCPolicy(spec), CacheSizes(1, B, H, group=R, longest=64))


def text() -> tuple[Tensor, Tensor, Tensor]:
    """query [B, t, H, R, D], key and value [B, t, H, D], of sizes that differ by token."""
    draw = torch.Generator().manual_seed(7)
    sizes = torch.randn(B, LENGTH, H, 1, generator=draw).exp()
    query = torch.randn(B, LENGTH, H, R, D, generator=draw)
    key, value = torch.randn(2, B, LENGTH, H, D, generator=draw) * sizes
    return query, key, value


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines, float64 [t, D], both halves alike."""
    angle = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(D // 2).double() / (D // 2))
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def feed(cache: MergingPagedCache, spec: DMCSpec, start: int, count: int) -> None:
    query, key, value = (x[:, start : start + count].contiguous() for x in text())
    cos, sin = (x[start : start + count].float().expand(B, -1, -1) for x in angles())
    step = AttentionStep(
        query=query,
        key=key.unsqueeze(3),
        value=value.unsqueeze(3),
        cos=cos[:, :, None, None].contiguous(),
        sin=sin[:, :, None, None].contiguous(),
        position=torch.arange(start, start + count).expand(B, -1).contiguous(),
        rows=torch.arange(B),
        spec=spec,
        begins=start == 0,
    )
    on_device = {k: x.to(DEVICE) for k, x in step._asdict().items() if isinstance(x, Tensor)}
    cache.step(0, step._replace(**on_device))


def states(spec: DMCSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Key with RoPE and value after every token, [B, t, H, D], and decisions [B, t, H]."""
    query, key, value = (x.double() for x in text())
    decided = spec.alpha_scale * key[..., spec.channel] - spec.alpha_offset > 0
    decided[:, 0] = False
    omega = torch.sigmoid(query[..., spec.channel].mean(-1) + spec.importance_offset)
    key[..., spec.channel] = 0
    key, value = plain_dmc.states(key, value, decided.double(), omega, spec.merge_window)
    cos, sin = (x[:, None] for x in angles())
    first, second = key.chunk(2, -1)
    return key * cos + torch.cat([-second, first], -1) * sin, value, decided


@pytest.mark.parametrize("alpha_offset", [0.0, -150.0], ids=["half", "most"])
def test_fp8_pages_hold_every_state_rounded_once(alpha_offset: float) -> None:
    """A state is written once for each of its tokens; its error is that of one rounding."""
    spec = dmc(alpha_offset)
    cache, start = empty(spec), 0
    key, value, decided = states(spec)
    for count in CHUNKS:
        feed(cache, spec, start, count)
        start += count
        view = cache.view(0)
        assert view.exponents is not None
        for row in range(B):
            for head in range(H):
                last = ~decided[row, 1:start, head]  # of their slot
                at = torch.cat([last, torch.tensor([True])]).nonzero()[:, 0]
                exponents = view.exponents[row, head].repeat_interleave(PAGE, 0)[: len(at)]
                smallest = SMALLEST * 2.0 ** exponents.double().cpu()
                found = reference.live_slots(view, row, head)
                for kind, (ours, exact) in enumerate(zip(found, (key, value), strict=True)):
                    wanted = exact[row, at, head]
                    limit = HALF_STEP * wanted.abs() + smallest[:, kind, None] + 1e-5
                    assert ours.shape == wanted.shape
                    assert ((ours.cpu() - wanted).abs() <= limit).all()


def test_fp8_pages_change_the_logits_a_little(folder: Callable[..., Path]) -> None:
    """FP8 changes logits of a prompt in two parts and of decoded tokens by little."""
    directory, ids = folder("llama", dmc(0.0)), random_ids(24, seed=3)
    exact = LLM(directory, kernels="reference", device=DEVICE.type).logits(ids)
    how = {"cache_dtype": "fp8", "prefill_chunk": 11, "page_slots": PAGE}
    found = LLM(directory, device=DEVICE.type, **how).logits(ids)
    assert 1e-3 < (found - exact).norm() / exact.norm() < 0.1


def test_a_snapshot_takes_what_is_set_aside_for_it() -> None:
    """All that it copies of a row that is full; its pages are shared."""
    spec = dmc(0.0)
    cache = empty(spec)
    cache.lists.lengths[:] = 64
    snapshot = cache.snapshot(0, 64)
    copied = [*snapshot._state, *snapshot._tables]
    assert sum(x.nbytes for x in copied) == cache.snapshot_bytes
    newest = 2 * H * (spec.merge_window - 1) * (D + 1) * 4  # keys, values, and two weights of each
    assert newest < cache.snapshot_bytes < 2 * newest
