"""Latency of requests that arrive over time, at several rates; also of vLLM if it is installed.

    python -m benchmarks serve online [SHAPE ...] [--rates 1,2,4,8]

Requests arrive by a Poisson process and are streamed. Their lengths come from a mix (`--mix`) or
from recorded requests (`--lengths FILE`, JSON lines with `prompt_tokens` and `tokens`, such as the
chains of `dms-eval`). All engines get the same requests at the same times. The time to the first
token counts from the arrival and includes the time in a queue. Weights are random.

vLLM runs in separate processes with its own defaults, by the command of `--peer`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.benchmark import Args, Benchmark, one_of
from benchmarks.records import Table
from benchmarks.serve.models import (
    ENGINE,
    KEPT,
    LONGEST,
    MEMORY,
    SERVING_PAGE,
    SHAPES,
    architecture,
    random_model,
)
from benchmarks.serve.processes import printed_rows
from benchmarks.serve.traffic import MIXES, Arrival, Lengths, Mix, arrivals, poisson_times, recorded
from benchmarks.tables import Column, field, table
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams

PEER = f"{sys.executable} -m benchmarks.serve.online_peer"
WAYS = {"DMS": "dms", "dense": "keep_all"}


class Progress(NamedTuple):
    """A request after a step.

    Attributes:
        request: Id that `Server.add` returned.
        tokens: Number of tokens generated so far.
    """

    request: str
    tokens: int


class Server(Protocol):
    """An engine that serves requests of token ids, greedily and up to their last token."""

    def add(self, prompt: list[int], new: int) -> str:
        """Queue a request and return its id."""
        ...

    def step(self) -> list[Progress]:
        """Compute for a while and return the requests that advanced."""
        ...

    def busy(self) -> bool:
        """Return whether a request has not finished."""
        ...


class OurServer:
    """The engine of this project, whose requests are streamed."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def add(self, prompt: list[int], new: int) -> str:
        """As in `Server`."""
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return self._engine.add_request(prompt, params)

    def step(self) -> list[Progress]:
        """As in `Server`."""
        outputs = self._engine.step()
        return [Progress(o.request_id, len(o.outputs[0].token_ids)) for o in outputs]

    def busy(self) -> bool:
        """As in `Server`."""
        return self._engine.has_unfinished_requests()


def drive(
    server: Server,
    work: Sequence[Arrival],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[float]]:
    """Serve requests as they arrive.

    Args:
        server: Idle server.
        work: Requests in the order of their times.
        clock: Function that returns the time in seconds.
        sleep: Function that waits for a number of seconds.

    Returns:
        For each request the seconds from its arrival to each of its tokens. Tokens that come
        together have the same time.
    """
    start, added = clock(), 0
    numbers: dict[str, int] = {}
    times: list[list[float]] = [[] for _ in work]
    while added < len(work) or server.busy():
        if not server.busy():
            sleep(max(0.0, work[added].at - (clock() - start)))
        while added < len(work) and work[added].at <= clock() - start:
            numbers[server.add(work[added].prompt, work[added].new)] = added
            added += 1
        for progress in server.step():
            number = numbers[progress.request]
            since = clock() - start - work[number].at
            times[number] += [since] * (progress.tokens - len(times[number]))
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest values; `share` is from 0 to 1."""
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def summary(work: Sequence[Arrival], times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Compute rates and latencies of a run of `drive`.

    Returns:
        `requests`, `tokens_s` from the first arrival to the last token, and percentiles in ms of
        the time to the first token and of the time between two tokens of a request.
    """
    first = [1e3 * each[0] for each in times]
    between = [1e3 * (b - a) for each in times for a, b in pairwise(each)] or [0.0]
    end = max(request.at + each[-1] for request, each in zip(work, times, strict=True))
    return {
        "requests": len(work),
        "prompt_tokens": sum(len(request.prompt) for request in work),
        "tokens": sum(map(len, times)),
        "tokens_s": round(sum(map(len, times)) / (end - work[0].at), 1),
        "ttft_ms": {f"p{n}": round(percentile(first, n / 100), 3) for n in (50, 99)},
        "itl_ms": {f"p{n}": round(percentile(between, n / 100), 3) for n in (50, 99)},
    }


class Load(NamedTuple):
    """Requests of a run.

    Attributes:
        mix: Distribution of lengths, or recorded lengths.
        name: Name of the mix.
        rates: Requests a second, one run for each rate.
        seconds: Duration of the arrivals.
        seed: Seed of times, lengths and tokens.
    """

    mix: Mix | list[Lengths]
    name: str
    rates: tuple[float, ...]
    seconds: float
    seed: int


Serve = Callable[[Sequence[Arrival]], list[list[float]]]  # `drive` with a given server


def measure(serve: Serve, shape: str, load: Load) -> Iterator[dict[str, Any]]:
    """Measure the cases, after a warm-up with the requests of the first rate."""
    vocab = architecture(shape).vocab_size
    for number, rate in enumerate((load.rates[0], *load.rates)):
        work = arrivals(poisson_times(rate, load.seconds, load.seed), load.mix, vocab, load.seed)
        if not number:
            serve([request._replace(at=0.0) for request in work])
            continue
        case = {"shape": shape, "mix": load.name, "rate": rate}
        yield case | summary(work, serve(work))


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load` reads."""
    parser.add_argument("--mix", choices=MIXES, help="default: chat, on a CPU toy")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="recorded requests instead")
    parser.add_argument("--rates", default="1,2,4,8", help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def load(args: argparse.Namespace) -> Load:
    """Return the load that the options describe.

    Raises:
        ValueError: A rate, or a recorded request, cannot be used.
    """
    name = args.mix or ("chat" if torch.cuda.is_available() else "toy")
    mix: Mix | list[Lengths] = MIXES[name]
    if args.lengths is not None:
        mix, name = recorded(args.lengths, LONGEST), args.lengths.name
    try:
        rates = tuple(float(rate) for rate in args.rates.split(","))
    except ValueError:
        rates = (0.0,)
    if min(rates) <= 0 or args.seconds <= 0:
        raise ValueError(f"--rates {args.rates} --seconds {args.seconds:g}: numbers above 0")
    return Load(mix, name, rates, args.seconds, args.seed)


def within(cases: list[dict[str, Any]], ttft_ms: float, itl_ms: float) -> dict[str, Any] | None:
    """Return the fastest case whose 99th percentiles meet a target; None if none does."""
    met = [
        case
        for case in cases
        if case["ttft_ms"]["p99"] <= ttft_ms and case["itl_ms"]["p99"] <= itl_ms
    ]
    return max(met, key=lambda case: case["tokens_s"], default=None)


def _pair(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda case: f"{case[name]['p50']:.1f} / {case[name]['p99']:.1f}"


_NAMES: tuple[Column, ...] = (("shape", field("shape")), ("mix", field("mix")))
CASES: tuple[Column, ...] = (
    *_NAMES,
    ("requests/s", field("rate", "g")),
    ("engine", field("engine")),
    ("ms to the first token, p50 / p99", _pair("ttft_ms")),
    ("ms between tokens, p50 / p99", _pair("itl_ms")),
    ("tokens/s", field("tokens_s", ",.0f")),
)
BEST: tuple[Column, ...] = (
    *_NAMES,
    ("engine", field("engine")),
    ("requests/s", lambda case: field("rate", "g")(case) or "-"),
    ("tokens/s", lambda case: field("tokens_s", ",.0f")(case) or "-"),
)


def tables(record: dict[str, Any]) -> str:
    """Return every case, and the best tokens/s of every engine within the target."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for case in record["cases"]:
        groups.setdefault((case["shape"], case["mix"], case["engine"]), []).append(case)
    target = record["target"]
    best = [
        within(cases, **target) or dict(zip(("shape", "mix", "engine"), names, strict=True))
        for names, cases in groups.items()
    ]
    cases = sorted(record["cases"], key=lambda c: (c["shape"], c["mix"], c["rate"]))
    return (
        f"{table(CASES, cases)}\n\n"
        f"Most tokens/s with 99 % of first tokens within {target['ttft_ms']:g} ms and of the times "
        f"between tokens within {target['itl_ms']:g} ms:\n\n{table(BEST, best)}"
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    names = ", ".join(SHAPES)
    add("shapes", nargs="*", type=one_of(SHAPES), metavar="SHAPE", help=f"of {names}")
    add("--peer", default=PEER, help="command (%(default)s)")
    add("--target-ttft-ms", type=float, default=500, help="(%(default)s)")
    add("--target-itl-ms", type=float, default=50, help="(%(default)s)")
    add("--sequences", type=int, default=64, help="of ours at once (%(default)s)")
    add_load(parser)


def check(args: Args) -> None:
    """Refuse a load that cannot be generated."""
    load(args)


def settings(args: Args) -> dict[str, Any]:
    """Return the fields of the record that all engines share."""
    return {
        "kept": KEPT,
        "sequences": args.sequences,
        "gpu_memory_utilization": MEMORY,
        "seconds": args.seconds,
        "seed": args.seed,
        "target": {"ttft_ms": args.target_ttft_ms, "itl_ms": args.target_itl_ms},
    }


def engines(args: Args) -> Iterator[tuple[Callable[[str, Args], Iterator[dict[str, Any]]], str]]:
    """Yield our engine and vLLM, for each shape."""
    on_gpu = args.device.type == "cuda"
    for shape in args.shapes or (list(SHAPES)[:2] if on_gpu else ["small"]):
        yield _ours, shape
        yield _peers, shape


def _ours(shape: str, args: Args) -> Iterator[dict[str, Any]]:
    """Measure our engine, with DMS and without eviction."""
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    model = random_model(shape, KEPT, args.device, dtype)
    for name, policy in WAYS.items():
        options = EngineOptions(
            device=str(args.device), policy=policy, max_num_seqs=args.sequences,
            max_model_len=LONGEST, prefill_chunk=2048, gpu_memory_utilization=MEMORY,
            decode_steps=1,
        )  # fmt: skip
        engine = InferenceEngine(model, options)
        engine.capture()
        server = OurServer(engine)
        for case in measure(functools.partial(drive, server), shape, load(args)):
            yield {"engine": name, **case}
        del engine, server
        gc.collect()  # frees the memory for the next engine


def _peers(shape: str, args: Args) -> Iterator[dict[str, Any]]:
    """Measure vLLM with the same requests; nothing on a CPU or where it is missing."""
    missing = args.peer == PEER and importlib.util.find_spec("vllm") is None
    if args.device.type != "cuda" or missing:
        print("no peer: vllm is not installed, or this is a CPU; --peer names another Python")
        return
    gc.collect()
    torch.cuda.empty_cache()
    words = [*args.peer.split(), shape, "--rates", args.rates, "--seconds", str(args.seconds)]
    words += ["--seed", str(args.seed)]
    words += ["--lengths", str(args.lengths)] if args.lengths else []
    words += ["--mix", args.mix] if args.mix else []
    try:
        yield from printed_rows(words)
    except subprocess.CalledProcessError as ended:
        print(f"the peer ended with {ended.returncode}; its cases are incomplete", flush=True)


BENCHMARK = Benchmark(
    record="online",
    options=options,
    check=check,
    cases=engines,
    measure=lambda case, args: case[0](case[1], args),
    settings=settings,
    tables=tables,
    stored=(Table("*/online.json", SERVING_PAGE, ENGINE),),
)
