"""Decoding from a paged cache on a GPU: bytes per second beside a copy, append beside attention.

Every time is the median over replays of a CUDA graph that holds several calls, which excludes
launch gaps. Caches are larger than the L2 cache of any GPU of 2026.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dms_train.kernels.decode.types import (
    EVICTION_CHANNEL,
    FP8,
    Decisions,
    FreePages,
    PagedCache,
    Step,
)

REPLAYS = 15


class Case(NamedTuple):
    """A cache: sequences, heads and live tokens.

    Attributes:
        sequences: Number of sequences of the batch.
        heads: KV heads.
        group: Query heads per KV head.
        d: Head size.
        mean: Live tokens of a KV list.
        spread: Lengths are uniform in mean * (1 - spread) .. mean * (1 + spread).
        page_slots: Slots of a page.
        cache: `bf16` or `fp8`.
    """

    sequences: int = 32
    heads: int = 8
    group: int = 4
    d: int = 128
    mean: int = 4096
    spread: float = 0.5
    page_slots: int = 16
    cache: str = "bf16"


CASES = (
    Case(),
    Case(cache="fp8"),
    Case(sequences=1, mean=32768),
    Case(sequences=8, mean=2048, spread=0.9),
    Case(sequences=64, group=3, d=64, mean=2048),
)
WINDOW = 256


def list_lengths(case: Case) -> Tensor:
    """Return int32 [sequences, heads], the same for every run."""
    draw = torch.Generator().manual_seed(7)
    share = torch.rand(case.sequences, case.heads, generator=draw) * 2 - 1
    return (case.mean * (1 + case.spread * (share - share.mean()))).int()


def build_cache(case: Case, device: str = "cuda") -> PagedCache:
    """Fill a cache with random tokens in randomly ordered pages, and its ring with random marks."""
    lengths = list_lengths(case).to(device)
    pages = (lengths + case.page_slots - 1) // case.page_slots
    spare = lengths.numel() * 16
    used = int(pages.sum())
    draw = torch.Generator(device).manual_seed(3)
    order = torch.randperm(used + spare, generator=draw, device=device, dtype=torch.int32) + 1
    table_width = int(pages.max()) + 16
    size = (used + spare + 1, 2, case.page_slots, case.d)
    slab = torch.empty(size, device=device, dtype=torch.bfloat16).normal_(generator=draw)
    table = torch.zeros(*lengths.shape, table_width, dtype=torch.int32, device=device)
    table[torch.arange(table_width, device=device) < pages[..., None]] = order[:used]
    ring = torch.rand(*lengths.shape, WINDOW + 1, device=device)
    ring = (ring * lengths[..., None]).int() * 2 + (torch.rand_like(ring) < 0.5).int()
    free = torch.cat([order[used:], torch.zeros(used, dtype=torch.int32, device=device)])
    quantised = case.cache == "fp8"
    exponents = torch.full((*table.shape, 2), -5, dtype=torch.int8, device=device)
    return PagedCache(
        pages=(slab * 32).to(FP8) if quantised else slab,
        table=table,
        lengths=lengths,
        ring=ring,
        exponents=exponents if quantised else None,
        free=FreePages(
            numbers=free,
            left=torch.tensor([spare], dtype=torch.int32, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            holders=torch.ones(len(slab), dtype=torch.int32, device=device),
        ),
    )


def build_step(case: Case, position: int, device: str = "cuda") -> Step:
    """Draw one token for every sequence."""
    heads, b = case.heads * case.group, case.sequences
    put: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    angle = torch.rand(b, case.d // 2, device=device).repeat(1, 2)
    return Step(
        query=torch.randn(b, heads, case.d, **put),
        key=torch.randn(b, case.heads, case.d, **put),
        value=torch.randn(b, case.heads, case.d, **put),
        cos=angle.cos().bfloat16(),
        sin=angle.sin().bfloat16(),
        position=torch.full((b,), position, dtype=torch.int32, device=device),
        rows=torch.arange(b, dtype=torch.int32, device=device),
    )


def graph_times(calls: Callable[[], object], count: int) -> tuple[float, float]:
    """Return median and interquartile range in microseconds of one of the `count` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    low, middle, high = statistics.quantiles(times[2:], n=4)
    return middle, high - low


def copy_bandwidth() -> float:
    """Return the bytes read and written per second by a device-to-device copy of 2 GiB."""
    from triton.testing import do_bench

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / do_bench(lambda: target.copy_(source), return_mode="median") * 1e3


def attention_times(case: Case, cache: PagedCache, tuning: Any = None) -> dict[str, float]:
    """Measure attention alone, append alone and both, in microseconds."""
    from dms_train.kernels.decode import triton_append
    from dms_train.kernels.decode import triton_attention as triton_decode

    steps = [build_step(case, 5000 + t) for t in range(4)]
    memory = triton_decode.attention_workspace(steps[0].query, cache, tuning)
    rule = Decisions(EVICTION_CHANNEL, shift=1, scale=100.0, clear=True)
    output = torch.empty_like(steps[0].query)
    changed = (cache.lengths, cache.ring, *cache.free[:3])
    saved = [x.clone() for x in changed]

    def attend() -> None:
        for step in steps:
            triton_decode.attend(step.query, cache, step.rows, 0.09, memory, output)

    def append() -> None:
        for step in steps:
            triton_append.append(step, cache, rule, rotated=output)

    def both() -> None:
        for step in steps:
            triton_append.append(step, cache, rule, rotated=output)
            triton_decode.attend(output, cache, step.rows, 0.09, memory, output)

    times: dict[str, float] = {}
    for name, calls in (("attend", attend), ("both", both), ("append", append)):
        times[name], times[f"{name}_iqr"] = graph_times(calls, len(steps))
        assert int(cache.free.fault) == 0
        for x, y in zip(changed, saved, strict=True):
            x.copy_(y)
    return times


def padded_times(case: Case) -> dict[str, float]:
    """Measure SDPA over a dense cache padded to the longest KV list, in microseconds by backend."""
    longest = int(list_lengths(case).max())
    put: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(case.sequences, case.heads * case.group, 1, case.d, **put)
    key, value = torch.randn(2, case.sequences, case.heads, longest, case.d, **put)
    times = {}
    for name, kind in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):

        def calls(kind: SDPBackend = kind) -> None:
            with sdpa_kernel(kind):
                for _ in range(2):
                    F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        try:
            times[name] = graph_times(calls, 2)[0]
        except RuntimeError as refusal:  # a peer that is not available on this machine
            print(f"{name}: {str(refusal).splitlines()[0]}")
    return times


def flashinfer_times(case: Case, cache: PagedCache) -> dict[str, float]:
    """Measure FlashInfer's paged decode over the same pages, in microseconds, if installed.

    Its page lists are per sequence, so every KV list becomes a sequence with one KV head. Its plan
    is made on the host beforehand and not timed.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer

    lengths = cache.lengths.flatten()
    pages = (lengths + case.page_slots - 1) // case.page_slots
    column = torch.arange(cache.table.shape[-1], device="cuda")
    indices = cache.table.flatten(0, 1)[column < pages[:, None]]
    starts = F.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    query = build_step(case, 5000).query.view(-1, case.group, case.d)
    kinds = {"q_data_type": query.dtype, "kv_data_type": cache.pages.dtype}
    scratch = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    times = {}
    for name, cores in (("", False), ("_tensor_cores", True)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, "NHD", use_tensor_cores=cores
        )
        last = (lengths - 1) % case.page_slots + 1
        sizes = (case.group, 1, case.d, case.page_slots)
        try:
            wrapper.plan(starts, indices, last, *sizes, **kinds)
            blocks = cache.pages.unsqueeze(3)

            def calls(wrapper: Any = wrapper, blocks: Tensor = blocks) -> None:
                for _ in range(4):
                    wrapper.run(query, blocks)

            times[f"flashinfer{name}"] = graph_times(calls, 4)[0]
        except RuntimeError as refusal:
            print(f"flashinfer{name}: {str(refusal).splitlines()[0]}")
    return times


def needed_bytes(case: Case) -> int:
    """Return the bytes of live keys and values."""
    width = 1 if case.cache == "fp8" else 2
    return int(list_lengths(case).sum()) * 2 * case.d * width


def measure(cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    """Measure one row for each case. Needs a GPU."""
    copy = copy_bandwidth()
    rows = []
    for case in cases:
        cache = build_cache(case)
        times = attention_times(case, cache)
        moved = needed_bytes(case) / times["attend"] * 1e6
        row: dict[str, Any] = {**case._asdict(), "copy_tb_s": copy / 1e12}
        row |= {f"{name}_us": value for name, value in times.items()}
        row["tb_s"] = moved / 1e12
        row["share_of_copy"] = moved / copy
        row["append_share"] = (times["both"] - times["attend"]) / times["attend"]
        row |= {f"{name}_us": value for name, value in flashinfer_times(case, cache).items()}
        row |= {f"padded_{name}_us": value for name, value in padded_times(case).items()}
        del cache
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = []
    for row in rows:
        peers = ", ".join(
            f"{name[:-3].replace('_', ' ')} {value:.0f} us"
            for name, value in row.items()
            if name.startswith(("padded", "flashinfer"))
        )
        lines.append(
            f"{row['sequences']:3d} x {row['heads']} x {row['mean']:6d} d {row['d']:3d} "
            f"{row['cache']}: attend {row['attend_us']:7.1f} us (iqr {row['attend_iqr_us']:.1f}), "
            f"{row['tb_s']:.2f} TB/s, {row['share_of_copy']:.1%} of copy; append alone "
            f"{row['append_us']:.1f} us, in a step {row['append_share']:.1%}; {peers}"
        )
    if not any(name.startswith("flashinfer") for row in rows for name in row):
        lines.append("FlashInfer is not installed or did not build: not measured.")
    return "\n".join(lines)
