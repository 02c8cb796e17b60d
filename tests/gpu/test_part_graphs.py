"""Parts of prompts that the vLLM plugin replays as CUDA graphs, beside parts without graphs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dms_train.inference.cache.paged import CacheSizes
from dms_train.kernels.decode.types import FP8
from dms_train.method.spec import PRESETS
from dms_train.vllm_plugin.batch import StepInputs, compile_steps
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool
from dms_train.vllm_plugin.part_graphs import Part, PartGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS, ROWS, HEADS, GROUP, SIZE, LENGTH = 2, 3, 2, 2, 64, 256
PAGE, PAGES = 16, 400
SPEC = PRESETS["dms"].override(window=16).spec
# row and number of tokens of each part; some have padding, others begin or continue a prompt
PARTS = [(0, 64), (1, 5), (0, 32), (2, 100), (1, 64), (0, 7), (2, 64)]


@dataclass
class Served:
    """A cache on the GPU with its graphs."""

    cache: GrantedCache
    graphs: PartGraphs

    @classmethod
    def build(cls, stored: str | None, table: torch.Tensor) -> Served:
        device = table.device
        pool = GrantedPool(
            device=device, stored=stored, head_size=SIZE, dtype=torch.bfloat16, page_slots=PAGE
        )
        windows: list[int | None] = [None] * LAYERS
        sizes = CacheSizes(LAYERS, ROWS, HEADS, GROUP, LENGTH)
        cache = GrantedCache(pool, SPEC, sizes, windows)
        count = (PAGES + 1) * pool.page_slots * pool.slot_bytes
        raw = torch.zeros(count, dtype=torch.uint8, device=device)
        pool.bind(raw if stored == FP8 else raw.view(torch.bfloat16))
        graphs = PartGraphs(
            cache, heads=HEADS * GROUP, size=SIZE, dtype=torch.bfloat16, longest=128
        )
        compile_steps(cache, graphs, StepInputs([table] * LAYERS, requests=ROWS, tokens=LENGTH))
        return cls(cache, graphs)


@pytest.mark.parametrize("stored", [None, FP8])
def test_replayed_parts_are_those_without_graphs(stored: str | None) -> None:
    angle = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(SIZE // 2)
    table = torch.cat([angle.cos(), angle.sin()], 1).cuda()
    eager, replayed = (Served.build(stored, table) for _ in range(2))
    replayed.graphs.capture()
    assert not replayed.cache.lists.lengths.any()
    draw = torch.Generator("cuda").manual_seed(1)
    seen = dict.fromkeys(range(ROWS), 0)
    for row, count in PARTS:
        position = torch.arange(seen[row], seen[row] + count, device="cuda")
        for layer in range(LAYERS):
            heads = torch.randn(
                count, HEADS * (GROUP + 2), SIZE, device="cuda", generator=draw
            ).bfloat16()
            query, key, value = heads.split((HEADS * GROUP, HEADS, HEADS), 1)
            rotation = table.unflatten(1, (2, -1))[position].unsqueeze(1)
            part = Part(
                *(x.contiguous() for x in (query, key, value)),
                position,
                torch.tensor([row], device="cuda"),
                rotation,
            )
            outputs = [torch.empty_like(part.query) for _ in range(2)]
            for served, output in zip((eager, replayed), outputs, strict=True):
                served.graphs.attend(layer, part, seen[row] == 0, output)
            torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)
        seen[row] += count
        assert torch.equal(eager.cache.lists.lengths, replayed.cache.lists.lengths)
        assert torch.equal(eager.cache.pool.free.left, replayed.cache.pool.free.left)
    assert (replayed.cache.lists.lengths > 0).all()
