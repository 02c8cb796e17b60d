"""Steps with a part of a prompt that the vLLM plugin replays, beside steps without graphs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dms_train.inference.cache.paged import CacheSizes
from dms_train.kernels.decode.types import FP8
from dms_train.method.spec import PRESETS
from dms_train.vllm_plugin.batch import (
    BatchAttention,
    PromptPart,
    StepGraphs,
    StepInputs,
    compile_steps,
)
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS, ROWS, HEADS, GROUP, SIZE, LENGTH = 2, 4, 2, 2, 64, 256
PAGE, PAGES = 16, 400
SPEC = PRESETS["dms"].override(window=16).spec
# batches: row and number of tokens of each request; single tokens first. Some parts have padding,
# others begin or continue a prompt
BATCHES = [
    [(0, 64)],
    [(1, 5)],
    [(0, 1), (1, 1), (2, 100)],
    [(0, 1), (1, 64)],
    [(0, 1), (1, 1), (2, 1), (3, 7)],
    [(2, 1), (1, 1), (3, 64)],
    [(3, 1), (0, 33)],
]


@dataclass
class Served:
    """A cache on the GPU with its graphs."""

    cache: GrantedCache
    graphs: StepGraphs
    inputs: StepInputs

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
        inputs = StepInputs([table] * LAYERS, requests=ROWS, tokens=LENGTH)
        graphs = StepGraphs.build(
            cache, inputs, heads=HEADS * GROUP, dtype=torch.bfloat16, longest=128
        )
        compile_steps(cache, graphs, inputs)
        return cls(cache, graphs, inputs)

    def batch(self, requests: list[tuple[int, int]], seen: dict[int, int]) -> BatchAttention:
        """Describe a batch of requests, of which so many tokens are in the cache."""
        device = self.cache.device
        position = torch.cat(
            [torch.arange(seen[row], seen[row] + n, device=device) for row, n in requests]
        )
        self.inputs.set_rows(torch.tensor([row for row, _ in requests], device=device))
        parts, start = [], 0
        for index, (row, n) in enumerate(requests):
            if n > 1:
                rotations = self.inputs.rotations(position[start : start + n])
                parts.append(PromptPart(start, start + n, index, seen[row] == 0, rotations))
            start += n
        singles = len(requests) - len(parts)
        return BatchAttention(self.cache, self.graphs, self.inputs, position, singles, parts)


@pytest.mark.parametrize("stored", [None, FP8])
def test_replayed_steps_are_those_without_graphs(stored: str | None) -> None:
    angle = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(SIZE // 2)
    table = torch.cat([angle.cos(), angle.sin()], 1).cuda()
    eager, replayed = (Served.build(stored, table) for _ in range(2))
    replayed.graphs.capture()
    assert not replayed.cache.lists.lengths.any()
    assert replayed.graphs.singles.can_run(1)
    assert not eager.graphs.singles.can_run(1)
    draw = torch.Generator("cuda").manual_seed(1)
    seen = dict.fromkeys(range(ROWS), 0)
    for requests in BATCHES:
        batches = [served.batch(requests, seen) for served in (eager, replayed)]
        count = sum(n for _, n in requests)
        for layer in range(LAYERS):
            heads = torch.randn(
                count, HEADS * (GROUP + 2), SIZE, device="cuda", generator=draw
            ).bfloat16()
            tokens = [x.contiguous() for x in heads.split((HEADS * GROUP, HEADS, HEADS), 1)]
            outputs = [torch.empty_like(tokens[0]) for _ in batches]
            for batch, output in zip(batches, outputs, strict=True):
                batch.attend(layer, *tokens, output)
            torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)
        for row, n in requests:
            seen[row] += n
        assert torch.equal(eager.cache.lists.lengths, replayed.cache.lists.lengths)
        assert torch.equal(eager.cache.pool.free.left, replayed.cache.pool.free.left)
    assert (replayed.cache.lists.lengths > 0).all()
