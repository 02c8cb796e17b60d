"""Throughput of the engine under limited memory or many requests: four experiments.

    python -m benchmarks serve throughput [memory] [fork] [chains] [requests]

- memory: a cache of `--cache-gb` for contexts of 32,768 tokens of Llama-3.1-8B, with DMS and
  without eviction, each with as many sequences as fit.
- fork: 8 chains from one prompt of 8,192 tokens, beside one chain.
- chains: 3,200 sampled chains of 204 to 2,048 tokens on a model of 12.7M weights, from 40 prompts;
  `gpu_busy` is the share of the time in which NVML finds the GPU computing.
- requests: 1,000 prompts of 1 to 16,384 tokens, each continued by 256, on a small model in float32,
  one at a time and all together in a cache that holds a third of them. Their tokens are compared.
  Where some differ, `largest_gap` is the gap of the best two logits at the first difference.

Weights are random. Every number comes from one run after a warm-up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark, add_fields, one_of
from benchmarks.records import Table
from benchmarks.serve.case import Case, prompts
from benchmarks.serve.models import ENGINE, KEPT, LONGEST, SERVING_PAGE, random_model
from benchmarks.tables import Row
from benchmarks.timing import Busy
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import CompletionOutput
from dms_train.tables import markdown_table

CONTEXT = 32768
CHAINS, PROMPTS, PROMPT_TOKENS, LONGEST_CHAIN = 3200, 40, 40, 2048
# For one sequence: 8 tokens for each of the 256 chunks of other prompts, and some to measure.
NEW_TOKENS = 2304


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add, names = parser.add_argument, ", ".join(EXPERIMENTS)
    add("experiments", nargs="*", type=one_of(EXPERIMENTS), metavar="EXPERIMENT", help=names)
    add("--cache-gb", type=float, default=18, help="for `memory` (%(default)s)")
    add("--sequences", type=int, default=512, help="at the same time, of chains (%(default)s)")


def measure(experiment: str, args: Args) -> Iterator[Row]:
    """Yield the result of an experiment, by its name."""
    yield {experiment: EXPERIMENTS[experiment](args.device, args)}


def tables(record: Row) -> str:
    """Return a table for each experiment."""
    sections = []
    for name in EXPERIMENTS:
        if name in record:
            result = record[name]
            rows = result if isinstance(result, list) else [result]
            titles = [title.replace("_", " ") for title in rows[0]]
            sections.append(f"{name}:\n\n{markdown_table(titles, [row.values() for row in rows])}")
    if not sections:
        raise KeyError("no experiment")
    return "\n\n".join(sections)


def _memory(device: torch.device, args: Args) -> list[dict[str, Any]]:
    """Measure output tokens/s of both engines with the same bytes for their pages."""
    on_gpu = device.type == "cuda"
    shape, context, new = ("Llama-3.1-8B", CONTEXT, NEW_TOKENS) if on_gpu else ("small", 600, 32)
    cache_bytes = int(args.cache_gb * 2**30) if device.type == "cuda" else 2**22
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, rows = random_model(shape, KEPT, device, dtype), []
    for name, policy in (("dense", "keep_all"), ("DMS", "dms")):
        options = EngineOptions(
            device=str(device), policy=policy, max_num_seqs=64, max_model_len=context + new,
            prefill_chunk=8192, cache_bytes=cache_bytes, slab_pages=8,
        )  # fmt: skip
        engine = InferenceEngine(model, options)
        tokens = prompts(Case(options.max_num_seqs, context), engine.architecture.vocab_size)
        sequences, seconds = _decode(engine, tokens)
        rows.append(
            {
                "engine": name,
                "sequences": sequences,
                "step_ms": round(1e3 * seconds, 3),
                "tokens_s": round(sequences / seconds),
                "preemptions": engine.preemptions,
            }
        )
        del engine
    return rows


def _decode(engine: InferenceEngine, tokens: list[list[int]]) -> tuple[int, float]:
    """Return the most sequences that decode at once, and the median seconds of their step.

    All prompts wait. The engine admits as many as fit, and the first one ends after the last one's
    prompt has been computed.
    """
    new = engine.longest - len(tokens[0])
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for prompt in tokens:
        engine.add_request(prompt, params, final_only=True)
    steps: dict[int, list[float]] = {}  # seconds of each step, by the number of sequences
    since, ended = time.perf_counter(), False
    while not ended:
        before, decoding = engine.decoded_steps, engine.decoding
        ended = bool(engine.step())
        now, count = time.perf_counter(), max(1, engine.decoded_steps - before)
        if decoding == engine.decoding > 0:
            steps.setdefault(decoding, []).append((now - since) / count)
        since = now
    most = max(steps)
    return most, statistics.median(steps[most])


def _fork(device: torch.device, args: Args) -> list[dict[str, Any]]:
    """Measure seconds and memory of several chains from one prompt."""
    shape, context = ("Llama-3.1-8B", 8192) if device.type == "cuda" else ("small", 600)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, rows = random_model(shape, KEPT, device, dtype), []
    options = EngineOptions(
        device=str(device), policy="dms", max_num_seqs=8, max_model_len=LONGEST,
        prefill_chunk=8192, gpu_memory_utilization=0.6, slab_pages=8,
    )  # fmt: skip
    engine = InferenceEngine(model, options)
    engine.capture()
    prompt = prompts(Case(1, context), engine.architecture.vocab_size)[0]
    empty = engine.allocated_bytes
    new = 256 if device.type == "cuda" else 16
    for chains in (1, 1, 8):  # the first one warms up
        params = SamplingParams(temperature=1.0, seed=1, n=chains, max_tokens=new, ignore_eos=True)
        engine.add_request(prompt, params, final_only=True)
        begin, held, first = time.perf_counter(), [], 0.0
        while engine.has_unfinished_requests():
            engine.step()
            if engine.decoding == chains:
                first = first or time.perf_counter() - begin
                held.append(engine.allocated_bytes - empty)
        rows.append(
            {
                "chains": chains,
                "prefill_s": round(first, 4),
                "bytes_after_fork": held[0],
                "bytes_at_end": held[-1],
            }
        )
    return rows[1:]


def _chains(device: torch.device, args: Args) -> dict[str, Any]:
    """Measure sampled tokens/s over many chains of unequal length, the last ones included."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = random_model("lab" if on_gpu else "small", KEPT, device, dtype)
    options = EngineOptions(
        device=str(device), policy="dms", max_num_seqs=args.sequences if on_gpu else 16,
        max_model_len=LONGEST_CHAIN + PROMPT_TOKENS, gpu_memory_utilization=0.5,
    )  # fmt: skip
    engine, draw = InferenceEngine(model, options), random.Random(0)
    engine.capture()
    chains, longest = (CHAINS, LONGEST_CHAIN) if on_gpu else (20, 20)
    tokens = prompts(Case(PROMPTS, PROMPT_TOKENS), engine.architecture.vocab_size)
    lengths = [draw.randint(longest // 10, longest) for _ in range(chains)]
    for seconds_counted in (False, True):
        some = lengths if seconds_counted else [20] * 8
        for number, length in enumerate(some):
            params = SamplingParams(
                temperature=1.0, seed=number, max_tokens=length, ignore_eos=True
            )
            engine.add_request(tokens[number % PROMPTS], params, final_only=True)
        begin = time.perf_counter()
        with Busy(device) as busy:
            while engine.has_unfinished_requests():
                engine.step()
            seconds = time.perf_counter() - begin
    return {
        "chains": chains,
        "sequences": options.max_num_seqs,
        "tokens": sum(lengths),
        "seconds": round(seconds, 2),
        "tokens_s": round(sum(lengths) / seconds),
        "gpu_busy": None if busy.share is None else round(busy.share, 3),
    }


def _requests(device: torch.device, args: Args) -> dict[str, Any]:
    """Run requests of very different lengths, alone and in a cache that is too small for all."""
    count, longest, new = (1000, 16384, 256) if device.type == "cuda" else (12, 900, 64)
    model = random_model("small", KEPT, device, torch.float32)
    draw, vocab = random.Random(0), model.architecture.vocab_size
    # shortest first, so that many are admitted together and each grows to several times its length
    lengths = sorted(round(longest ** draw.random()) for _ in range(count))
    work = [([draw.randrange(vocab) for _ in range(length)], new) for length in lengths]
    token_ids, seconds, cache_bytes, preemptions, held = [], [], 2**30, 0, 0
    for together in (1, count):
        options = EngineOptions(
            device=str(device), policy="dms", max_num_seqs=together, max_model_len=longest + new,
            prefill_chunk=2048, cache_bytes=cache_bytes, slab_pages=8,
        )  # fmt: skip
        engine = InferenceEngine(model, options)
        engine.capture()
        empty, begin = engine.allocated_bytes, time.perf_counter()
        outputs = _finish(engine, work)
        seconds.append(time.perf_counter() - begin)
        token_ids.append([output.token_ids for output in outputs])
        kept = [(o.kv.allocated_bytes, o.kv.peak_allocated_bytes) for o in outputs if o.kv]
        held_at_end, peaks = map(list, zip(*kept, strict=True))
        cache_bytes = max(sum(held_at_end) // 3, 5 * max(peaks) // 4)
        preemptions, held = engine.preemptions, engine.allocated_bytes - empty
        gaps = [
            _gap(engine, prompt, first, second)
            for (prompt, _), first, second in zip(work, token_ids[0], token_ids[-1], strict=True)
            if first != second
        ]
        del engine
    return {
        "requests": count,
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "new_tokens": sum(map(len, token_ids[0])),
        "equal": sum(a == b for a, b in zip(*token_ids, strict=True)),
        "largest_gap": max(gaps, default=0.0),
        "preemptions": preemptions,
        "bytes_left_behind": held,
        "cache_bytes": cache_bytes,
        "seconds_alone": round(seconds[0], 2),
        "seconds_together": round(seconds[1], 2),
    }


def _gap(engine: InferenceEngine, prompt: list[int], first: list[int], second: list[int]) -> float:
    """Return the gap of the best two logits where two continuations of a prompt part."""
    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    best, other = engine.logits([*prompt, *first[:same]])[-1].topk(2).values.tolist()
    return float(best - other)


def _finish(engine: InferenceEngine, work: list[tuple[list[int], int]]) -> list[CompletionOutput]:
    """Return greedy outputs of prompts with their numbers of new tokens, in their order."""
    ids = []
    for prompt, new in work:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        ids.append(engine.add_request(prompt, params, final_only=True))
    outputs: dict[str, CompletionOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    return [outputs[request_id] for request_id in ids]


EXPERIMENTS = {"memory": _memory, "fork": _fork, "chains": _chains, "requests": _requests}

BENCHMARK = Benchmark(
    record="throughput",
    options=options,
    cases=lambda args: args.experiments or EXPERIMENTS,
    measure=measure,
    store=add_fields,
    tables=tables,
    stored=(Table("*/throughput.json", SERVING_PAGE, ENGINE),),
)
