"""Bytes of a DMS export's compact cache over time, compared with its teacher's dense cache.

    python -m benchmarks cache_memory EXPORT --teacher MODEL --prompt-file FILE

Both continue the same prompts greedily by the same number of tokens. After every forward pass the
engine reports the contents of each sequence's cache:

- live bytes: slots of the tokens held. A slot holds a key, a value, and their position and state.
- allocated bytes: slots reserved, in whole pages (compact) or blocks (dense). Slack is allocated
  over live.
- taken bytes: bytes that the cache of all sequences takes from the system, in slabs of pages,
  including page tables.
- dense bytes: only keys and values of every token seen, a lower bound for any dense cache.

The caches are measured between forward passes; scratch memory inside a pass is not part of them. A
figure `cache_memory.png` is written next to the record.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark, add_fields
from benchmarks.tables import Column, field
from dms_train.data_prep.documents import EVERY_LINE, InputRule, read_documents
from dms_train.inference.accounting import RequestKV, TotalKV
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import DTYPES, SamplingParams
from dms_train.tables import markdown_table

Spread = dict[str, float]
# Fields of RequestKV, of the export and of the teacher; tokens stand for their keys and values.
_MEASURES = {
    "live bytes at the end; dense: keys and values": ("live_bytes", "tokens"),
    "allocated bytes at the end; dense: keys and values": ("allocated_bytes", "tokens"),
    "peak allocated bytes; dense: keys and values": ("peak_allocated_bytes", "tokens"),
    "allocated bytes at the end": ("allocated_bytes", "allocated_bytes"),
    "peak allocated bytes": ("peak_allocated_bytes", "peak_allocated_bytes"),
    "live tokens of a KV head at the end": ("live_tokens", "live_tokens"),
    "peak live tokens of a KV head": ("peak_live_tokens", "peak_live_tokens"),
    "KV reads, decode": ("kv_reads", "kv_reads"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One model over all prompts.

    Attributes:
        tokens: Tokens seen by each sequence after each pass, [passes].
        live: Live bytes, [passes][prompts].
        allocated: Allocated bytes, [passes][prompts].
        taken: Bytes taken from the system for all sequences, [passes].
        requests: Cache statistics of each prompt at its end.
        total: Cache statistics of all prompts together.
    """

    tokens: list[int]
    live: list[list[int]]
    allocated: list[list[int]]
    taken: list[int]
    requests: list[RequestKV]
    total: TotalKV


def run_trace(llm: LLM, prompts: list[list[int]], tokens: int) -> Trace:
    """Continue prompts of the same length and record the cache after every pass.

    Args:
        llm: Engine with a batch slot for each prompt, so that all prompts advance together.
        prompts: Token ids.
        tokens: Number of tokens to add; the model's end-of-text tokens do not stop it.
    """
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    passes, taken = [], []
    for outputs in llm.stream(prompts, greedy):
        passes.append([output.kv for output in outputs])
        taken.append(llm.allocated_bytes)
    total = llm.kv
    assert total is not None
    return Trace(
        tokens=[requests[0].tokens for requests in passes],
        live=[[kv.live_bytes for kv in requests] for requests in passes],
        allocated=[[kv.allocated_bytes for kv in requests] for requests in passes],
        taken=taken,
        requests=passes[-1],
        total=total,
    )


def read_prompts(llm: LLM, path: Path, count: int, length: int) -> list[list[int]]:
    """Return the first tokens of texts that are long enough and begin differently.

    Args:
        llm: Engine whose tokenizer and limits apply.
        path: `.jsonl` with a "text" field, or `.txt` with a text per line.
        count: Number of prompts.
        length: Number of tokens of each prompt.

    Raises:
        InferenceError: There are too few prompts, or the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise InferenceError("the export has no tokenizer.json; export it with one")
    prefixes: dict[tuple[int, ...], None] = {}
    for document in read_documents(path, InputRule(text_split=EVERY_LINE)):
        ids = llm.tokenizer.encode(str(document.content))[:length]
        if len(ids) == length:
            prefixes[tuple(ids)] = None
        if len(prefixes) == count:
            return [list(ids) for ids in prefixes]
    raise InferenceError(
        f"{path}: {len(prefixes)} texts begin with {length} tokens each in its own way, "
        f"{count} are needed; lower --prompts or give more texts"
    )


def check_pair(export: LLM, teacher: LLM, longest: int) -> None:
    """Refuse models whose caches cannot be compared; `longest` is in tokens."""
    if export.spec is None or teacher.spec is not None:
        raise InferenceError("give a DMS export first and its dense teacher with --teacher")
    for name in ("num_layers", "num_query_groups", "kv_channels", "vocab_size"):
        ours, theirs = (getattr(llm.architecture, name) for llm in (export, teacher))
        if ours != theirs:
            raise InferenceError(f"{name}: {ours} in the export, {theirs} in the teacher")
    limit = export.architecture.max_position_embeddings
    if longest > limit:
        raise InferenceError(
            f"prompt and continuation have {longest} tokens, the model takes {limit}; "
            "lower --tokens or --prompt-tokens"
        )


def key_value_bytes(llm: LLM) -> int:
    """Return the bytes of one token's keys and values, all layers and heads."""
    a = llm.architecture
    return a.num_layers * a.num_query_groups * 2 * a.kv_channels * llm.dtype.itemsize


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(ours: Trace, dense: Trace, token_bytes: int) -> dict[str, dict[str, Spread]]:
    """Compare the export with the teacher by each measure, over prompts.

    Args:
        ours: The export on the compact cache.
        dense: The teacher on the dense cache.
        token_bytes: Result of `key_value_bytes`.
    """
    rows = {}
    for measure, (name, against) in _MEASURES.items():
        left = [getattr(kv, name) for kv in ours.requests]
        right = [getattr(kv, against) for kv in dense.requests]
        if against == "tokens":
            right = [tokens * token_bytes for tokens in right]
        ratio = [x / y for x, y in zip(left, right, strict=True)]
        rows[measure] = {"dms": spread(left), "dense": spread(right), "ratio": spread(ratio)}
    return rows


def slack(trace: Trace) -> dict[str, Spread]:
    """Return allocated over live bytes: at the end, and the mean over the passes of a prompt."""
    end = [kv.allocated_bytes / kv.live_bytes for kv in trace.requests]
    over_time = []
    for number in range(len(trace.requests)):
        ratios = [a[number] / b[number] for a, b in zip(trace.allocated, trace.live, strict=True)]
        over_time.append(statistics.fmean(ratios))
    return {"at_the_end": spread(end), "mean_over_passes": spread(over_time)}


def series(trace: Trace) -> dict[str, Any]:
    """Return tokens seen and bytes with their spread over prompts, for every pass."""
    return {
        "tokens": trace.tokens,
        "live_bytes": [spread(values) for values in trace.live],
        "allocated_bytes": [spread(values) for values in trace.allocated],
        "taken_bytes": trace.taken,
    }


def cost(trace: Trace) -> dict[str, Any]:
    """Return the engine's own accounting, by prompt and for all prompts."""
    requests = []
    for kv in trace.requests:
        row = {f.name: getattr(kv, f.name) for f in fields(kv) if f.name != "cr_factors"}
        requests.append({**row, "cr_factor": kv.cr_factor})
    return {
        "requests": requests,
        "cr_factor": trace.total.cr_factor,
        "cr_factors": trace.total.cr_factors.tolist(),
        "peak_taken_bytes": max(trace.total.peak_allocated_bytes, *trace.taken),
        "slack": slack(trace),
    }


def draw(ours: Trace, dense: Trace, token_bytes: int, path: Path) -> None:
    """Write a PNG of bytes against tokens seen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InferenceError("the figure needs matplotlib; install dms-train[eval]") from None
    figure = Figure(figsize=(8, 4.8), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    lines = (
        (dense.tokens, dense.allocated, "0.55", "-", "dense cache, allocated"),
        (
            dense.tokens,
            [[n * token_bytes] for n in dense.tokens],
            "black",
            "--",
            "dense cache, keys and values alone",
        ),
        (ours.tokens, ours.allocated, "tab:blue", "-", "DMS compact cache, allocated"),
        (ours.tokens, ours.live, "tab:orange", "-", "DMS compact cache, live"),
    )
    for tokens, values, color, style, label in lines:
        rows = [spread(row) for row in values]
        middle, low, high = ([r[key] / 1024 for r in rows] for key in ("median", "min", "max"))
        axes.plot(tokens, middle, color=color, linestyle=style, label=label)
        axes.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    count = len(ours.requests)
    axes.set(
        xlabel="tokens seen (prompt and continuation)",
        ylabel="KV cache of one sequence, KiB",
        title=f"Memory over time: median of {count} prompts, bands from least to most",
    )
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    FigureCanvasAgg(figure).print_png(path)


def setting(args: Args, llm: LLM) -> dict[str, Any]:
    """Return all settings that are needed to repeat the run."""
    a, spec = llm.architecture, llm.spec
    assert spec is not None
    return {
        "threads": torch.get_num_threads(),
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "layers": a.num_layers,
        "kv_heads": a.num_query_groups,
        "head_size": a.kv_channels,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "window": spec.window,
        "page_slots": llm.options.page_slots,
        "slab_pages": llm.options.slab_pages,
        "key_value_bytes_per_token": key_value_bytes(llm),
    }


COLUMNS: tuple[Column, ...] = (
    ("median over prompts (least to most)", field("name")),
    ("DMS", lambda row: _cell(row["dms"], ",.0f")),
    ("dense", lambda row: _cell(row["dense"], ",.0f")),
    ("DMS / dense", lambda row: _cell(row["ratio"], ".3f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return the comparison of both caches, and the compression of each KV head."""
    rows = [
        [content({"name": name, **row}) for _, content in COLUMNS]
        for name, row in record["comparison"].items()
    ]
    ours, dense = record["dms"], record["dense"]
    taken, other = ours["peak_taken_bytes"], dense["peak_taken_bytes"]
    rows.append(
        ["peak bytes taken, all prompts", f"{taken:,}", f"{other:,}", f"{taken / other:.3f}"]
    )
    for name, row in ours["slack"].items():
        title = f"allocated / live, {name.replace('_', ' ')}"
        rows.append([title, _cell(row, ".3f"), _cell(dense["slack"][name], ".3f")])
    lines = [f"{record['setting']}\n", markdown_table([title for title, _ in COLUMNS], rows)]
    lines.append(f"\ncr_factor {ours['cr_factor']:.2f}; by layer (rows) and KV head:")
    for layer, factors in enumerate(ours["cr_factors"]):
        lines.append(f"{layer:>4d}  " + " ".join(f"{factor:6.2f}" for factor in factors))
    return "\n".join(lines)


def _cell(row: Spread, form: str) -> str:
    texts = {name: format(value, form) for name, value in row.items()}
    if texts["min"] == texts["max"]:
        return texts["median"]
    return f"{texts['median']} ({texts['min']} to {texts['max']})"


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the caches of both models, and write the figure."""
    common = {"max_num_seqs": args.prompts, "dtype": args.dtype, "device": str(args.device)}
    llm = LLM(args.export, page_slots=args.page_slots, **common)
    teacher = LLM(args.teacher, policy="keep_all", cache="dense", **common)
    check_pair(llm, teacher, args.prompt_tokens + args.tokens)
    prompts = read_prompts(llm, args.prompt_file, args.prompts, args.prompt_tokens)
    ours, dense = (run_trace(model, prompts, args.tokens) for model in (llm, teacher))
    token_bytes = key_value_bytes(llm)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    draw(ours, dense, token_bytes, args.file.with_suffix(".png"))
    yield {
        "setting": setting(args, llm),
        "comparison": compare(ours, dense, token_bytes),
        "dms": {**cost(ours), "series": series(ours)},
        "dense": {**cost(dense), "series": series(dense)},
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("export", help="DMS export")
    add("--teacher", required=True, help="its dense original")
    add("--prompt-file", type=Path, required=True, help=".jsonl or .txt of texts")
    add("--prompts", type=int, default=20, help="(%(default)s)")
    add("--prompt-tokens", type=int, default=16, help="first tokens of a text (%(default)s)")
    add("--tokens", type=int, default=400, help="tokens to generate (%(default)s)")
    add("--page-slots", type=int, default=16, help="tokens of a page (%(default)s)")
    add("--dtype", choices=DTYPES, default="auto")


BENCHMARK = Benchmark(
    record="cache_memory", options=options, measure=measure, store=add_fields, tables=tables
)
