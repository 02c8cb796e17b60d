"""A decode step under cache policies whose KV lists hold equally many tokens, beside DMS.

    python -m benchmarks.policies_decode [POLICY ...]

The lists are filled with random keys and values: a share of `--context` tokens, as many as a budget
leaves of them, and with positions from 0 on; Quest holds the whole context. Steps are those of the
engine: one captured graph with the whole model and the sampler, the next one launched before the
last one is done. Writes `policies_decode.json` into the folder of the device and prints a table. On
a CPU the kernels need TRITON_INTERPRET=1, and sizes are small.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.records import RESULTS, origin
from benchmarks.serve.models import random_model
from benchmarks.timing import ceilings, device_name, versions
from dms_train.cli.errors import run_main
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

KEPT = 0.125  # of the tokens behind the window, with DMS
POLICIES = ("dms", "streaming_llm", "snapkv", "tova", "h2o", "quest")
_UNBUDGETED = ("dms", "keep_all", "window")
_PAGE = EngineOptions().page_slots  # and of Quest
_AT_ONCE = 4  # sequences that are filled together
_FEWEST = 5  # steps of which a median and a spread are meaningful


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        shape: Of the model, as in `benchmarks.serve.models`.
        sequences: Of a step.
        context: Tokens of each so far.
        budget: Of them, those that every KV list holds.
        steps: Decode steps.
    """

    shape: str
    sequences: int
    context: int
    budget: int
    steps: int

    def held(self, policy: str) -> int:
        """Tokens that a KV list is filled with."""
        return self.context if policy == "quest" else self.budget


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--sequences", type=int, help="default: 32 on a GPU, 2 elsewhere")
    parser.add_argument("--context", type=int, help="default: 8192 on a GPU, 128 elsewhere")
    parser.add_argument("--cr", type=float, default=8, help="context over budget")
    parser.add_argument("--steps", type=int, help="default: 64 on a GPU, 5 elsewhere")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if unknown := set(args.policies) - set(POLICIES):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(POLICIES)}")
    if args.steps is not None and args.steps < _FEWEST:
        parser.error(f"--steps {args.steps}: at least {_FEWEST}")
    return run_main(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    defaults = ("Llama-3.1-8B", 32, 8192, 64) if on_gpu else ("small", 2, 128, _FEWEST)
    shape, sequences, context, steps = defaults
    context = args.context or context
    sizes = Sizes(
        shape, args.sequences or sequences, context, int(context / args.cr), args.steps or steps
    )
    model = random_model(shape, KEPT, device, torch.bfloat16 if on_gpu else torch.float32)
    record: dict[str, Any] = {
        "device": device_name(device),
        "versions": versions(device),
        "command": " ".join(["python -m benchmarks.policies_decode", *args.policies]),
        **origin(),
        "copy_bytes_per_s": ceilings(device)["copy_bytes_per_s"],
        **sizes._asdict(),
        "cases": [],
    }
    folder = args.output / re.sub(r"\W+", "_", record["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.policies or POLICIES:
        record["cases"].append({"policy": name, **measure(model, name, sizes, device)})
        print(json.dumps(record["cases"][-1]), flush=True)
        (folder / "policies_decode.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n" + table(record))
    print(f"\nwritten: {folder / 'policies_decode.json'}")
    return 0


@torch.no_grad()
def measure(model: LoadedModel, name: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Times of one policy.

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
    found = {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "step_ms_spread": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "read": round(read, 1),
        "live": round(live, 1),
        "bytes": _bytes_read(model, sizes, read, live if isinstance(policy, QuestPolicy) else 0),
    }
    if device.type == "cuda":
        found["cache_ms"] = round(_cache_ms(cache, model, sizes, held), 3)
    return found


def _bytes_read(model: LoadedModel, sizes: Sizes, read: float, bounded: float) -> int:
    """Of keys and values, and of the bounds of the pages of `bounded` tokens."""
    a = model.architecture
    slots = sizes.sequences * a.num_layers * a.num_query_groups * (read + bounded / _PAGE)
    return round(slots * 2 * a.kv_channels * model.dtype.itemsize)


def _cache_bytes(model: LoadedModel, sizes: Sizes, held: int) -> int:
    """Enough for the tokens held, and for those of the steps."""
    a = model.architecture
    places = -(-(held + 3 * sizes.steps) // _PAGE) + 2
    page = 2 * (_PAGE + 1) * a.kv_channels * model.dtype.itemsize + 8
    return sizes.sequences * a.num_layers * a.num_query_groups * places * page + page


def _fill(cache: PagedKVCache, model: LoadedModel, held: int, rows: range) -> None:
    """Have the KV lists of some rows hold random tokens."""
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
            adapter=lambda: keep,
            begins=True,
        )
        cache.step(layer, step)


def _steps(
    graphs: DecodeGraphs, pool: DevicePool, sizes: Sizes, held: int
) -> tuple[list[float], torch.Tensor]:
    """Seconds of each step, and what the host has learnt after the last one."""
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
    """Milliseconds of the cache's kernels of a step, all layers in one graph."""
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


def table(record: dict[str, Any]) -> str:
    """Markdown: a row for each policy; ratios to the step of DMS where it was measured."""
    rows = [
        f"{record['shape']}, {record['sequences']} x {record['context']}, "
        f"{record['budget']} tokens of each KV list",
        "",
        "| policy | ms a step (20 % to 80 %) | of DMS | ms of the cache's kernels "
        "| of what a copy takes | read | live |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {case["policy"]: case["step_ms"] for case in record["cases"]}.get("dms")
    for case in record["cases"]:
        low, high = case["step_ms_spread"]
        share = "" if base is None else f"{case['step_ms'] / base:.3f}"
        cache, least = case.get("cache_ms"), 1e3 * case["bytes"] / record["copy_bytes_per_s"]
        ratio = "" if cache is None else f"{cache / least:.2f}"
        rows.append(
            f"| `{case['policy']}` | {case['step_ms']:.2f} ({low:.2f} to {high:.2f}) | {share} "
            f"| {'' if cache is None else cache} | {ratio} | {case['read']:,} | {case['live']:,} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
