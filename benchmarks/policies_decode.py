"""Decode step of cache policies and of DMS, with equally many tokens in each KV list.

    python -m benchmarks policies_decode [POLICY ...]

The lists hold random keys and values: as many tokens as a budget leaves of `--context` tokens, with
positions from 0 on. Quest holds the whole context. The engine runs the steps: one captured graph
with the whole model and the sampler, launched before the previous step has finished. On a CPU the
kernels need TRITON_INTERPRET=1, and sizes are small.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.benchmark import Args, Benchmark, one_of, or_skipped
from benchmarks.records import Table
from benchmarks.serve.models import with_model
from benchmarks.tables import Column, field, table
from benchmarks.timing import ceilings
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache_builder import build_cache, kept_bytes
from dms_train.inference.decode_inputs import PackedInputs
from dms_train.inference.graphs import DecodeGraphs
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.base import RequestSizes
from dms_train.inference.policies.quest import QuestPolicy
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels.decode.types import Step

POLICIES = ("dms", "streaming_llm", "snapkv", "tova", "h2o", "quest")
_UNBUDGETED = ("dms", "keep_all", "window")
_PAGE = EngineOptions().page_slots  # also the page size of Quest
_AT_ONCE = 4  # number of sequences that are filled together
_FEWEST = 5  # least number of steps for a meaningful median and spread


class Sizes(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        shape: Model, one of `benchmarks.serve.models.SHAPES`.
        sequences: Number of sequences in a step.
        context: Number of tokens of each sequence so far.
        budget: Number of tokens that every KV list holds.
        steps: Number of decode steps.
    """

    shape: str
    sequences: int
    context: int
    budget: int
    steps: int

    def held(self, policy: str) -> int:
        """Return the number of tokens with which a KV list is filled."""
        return self.context if policy == "quest" else self.budget


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    names = ", ".join(POLICIES)
    add("policies", nargs="*", type=one_of(POLICIES), metavar="POLICY", help=f"of {names}")
    add("--sequences", type=int, help="default: 32 on a GPU, 2 elsewhere")
    add("--context", type=int, help="default: 8192 on a GPU, 128 elsewhere")
    add("--cr", type=float, default=8, help="context over budget (%(default)s)")
    add("--steps", type=int, help=f"default: 64 on a GPU, {_FEWEST} elsewhere")


def check(args: Args) -> None:
    """Refuse too few steps."""
    if args.steps is not None and args.steps < _FEWEST:
        raise ValueError(f"--steps {args.steps}: at least {_FEWEST}")


def sizes_of(args: Args) -> Sizes:
    """Return the sizes that the options request."""
    on_gpu = args.device.type == "cuda"
    shape, sequences, context, steps = (
        ("Llama-3.1-8B", 32, 8192, 64) if on_gpu else ("small", 2, 128, _FEWEST)
    )
    context = args.context or context
    budget = int(context / args.cr)
    return Sizes(shape, args.sequences or sequences, context, budget, args.steps or steps)


def settings(args: Args) -> dict[str, Any]:
    """Return the fields of the record that all policies share."""
    bandwidth = ceilings(args.device)["copy_bytes_per_s"]
    return {"copy_bytes_per_s": bandwidth, **sizes_of(args)._asdict()}


def cases(args: Args) -> Iterator[tuple[LoadedModel, str]]:
    """Yield every policy, with the one model that all of them run."""
    return with_model(sizes_of(args).shape, args.policies or POLICIES, args.device)


def measure_policy(case: tuple[LoadedModel, str], args: Args) -> Iterator[dict[str, Any]]:
    """Yield the row of a policy."""
    model, name = case
    row = or_skipped(lambda: measure(model, name, sizes_of(args), args.device))
    yield {"policy": name, **row}


@torch.no_grad()
def measure(model: LoadedModel, name: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Measure one policy.

    Returns:
        `step_ms` with its 20 % and 80 % quantiles; `cache_ms`, of the kernels of all layers that
        store, attend and choose, on a GPU only; slots `read` by a step and `live` ones after it,
        means over KV lists; `bytes` of the keys, values and bounds that a step reads.
    """
    own = {} if name in _UNBUDGETED else {"budget": sizes.budget}
    policy, held = build_policy(name, own, model.spec), sizes.held(name)
    longest = sizes.context + 3 * sizes.steps + 3 * _PAGE
    options = EngineOptions(
        policy=name,
        policy_options=own,
        device=str(device),
        kernels="triton",
        max_num_seqs=sizes.sequences,
        max_model_len=longest,
    )
    memory = _cache_bytes(model, sizes, held) + kept_bytes(model, policy, options)
    cache = build_cache(model, policy, replace(options, cache_bytes=memory))
    assert isinstance(cache, PagedKVCache)
    for row in range(sizes.sequences):
        cache.assign(row, RequestSizes(held, held + sizes.steps, 0))
        if (row + 1) % _AT_ONCE == 0 or row + 1 == sizes.sequences:
            _fill(cache, model, held, range(row // _AT_ONCE * _AT_ONCE, row + 1))
    graphs = DecodeGraphs(model.decoder, cache, sizes.sequences, longest)
    times, lists = _steps(graphs, cache.pool, sizes, held)
    read, live = (x.float().mean().item() for x in cache.counts(lists))
    low, *_, high = statistics.quantiles(times, n=5)
    figures = {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "step_ms_spread": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "read": round(read, 1),
        "live": round(live, 1),
        "bytes": _bytes_read(model, sizes, read, live if isinstance(policy, QuestPolicy) else 0),
    }
    if device.type == "cuda":
        figures["cache_ms"] = round(_cache_ms(cache, model, sizes, held), 3)
    return figures


def _bytes_read(model: LoadedModel, sizes: Sizes, read: float, bounded: float) -> int:
    """Return the bytes of keys and values, and of the page bounds of `bounded` tokens."""
    a = model.architecture
    slots = sizes.sequences * a.num_layers * a.num_query_groups * (read + bounded / _PAGE)
    return round(slots * 2 * a.kv_channels * model.dtype.itemsize)


def _cache_bytes(model: LoadedModel, sizes: Sizes, held: int) -> int:
    """Return the bytes for the tokens held and for the tokens of the steps."""
    a = model.architecture
    num_pages = -(-(held + 3 * sizes.steps) // _PAGE) + 2
    page = 2 * (_PAGE + 1) * a.kv_channels * model.dtype.itemsize + 8
    return sizes.sequences * a.num_layers * a.num_query_groups * num_pages * page + page


def _fill(cache: PagedKVCache, model: LoadedModel, held: int, rows: range) -> None:
    """Fill the KV lists of some rows with random tokens."""
    a, device = model.architecture, model.decoder.embed_tokens.weight.device
    b, n, g = len(rows), held, a.num_query_groups
    put: dict[str, Any] = {"device": device, "dtype": model.dtype}
    shape = (b, n, g, a.num_attention_heads // g, a.kv_channels)
    position = torch.arange(n, device=device).expand(b, n)
    keep = torch.zeros(b, g, n, dtype=torch.bool, device=device)
    for layer in range(a.num_layers):
        query = torch.randn(shape, **put)
        key, value = torch.randn(2, b, n, g, 1, a.kv_channels, **put)
        cos = torch.ones(b, n, 1, 1, a.kv_channels, **put)
        step = AttentionStep(
            query=query,
            key=key,
            value=value,
            cos=cos,
            sin=torch.zeros_like(cos),
            position=position.contiguous(),
            rows=torch.arange(rows.start, rows.stop, device=device),
            decision_projection=lambda: keep,
            begins=True,
        )
        cache.step(layer, step)


def _steps(
    graphs: DecodeGraphs, pool: DevicePool, sizes: Sizes, held: int
) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of each step, and the state that the last step reports to the host."""
    b = sizes.sequences
    times, before, since = [], None, 0.0
    for step in range(sizes.steps):
        inputs = PackedInputs.of(
            tokens=np.full((1, b), 1 if step == 0 else -1),
            position=np.full((1, b), held + step),
            rows=np.arange(b)[None],
            keys=np.zeros((1, b), np.int64),
            temperature=np.zeros(b),
        )
        launched = graphs.launch(inputs)
        if before is not None:
            status = before.wait()
            pool.sync_free_count(status.left, status.fault, before.reserved)
            now = time.perf_counter()
            times.append(now - since)
            since = now
        before, since = launched, since or time.perf_counter()
    assert before is not None
    return times[1:], before.wait().lists


def _cache_ms(cache: PagedKVCache, model: LoadedModel, sizes: Sizes, held: int) -> float:
    """Measure the milliseconds of the cache's kernels of a step, all layers in one graph."""
    a, b = model.architecture, sizes.sequences
    put: dict[str, Any] = {"device": "cuda", "dtype": model.dtype}
    query = torch.randn(b, a.num_attention_heads, a.kv_channels, **put)
    key, value = torch.randn(2, b, a.num_query_groups, a.kv_channels, **put)
    cos = torch.ones(b, a.kv_channels, **put)
    rows = torch.arange(b, device="cuda")
    position = torch.full((b,), held + sizes.steps, device="cuda")
    token = Step(query, key, value, cos, torch.zeros_like(cos), position, rows)

    def layers() -> None:
        for layer in range(a.num_layers):
            cache.decode(layer, token, model.spec, None)

    cache.prepare(b, sizes.steps)
    graph = torch.cuda.CUDAGraph()
    with cache.recording():
        layers()
        with torch.cuda.graph(graph):
            layers()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    repeats = min(20, sizes.steps - 2)
    events[0].record()
    for _ in range(repeats):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    elapsed: float = events[0].elapsed_time(events[1])
    return elapsed / repeats


def tables(record: dict[str, Any]) -> str:
    """Return a row for each policy; ratios to the step of DMS where it was measured."""
    base = {case["policy"]: case.get("step_ms") for case in record["cases"]}.get("dms")
    title = (
        f"{record['shape']}, {record['sequences']} x {record['context']}, "
        f"{record['budget']} tokens of each KV list"
    )
    return f"{title}\n\n{table(_columns(base, record['copy_bytes_per_s']), record['cases'])}"


def _columns(dms_ms: float | None, copy_bytes_per_s: float) -> list[Column]:
    def of_copy(row: dict[str, Any]) -> str:
        least = 1e3 * row["bytes"] / copy_bytes_per_s
        return f"{row['cache_ms'] / least:.2f}" if "cache_ms" in row else ""

    return [
        ("policy", lambda row: f"`{row['policy']}`"),
        (
            "ms a step (20 % to 80 %)",
            lambda row: "{:.2f} ({:.2f} to {:.2f})".format(row["step_ms"], *row["step_ms_spread"]),
        ),
        ("of DMS", field("step_ms", ".3f", 1 / dms_ms) if dms_ms else lambda _: ""),
        ("ms of the cache's kernels", field("cache_ms")),
        ("of what a copy takes", of_copy),
        ("read", field("read", ",")),
        ("live", field("live", ",")),
    ]


BENCHMARK = Benchmark(
    record="policies_decode",
    options=options,
    check=check,
    cases=cases,
    measure=measure_policy,
    settings=settings,
    tables=tables,
    stored=(
        Table(
            "*/policies_decode*.json",
            "docs/performance/serving.md",
            ("dms_train/inference", "dms_train/kernels/decode", "dms_train/kernels/prefill"),
        ),
    ),
)
