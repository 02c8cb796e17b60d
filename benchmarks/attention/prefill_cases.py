"""Sparse prefill beside dense attention on a GPU: time of one layer, memory of a whole prompt.

Decisions are random and heads differ: their odds of evicting lie between half and twice the mean.
A time covers a whole prompt in one chunk, as the engine computes it: counting, one wait of the
host, pages, compaction and attention. The dense peer is cuDNN's causal attention, which reads every
key. The engine takes it for first chunks of policies that evict nothing. Dense attention cannot
hide old keys from only some heads, so policies that evict do not take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import tables
from benchmarks.tables import Column, field
from dms_train.inference.policies.kernel_rules import NEVER, WindowRule
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels.prefill import sparse as prefill
from dms_train.kernels.prefill.lists import Pages, Tokens
from dms_train.method.spec import PRESETS

Row = dict[str, Any]


class Case(NamedTuple):
    """One layer of a model: query heads, KV heads, tokens, head size, window."""

    label: str
    heads: int = 32
    kv_heads: int = 8
    s: int = 32768
    d: int = 128
    window: int = 256


CASES = (
    Case("Llama 3.1 8B, 32768"),
    Case("Llama 3.1 8B, 8192", s=8192),
    Case("Qwen2.5 1.5B, 32768", heads=12, kv_heads=2),
    Case("Llama 3.2 1B, 32768", d=64),
)
RATIOS = (8.0, 4.0, 2.0, 1.25, 1.0)
# Least speed relative to dense attention in the first case.
BARS = {8.0: 4.0, 4.0: 2.5, 2.0: 1.0}
MEMORY_TOKENS, MEMORY_CHUNK, MEMORY_LAYERS, MEMORY_RATIO = 131072, 8192, 32, 8.0


def odds_of(case: Case, ratio: float) -> Tensor:
    """Return the probability of eviction by KV head, [h], so that heads hold s / ratio slots."""
    target = (case.s / ratio - case.window) / (case.s - case.window)
    spread = 2.0 ** torch.linspace(-1, 1, case.kv_heads, dtype=torch.float64)
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (1 / (1 + middle * spread)).mean() > target else (low, middle)
    return (low * spread / (1 + low * spread)).float()


def decide(odds: Tensor, tokens: int, draw: torch.Generator) -> Tensor:
    """Draw random decisions, bool [1, h, tokens]."""
    sample = torch.rand(1, len(odds), tokens, device=draw.device, generator=draw)
    return sample < odds.to(draw.device)[:, None]


def tensors(case: Case, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw random query, key and value, [1, heads, tokens, d] in bf16."""

    def normal(heads: int) -> Tensor:
        x = torch.empty(1, tokens, heads, case.d, device=draw.device, dtype=torch.bfloat16)
        return x.normal_(generator=draw).transpose(1, 2)

    return normal(case.heads), normal(case.kv_heads), normal(case.kv_heads)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute cuDNN's causal attention."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def time_of(call: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds: median and the 20 % and 80 % quantiles."""
    from triton.testing import do_bench

    return dict(
        zip(("median", "low", "high"), do_bench(call, quantiles=(0.5, 0.2, 0.8)), strict=True)
    )


def measure(cases: tuple[Case, ...] = CASES) -> list[Row]:
    """Measure all cases and ratios, and the memory of a long prompt."""
    rows = [row for case in cases for row in _case_rows(case)]
    return [*rows, memory_row()]


def _case_rows(case: Case) -> list[Row]:
    draw = torch.Generator("cuda").manual_seed(11)
    query, key, value = tensors(case, case.s, draw)
    peer = time_of(lambda: dense(query, key, value))
    rows = []
    for ratio in RATIOS:
        if ratio > 1:
            evicted = decide(odds_of(case, ratio), case.s, draw)
        else:
            evicted = torch.zeros(1, case.kv_heads, case.s, dtype=torch.bool, device="cuda")
        rows.append(_row(case, ratio, (query, key, value, evicted), peer))
    return rows


def _row(
    case: Case, ratio: float, given: tuple[Tensor, Tensor, Tensor, Tensor], peer: dict[str, float]
) -> Row:
    key, evicted = given[1], given[3]
    how: dict[str, Any] = {"window": case.window, "scale": case.d**-0.5}
    none = torch.zeros(evicted.shape[:2], dtype=torch.int32, device="cuda")
    chunk = prefill.count(evicted, none)
    pages = prefill.fresh_pages(key, int(chunk.lengths.max()))
    ours = time_of(lambda: _attend_prompt(*given, **how))
    compaction = time_of(lambda: _compact(key, given[2], evicted, none, pages))
    held = chunk.lengths.float().mean().item()
    return {
        "kind": "prefill",
        **case._asdict(),
        "ratio": ratio,
        "survivors": chunk.lengths.flatten().tolist(),
        "pairs_share": _read_pairs(evicted, case.window) / (case.s * (case.s + 1) / 2),
        "held_share": held / case.s,
        "ms": ours,
        "compaction_ms": compaction,
        "cudnn_ms": peer,
        "speedup": peer["median"] / ours["median"],
        "bar": BARS.get(ratio) if case == CASES[0] else None,
    }


def _attend_prompt(
    query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, *, window: int, scale: float
) -> Tensor:
    """Compute attention of a whole prompt in one chunk, from counting to output."""
    b, h, _ = evicted.shape
    state = prefill.empty(b, h, window, evicted.device)
    chunk = prefill.plan_chunk(torch.cat([state.evicted, evicted], 2), state, window)
    pages = prefill.fresh_pages(key, int(chunk.lengths.max()))
    tokens = Tokens(query, key, value)
    return prefill.extend_prompt(tokens, chunk, state, pages, window=window, scale=scale)


def _compact(key: Tensor, value: Tensor, evicted: Tensor, none: Tensor, pages: Pages) -> None:
    from dms_train.kernels.prefill.triton_pack import pack_survivors

    pack_survivors(key, value, prefill.count(evicted, none), pages)


def _read_pairs(evicted: Tensor, window: int) -> float:
    """Return the number of visible (query, key) pairs of a head, mean over heads."""
    s = evicted.shape[-1]
    reach = torch.arange(s, 0, -1, device=evicted.device)
    reads = torch.where(evicted, reach.clamp(max=window + 1), reach)
    return reads.double().sum(-1).mean().item()


class _Slabs:
    """Pages allocated as lists grow, in slabs anywhere in memory, for all layers."""

    def __init__(self, h: int, d: int, layers: int) -> None:
        self.shape = (2, prefill.PAGE_SLOTS, d)
        self.slabs: list[Tensor] = []
        self.free: list[int] = []
        self.tables = [
            torch.zeros(1, h, 0, dtype=torch.int32, device="cuda") for _ in range(layers)
        ]
        self.held = [[0] * h for _ in range(layers)]

    def _open(self, pages: int = 64) -> None:
        size = torch.Size(self.shape).numel()
        memory = torch.empty((pages + 1) * size, dtype=torch.bfloat16, device="cuda")
        base = self.slabs[0].data_ptr() if self.slabs else memory.data_ptr()
        bytes_ = 2 * size
        skip = (base - memory.data_ptr()) % bytes_ // 2
        slab = memory[skip : skip + pages * size].view(pages, *self.shape)
        self.slabs.append(slab)
        first = (slab.data_ptr() - base) // bytes_
        self.free += range(first, first + pages)

    def reserve(self, layer: int, lengths: Tensor) -> Pages:
        """Reserve pages for the lists of one layer; the host waits for their lengths."""
        held, table = self.held[layer], self.tables[layer]
        need = [-(-count // prefill.PAGE_SLOTS) for count in lengths[0].tolist()]
        if max(need) > table.shape[-1]:
            table = self.tables[layer] = F.pad(table, (0, max(need) - table.shape[-1]))
        rows = table[0].tolist()
        for h, count in enumerate(need):
            while len(self.free) < count - held[h]:
                self._open()
            for index in range(held[h], count):
                rows[h][index] = self.free.pop()
            held[h] = max(held[h], count)
        table.copy_(torch.tensor([rows], dtype=torch.int32))
        lowest = min(self.slabs, key=lambda slab: slab.data_ptr())
        shift = (self.slabs[0].data_ptr() - lowest.data_ptr()) // (lowest[0].numel() * 2)
        return Pages(lowest, table + shift)


def memory_row(case: Case = CASES[0], ratio: float = MEMORY_RATIO) -> Row:
    """Measure the peak of a prompt of many layers in chunks; dense keys and values are dropped."""
    case = case._replace(label="Llama 3.1 8B, 131072 in chunks", s=MEMORY_TOKENS)
    draw = torch.Generator("cuda").manual_seed(13)
    odds = odds_of(case, ratio)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    slabs = _Slabs(case.kv_heads, case.d, MEMORY_LAYERS)
    nothing = prefill.empty(1, case.kv_heads, case.window, torch.device("cuda"))
    state = [nothing] * MEMORY_LAYERS
    clock = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    spent = 0.0
    for _ in range(0, case.s, MEMORY_CHUNK):
        for layer in range(MEMORY_LAYERS):
            query, key, value = tensors(case, MEMORY_CHUNK, draw)
            evicted = decide(odds, MEMORY_CHUNK, draw)
            clock[0].record()
            evicted = torch.cat([state[layer].evicted, evicted], 2)
            chunk = prefill.plan_chunk(evicted, state[layer], case.window)
            prefill.extend_prompt(
                Tokens(query, key, value),
                chunk,
                state[layer],
                slabs.reserve(layer, chunk.lengths),
                window=case.window,
                scale=case.d**-0.5,
            )
            state[layer] = prefill.state_after(chunk, state[layer], case.window)
            clock[1].record()
            clock[1].synchronize()
            spent += clock[0].elapsed_time(clock[1])
    peak = torch.cuda.max_memory_allocated() - before
    full = 2 * 2 * case.s * case.kv_heads * case.d * MEMORY_LAYERS
    return {
        "kind": "memory",
        **case._asdict(),
        "ratio": ratio,
        "layers": MEMORY_LAYERS,
        "chunk": MEMORY_CHUNK,
        "peak_bytes": peak,
        "end_bytes": torch.cuda.memory_allocated() - before,
        "dense_bytes": full,
        "share": peak / full,
        "bar": 0.25,
        "attention_ms": spent,
    }


def engine_takes(ratio: float) -> str:
    """Name the attention that the engine takes for a first chunk, by its own rule.

    Args:
        ratio: Compression ratio; 1 is served without eviction.
    """
    policy = build_policy("dms" if ratio > 1 else "keep_all", {}, PRESETS["dms"])
    return "dense" if policy.kernel_rule() == WindowRule(evicts=NEVER) else "kept tokens"


TIMES: tuple[Column, ...] = (
    ("layer", field("label")),
    ("CR", field("ratio", "g")),
    ("kept tokens, least-most", lambda row: f"{min(row['survivors'])}-{max(row['survivors'])}"),
    ("pairs read", field("pairs_share", ".3f")),
    ("ms [20-80 %]", lambda row: "{median:.3f} [{low:.3f}-{high:.3f}]".format(**row["ms"])),
    ("compaction ms", lambda row: f"{row['compaction_ms']['median']:.3f}"),
    ("cuDNN dense ms", lambda row: f"{row['cudnn_ms']['median']:.3f}"),
    ("speed-up", field("speedup", ".2f")),
    ("required", field("bar")),
    ("the engine takes", lambda row: engine_takes(row["ratio"])),
)
MEMORY: tuple[Column, ...] = (
    ("prompt", lambda row: "{layers} layers of {label} of {chunk}".format(**row)),
    ("CR", field("ratio", "g")),
    ("peak GB, all included", field("peak_bytes", ".2f", 1e-9)),
    ("dense KV GB", field("dense_bytes", ".2f", 1e-9)),
    ("share", field("share", ".3f")),
    ("required", field("bar")),
    ("attention s", field("attention_ms", ".2f", 1e-3)),
)


def table(rows: list[Row]) -> str:
    """Return a table of times and a table of memory."""
    return "\n\n".join(
        tables.table(columns, [row for row in rows if row["kind"] == kind])
        for kind, columns in (("prefill", TIMES), ("memory", MEMORY))
    )
