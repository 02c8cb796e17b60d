"""Steps with parts of prompts that the vLLM plugin replays, beside steps without graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from dms_train.inference.cache.sizes import CacheSizes
from dms_train.kernels.decode.types import FP8
from dms_train.method.spec import PRESETS
from dms_train.vllm_plugin.batch import BatchAttention, PromptParts, StepInputs, compile_steps
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool
from dms_train.vllm_plugin.mixed_steps import MixedSteps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS, ROWS, HEADS, GROUP, SIZE, LENGTH = 2, 10, 2, 2, 64, 256
PAGE, PAGES, VOCABULARY = 16, 1000, 100
SPEC = PRESETS["dms"].override(window=16).spec
# batches: row and number of tokens of each request; single tokens first
BATCHES = [
    [(0, 64)],
    [(1, 5)],
    [(0, 1), (1, 1), (2, 100)],
    [(0, 1), (1, 64), (3, 30)],
    [(0, 1), (1, 1), (2, 1), (3, 7)],
    [(2, 1), (1, 1), (3, 64), (4, 2)],
    [(3, 1), (0, 33)],
    [(3, 1), *[(row, 2) for row in (5, 6)]],
    [*[(row, 1) for row in range(7)], (7, 3), (8, 120)],
    [*[(row, 1) for row in range(9)], (9, 50)],
]


@dataclass
class Served:
    """Layers of attention alone, whose tokens depend on their ids, with a cache on the GPU."""

    cache: GrantedCache
    inputs: StepInputs
    steps: MixedSteps
    heads: torch.Tensor

    @classmethod
    def build(cls, stored: str | None, table: torch.Tensor) -> Served:
        device = table.device
        pool = GrantedPool(
            device=device, stored=stored, head_size=SIZE, dtype=torch.bfloat16, page_slots=PAGE
        )
        windows: list[int | None] = [None] * LAYERS
        cache = GrantedCache(pool, SPEC, CacheSizes(LAYERS, ROWS, HEADS, GROUP, LENGTH), windows)
        count = (PAGES + 1) * pool.page_slots * pool.slot_bytes
        raw = torch.zeros(count, dtype=torch.uint8, device=device)
        pool.bind(raw if stored == FP8 else raw.view(torch.bfloat16))
        inputs = StepInputs([table] * LAYERS, requests=ROWS)
        compile_steps(cache, inputs, heads=HEADS * GROUP, dtype=torch.bfloat16)
        draw = torch.Generator("cuda").manual_seed(1)
        shape = LAYERS, VOCABULARY, HEADS * (GROUP + 2), SIZE
        heads = torch.randn(*shape, device=device, generator=draw).bfloat16()
        served = cls(cache, inputs, None, heads)
        served.steps = MixedSteps(cache, inputs, served.forward, tokens=LENGTH)
        return served

    def forward(self, batch, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        outputs = []
        for layer in range(LAYERS):
            split = self.heads[layer, ids].split((HEADS * GROUP, HEADS, HEADS), 1)
            query, key, value = (x.contiguous() for x in split)
            outputs.append(torch.empty_like(query))
            batch.attend(layer, query, key, value, outputs[-1])
        return torch.cat(outputs, 1).flatten(1)

    def batch(self, requests: list[tuple[int, int]], seen: dict[int, int]) -> BatchAttention:
        """Describe a batch of requests, of which so many tokens are in the cache."""
        device = self.cache.device
        position = torch.cat(
            [torch.arange(seen[row], seen[row] + n, device=device) for row, n in requests]
        )
        self.inputs.set_rows(torch.tensor([row for row, _ in requests], device=device))
        starts = torch.tensor([0, *(n for _, n in requests)], device=device).cumsum(0)
        parts, start = [], 0
        for index, (row, n) in enumerate(requests):
            tokens = slice(start, start + n)
            if n > 1:
                own, rows = position[None, tokens], self.inputs.rows[index, None]
                rotations = partial(self.inputs.rotations, own)
                parts.append((tokens, PromptParts(own, rows, seen[row] == 0, rotations)))
            start += n
        singles = len(requests) - len(parts)
        return BatchAttention(self.cache, self.inputs, position, starts, singles, parts)


@pytest.mark.parametrize("stored", [None, FP8])
def test_replayed_steps_are_those_without_graphs(stored: str | None) -> None:
    angle = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(SIZE // 2)
    table = torch.cat([angle.cos(), angle.sin()], 1).cuda()
    eager, replayed = (Served.build(stored, table) for _ in range(2))
    replayed.steps.capture()
    assert not replayed.cache.lists.lengths.any()
    draw = torch.Generator("cuda").manual_seed(2)
    seen = dict.fromkeys(range(ROWS), 0)
    for requests in BATCHES:
        count = sum(n for _, n in requests)
        ids = torch.randint(VOCABULARY, (count,), device="cuda", generator=draw)
        batch = eager.batch(requests, seen)
        assert eager.steps.kind_of(batch, count) is None
        expected, pages = eager.forward(batch, ids, batch.position), eager.inputs.pages
        batch = replayed.batch(requests, seen)
        kind = replayed.steps.kind_of(batch, count)
        found = replayed.steps.run(kind, batch, ids, batch.position)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(replayed.cache.lists.lengths, eager.cache.lists.lengths)
        assert torch.equal(replayed.inputs.pages[: len(requests)], pages[: len(requests)])
        for row, n in requests:
            seen[row] += n
