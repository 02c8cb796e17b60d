"""Caches under the same passes: prompts in parts, batches, turns, forks and rows computed again."""

from __future__ import annotations

import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_budget import BudgetPagedCache
from dms_train.inference.cache.paged_selecting import SelectingPagedCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.base import RequestSizes
from dms_train.inference.policies.kernel_rules import PageRule
from dms_train.method.base import MethodSpec

POLICIES = [
    ("streaming_llm", {"cr": 2.0, "sinks": 2}),
    ("streaming_llm", {"cr": 1.5, "sinks": 3, "budget_mode": "growing"}),
    ("snapkv", {"cr": 2.0, "window": 4, "kernel": 3}),
    ("keydiff", {"budget": 4, "block": 3}),
    ("r_kv", {"budget": 5, "window": 2, "kernel": 3, "interval": 3}),
    ("knorm", {"cr": 2.0, "interval": 2, "decode_only": True}),
    ("h2o", {"cr": 2.0}),
    ("h2o", {"budget": 5, "prefill": "dense", "group_reduce": "max"}),
    ("tova", {"cr": 2.0}),
    ("tova", {"cr": 1.6, "scope": "group", "protect_last": True, "budget_mode": "growing"}),
]
SELECTING = [
    ("quest", {"budget": 8, "page": 4}),
    ("quest", {"budget": 9, "page": 8, "include_last_page": False}),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in POLICIES]
HEADS, GROUP, SIZE, ROWS, LENGTH = 2, 2, 4, 4, 22
REQUESTS = [RequestSizes(7, 15, 0), RequestSizes(1, 11, 0), RequestSizes(10, 14, 0)]
TURN = RequestSizes(19, LENGTH, 0)


def readable(policy) -> CompactCache:
    pool = PagePool(
        head_size=SIZE,
        state_width=policy.state_width,
        dtype=torch.float32,
        device=torch.device("cpu"),
        page_slots=4,
        slab_pages=4,
    )
    return CompactCache(pool, policy, layers=1, rows=ROWS, heads=HEADS)


def paged(policy, device: torch.device, pages: int = 100, layers: int = 1) -> PagedKVCache:
    pool = DevicePool(head_size=SIZE, dtype=torch.float32, device=device, page_slots=4, pages=pages)
    sizes = CacheSizes(layers, rows=ROWS, heads=HEADS, group=GROUP, longest=LENGTH)
    pages_rule = isinstance(policy.kernel_rule(), PageRule)
    return (SelectingPagedCache if pages_rule else BudgetPagedCache)(pool, policy, sizes)


class Passes:
    """Passes over one cache, of a model with a spec if its policy needs one.

    Attributes:
        seen: Outputs of every pass, and by row: tokens so far, reads, live tokens and positions.
    """

    def __init__(self, cache, device: torch.device, spec: MethodSpec | None = None) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = (ROWS, LENGTH, HEADS, GROUP, SIZE)
        self.query = 2 * torch.randn(shape, generator=draw)
        self.key, self.value = torch.randn(2, *shape[:3], 1, SIZE, generator=draw)
        self.cache, self.device, self.spec = cache, device, spec
        self.positions = not isinstance(
            cache.policy.kernel_rule(), PageRule
        )  # otherwise all are held
        self.done = [0] * ROWS
        self.requests = [*REQUESTS, REQUESTS[1]]
        self.seen: list = []

    def assign(self, row: int, request: RequestSizes) -> None:
        self.requests[row] = request
        self.cache.assign(row, request)

    def go(self, until: dict[int, int], chunk: int = 4) -> None:
        """Compute rows up to so many tokens, as many at a time as the policy takes."""
        while counts := {row: n - self.done[row] for row, n in until.items() if n > self.done[row]}:
            for row, count in counts.items():
                most = self.cache.policy.max_tokens(self.requests[row], self.done[row])
                counts[row] = min(chunk if most is None else most, chunk, count)
            self._compute({row: n for row, n in counts.items() if n == 1})
            self._compute({row: n for row, n in counts.items() if n > 1})

    def _compute(self, counts: dict[int, int]) -> None:
        if not counts:
            return
        rows, n = torch.tensor(list(counts)), max(counts.values())
        position = torch.full((len(rows), n), -1)
        for place, (row, count) in enumerate(counts.items()):
            position[place, :count] = torch.arange(self.done[row], self.done[row] + count)
        query, key, value = (
            x[rows[:, None], position.clamp(min=0)] for x in (self.query, self.key, self.value)
        )
        cos = torch.ones(len(rows), n, 1, 1, SIZE)
        fields = (query, key, value, cos, torch.zeros_like(cos), position, rows)
        lengths = tuple(counts.values()) if min(counts.values()) < n else None
        step = AttentionStep(*(x.to(self.device) for x in fields), spec=self.spec, lengths=lengths)
        done = self.cache.step(0, step)
        live = self.cache.live(rows.to(self.device))[0].cpu()
        for place, (row, count) in enumerate(counts.items()):
            self.done[row] += count
            facts = (row, self.done[row], done.reads[place].tolist(), live[place].tolist())
            if self.positions:
                (held,) = self.cache.positions(row)
                facts += ([head.tolist() for head in held],)
            self.seen.append((done.output[place, :, :count].cpu(), facts))

    def fork(self, source: int, target: int) -> None:
        self.assign(target, self.requests[source])
        snapshot = self.cache.snapshot(source, self.done[source])
        snapshot.restore(target)
        snapshot.release()
        self.done[target] = self.done[source]

    def free(self, rows: list[int]) -> None:
        self.cache.free(torch.tensor(rows, device=self.device))
        for row in rows:
            self.done[row] = 0


def scenario(cache, device: torch.device, spec: MethodSpec | None = None) -> Passes:
    """Unequal requests side by side, a fork, a row that is computed again, and a second turn."""
    passes = Passes(cache, device, spec)
    for row, request in enumerate(REQUESTS):
        passes.assign(row, request)
    passes.go({0: 9, 1: 6, 2: 9})  # row 2 ends its prompt with one token
    passes.fork(1, 3)
    passes.go({0: 15, 1: 11, 2: 12, 3: 10})
    passes.free([2, 1])
    passes.assign(2, REQUESTS[2])
    passes.assign(0, TURN)
    passes.go({0: LENGTH, 2: 14, 3: 11})
    return passes


def check_scenario(policy, device: torch.device, spec: MethodSpec | None = None) -> None:
    """The paged cache and the readable one agree in every pass; no page is lost."""
    expected = scenario(readable(policy), torch.device("cpu"), spec)
    cache = paged(policy, device)
    found = scenario(cache, device, spec)
    assert [facts for _, facts in found.seen] == [facts for _, facts in expected.seen]
    for (output, facts), (true, _) in zip(found.seen, expected.seen, strict=True):
        torch.testing.assert_close(output, true, rtol=1e-5, atol=1e-5, msg=str(facts))
    found.free([0, 2, 3])
    assert cache.used_pages == 0
