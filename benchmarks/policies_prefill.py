"""Prompts under cache policies and under DMS: the tokens per second that the engine reads.

    python -m benchmarks policies_prefill [POLICY ...]

The engine answers all prompts with one token, twice to warm up and then `--repeats` times. A policy
with a budget holds `--context` over `--cr` tokens in each KV list; DMS keeps an eighth of the
tokens beyond its window, and `keep_all` all tokens. H2O and TOVA read a whole prompt before they
evict (`prefill=dense`). A small model shows what a policy asks of the host in every layer. On a CPU
the sizes are small, and only the ratios mean something.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.benchmark import Args, Benchmark, one_of, or_skipped
from benchmarks.records import Table
from benchmarks.serve.case import Case, prompts
from benchmarks.serve.models import ENGINE, SERVING_PAGE, SHAPES, with_model
from benchmarks.tables import Column, field, table
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions, SamplingParams

POLICIES = (
    *("dms", "keep_all", "streaming_llm", "h2o", "tova"),
    *("snapkv", "r_kv", "keydiff", "knorm", "quest"),
)
_UNBUDGETED = ("dms", "keep_all")
_FURTHER = {name: {"prefill": "dense"} for name in ("h2o", "tova")}  # options of a policy
_ON_GPU = ("SmolLM2-135M", 64, 2048)  # shape, prompts and tokens of each
_ELSEWHERE = ("small", 2, 128)
_MEMORY = 0.5  # share of the GPU for the engine of a policy
_WARM_UP = 2  # the second run of a kind of prompts captures its graph
_FEWEST = 5  # least number of runs for a meaningful median and spread


class Sizes(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        shape: Model, one of `benchmarks.serve.models.SHAPES`.
        sequences: Number of prompts.
        context: Number of tokens of each prompt.
        budget: Number of tokens that every KV list may hold.
    """

    shape: str
    sequences: int
    context: int
    budget: int


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    names = ", ".join(POLICIES)
    add("policies", nargs="*", type=one_of(POLICIES), metavar="POLICY", help=f"of {names}")
    add("--shape", type=one_of(SHAPES), help="default: SmolLM2-135M on a GPU, small elsewhere")
    add("--sequences", type=int, help="default: 64 on a GPU, 2 elsewhere")
    add("--context", type=int, help="default: 2048 on a GPU, 128 elsewhere")
    add("--cr", type=float, default=4, help="context over budget (%(default)s)")


def check(args: Args) -> None:
    """Refuse too few runs, and sizes or budgets below one token."""
    if args.repeats < _FEWEST:
        raise ValueError(f"--repeats {args.repeats}: at least {_FEWEST}")
    for option in ("sequences", "context"):
        if (given := getattr(args, option)) is not None and given < 1:
            raise ValueError(f"--{option} {given}: at least 1")
    longest = args.context or _ELSEWHERE[-1]
    if not 1 <= args.cr <= longest:
        raise ValueError(f"--cr {args.cr}: 1 to {longest}; a longer --context permits more")


def sizes_of(args: Args) -> Sizes:
    """Return the sizes that the options request."""
    shape, sequences, context = _ON_GPU if args.device.type == "cuda" else _ELSEWHERE
    context = args.context or context
    return Sizes(args.shape or shape, args.sequences or sequences, context, int(context / args.cr))


def cases(args: Args) -> Iterator[tuple[LoadedModel, str]]:
    """Yield every policy, with the one model that all of them run."""
    return with_model(sizes_of(args).shape, args.policies or POLICIES, args.device)


def measure_policy(case: tuple[LoadedModel, str], args: Args) -> Iterator[dict[str, Any]]:
    """Yield the row of a policy."""
    model, name = case
    row = or_skipped(lambda: measure(model, name, sizes_of(args), args))
    gc.collect()  # the engine is part of reference cycles and holds the GPU's memory
    torch.cuda.empty_cache()
    yield {"policy": name, **row}


def measure(model: LoadedModel, name: str, sizes: Sizes, args: Args) -> dict[str, Any]:
    """Measure one policy after a warm-up.

    Returns:
        `prefill_tok_s`, the median over `--repeats` runs, with its 20 % and 80 % quantiles, and
        `live` tokens of a KV list after the prompt.
    """
    budget = {} if name in _UNBUDGETED else {"budget": sizes.budget}
    further = _FURTHER.get(name, {})
    options = EngineOptions(
        policy=name,
        policy_options=budget | further,
        device=str(args.device),
        max_num_seqs=sizes.sequences,
        max_model_len=sizes.context + 1,
        gpu_memory_utilization=_MEMORY,
    )
    engine = InferenceEngine(model, options)
    case = Case(sizes.sequences, sizes.context)
    tokens = prompts(case, model.architecture.vocab_size)
    for _ in range(_WARM_UP):
        _run(engine, tokens)
    runs = [_run(engine, tokens) for _ in range(args.repeats)]
    low, *_, high = statistics.quantiles((seconds for seconds, _ in runs), n=5)
    read = sizes.sequences * sizes.context
    return {
        "options": [f"{key}={value}" for key, value in further.items()],
        "prefill_tok_s": round(read / statistics.median(seconds for seconds, _ in runs)),
        "prefill_tok_s_spread": [round(read / high), round(read / low)],
        "live": round(runs[-1][1], 1),
    }


def _run(engine: InferenceEngine, tokens: list[list[int]]) -> tuple[float, float]:
    """Answer all prompts with one token; return the seconds, and the mean number of live tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    live, before = list[float](), time.perf_counter()
    for prompt in tokens:
        engine.add_request(prompt, params, final_only=True)
    while engine.has_unfinished_requests():
        live += [output.kv.live_tokens for output in engine.step() if output.finished]
    return time.perf_counter() - before, statistics.fmean(live)


def tables(record: dict[str, Any]) -> str:
    """Return a row for each policy; ratios to the speed of DMS where it was measured."""
    dms = {case["policy"]: case.get("prefill_tok_s") for case in record["cases"]}.get("dms")
    title = (
        f"{record['shape']}, {record['sequences']} prompts of {record['context']} tokens, "
        f"{record['budget']} of them in a budget"
    )
    columns: list[Column] = [
        ("policy", lambda row: f"`{':'.join([row['policy'], *row.get('options', ())])}`"),
        (
            "prompt tokens/s (20 % to 80 %)",
            lambda row: "{:,} ({:,} to {:,})".format(
                row["prefill_tok_s"], *row["prefill_tok_s_spread"]
            ),
        ),
        ("of DMS", field("prefill_tok_s", ".3f", 1 / dms) if dms else lambda _: ""),
        ("live", field("live", ",")),
    ]
    return f"{title}\n\n{table(columns, record['cases'])}"


BENCHMARK = Benchmark(
    record="policies_prefill",
    options=options,
    check=check,
    cases=cases,
    measure=measure_policy,
    settings=lambda args: sizes_of(args)._asdict(),
    tables=tables,
    repeats=_FEWEST,
    stored=(Table("*/policies_prefill*.json", SERVING_PAGE, ENGINE),),
)
