"""One engine of vLLM on a model directory, with or without DMS: one JSON line for each result.

    python -m benchmarks.serve.vllm_engine steps FOLDER 1x8192 32x8192
    python -m benchmarks.serve.vllm_engine two_gpus FOLDER 32x8192 --gpus 2
    python -m benchmarks.serve.vllm_engine capacity FOLDER 64x32768 --cache-bytes 19327352832
    python -m benchmarks.serve.vllm_engine trace FOLDER 384x1024 --new-tokens 2048
    python -m benchmarks.serve.vllm_engine server FOLDER 160x1024 --new-tokens 1024
    python -m benchmarks.serve.vllm_engine storm FOLDER 200x1024 --blocks 400

The benchmark `serve vllm_plugin` starts this module. The engine runs in this process, so that its
steps can be observed, except for `server`. With several GPUs, each has a worker process. A folder
that names an architecture of the plugin is served with DMS.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.serve.case import FEWEST, Case, prompts
from benchmarks.serve.models import LONGEST, MEMORY
from benchmarks.serve.ours import skipped
from benchmarks.serve.peer import graphs, marked, measure, mode, pure_decode_steps
from benchmarks.serve.steady import Durations, Limits, Traffic, figures, search
from benchmarks.serve.traffic import Lengths
from benchmarks.serve.vllm_server import Load, measure_server
from dms_train.vllm_plugin.errors import PluginError

STORM_SEQUENCES = 64  # requests of the storm that run at the same time
CHUNK = 512  # tokens of a step with traffic; a larger part of a prompt alone takes 30 ms
SPARE = 256  # the client's random texts may have some tokens more than asked for
HALVINGS = 3  # of the search of `trace`


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", type=Case.parse)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager-prefill", action="store_true", help="graphs for decoding only")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--cache-bytes", type=int, help="of capacity; default: the whole memory")
    parser.add_argument("--gpus", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    parser.add_argument("--blocks", type=int, default=0, help="of the storm; 0: enough for all")
    parser.add_argument("--eager", action="store_true", help="of the storm; no CUDA graphs")
    add = parser.add_argument_group("trace").add_argument
    add("--max-itl-ms", type=float, default=30, help="limit of the 99th percentile (%(default)s)")
    add("--max-wait-s", type=float, default=2, help="limit of the first token's mean (%(default)s)")
    add("--warm-up-s", type=float, default=2, help="before a probe (%(default)s)")
    add("--window-s", type=float, default=10, help="of a probe (%(default)s)")
    add = parser.add_argument_group("server").add_argument
    add("--request-rate", type=float, default=4, help="per second (%(default)s)")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its steps are watched in this process
    args.dms, args.vocab = _read_config(args.folder)
    # plain vLLM has no plugin; ours is registered below, and by vLLM in its workers
    os.environ["VLLM_PLUGINS"] = "dms" if args.dms and args.gpus > 1 else ""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of `_pages`, for the workers
    vllm: Any = importlib.import_module("vllm")
    if args.dms:
        importlib.import_module("dms_train.vllm_plugin.plugin").register()
    for row in rows(vllm, args):
        print(json.dumps({"engine": f"vLLM {vllm.__version__}", **row}), flush=True)


def _read_config(folder: Path) -> tuple[bool, int]:
    """Return whether a model evicts tokens, and the size of its vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    return config["architectures"][0].endswith("DMS"), config["vocab_size"]


class Refused(Exception):
    """vLLM does not start with these options."""


def rows(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the cases; if the engine does not start, they have the reason in `skipped`."""
    try:
        yield from PARTS[args.part](vllm, args)
    except Refused as error:
        yield from skipped(args.cases, error)


def start(vllm: Any, args: argparse.Namespace, sequences: int, **more: Any) -> Any:
    """Start an offline engine.

    Args:
        vllm: The package.
        args: Options of this module.
        sequences: Largest number of concurrent sequences.
        **more: Further arguments of `vllm.LLM`, or others instead of those chosen here.

    Raises:
        Refused: The plugin refuses an option, or the cache cannot hold one sequence.
    """
    chosen = {
        "model": str(args.folder),
        "skip_tokenizer_init": True,
        **engine_arguments(args, sequences),
        "compilation_config": graphs(sequences, not args.eager_prefill),
    }
    try:
        return vllm.LLM(**{**chosen, **more})
    except (ValueError, PluginError) as error:
        raise Refused(str(error)) from error


def engine_arguments(args: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """Return the arguments that offline engines and servers share; see `start`."""
    chosen = {
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "kv_cache_dtype": args.kv_cache_dtype,
        "gpu_memory_utilization": MEMORY,
        "max_model_len": LONGEST,
        "max_num_seqs": sequences,
        "tensor_parallel_size": args.gpus,
    }
    if not args.dms:  # the plugin chooses both itself
        chosen |= {"attention_backend": "FLASH_ATTN", "enable_prefix_caching": False}
    return chosen


def steps(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield decode steps and prefill of each case, as `benchmarks.serve.peer` measures them."""
    llm = start(vllm, args, max(case.sequences for case in args.cases))
    for case in args.cases:
        row = measure(vllm, llm, case, prompts(case, args.vocab), args.new_tokens)
        yield row | _graphs(llm)


def two_gpus(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the decode steps of a case, and with DMS the pages that each rank holds."""
    (case,) = args.cases
    llm = start(vllm, args, case.sequences)
    tokens = prompts(case, args.vocab)
    row = measure(vllm, llm, case, tokens, args.new_tokens) | _graphs(llm) | {"gpus": args.gpus}
    if args.dms:
        server = InProcess(vllm, llm)
        for ids in tokens:
            server.add(ids, args.new_tokens)
        generated = 0
        while generated < case.sequences * args.new_tokens // 2:
            generated += sum(new for _, new in server.step())
        row["pages_of_ranks"] = llm.apply_model(_pages)
    yield row


def _pages(model: Any) -> int:
    """Return the pages in use."""
    pool = model.retrofit.cache.pool
    return int(pool.max_pages - pool.free.left)


def _graphs(llm: Any) -> dict[str, str]:
    """Return the mode of CUDA graphs that the engine has chosen."""
    return {"graphs": llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name}


def capacity(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield how many of the given sequences decode at once in a cache of `--cache-bytes`, if given.

    All prompts wait. The engine admits as many as fit, and the measurement ends with the first
    finished sequence.
    """
    for case in args.cases:
        longest = case.context + args.new_tokens
        memory = {"kv_cache_memory_bytes": args.cache_bytes} if args.cache_bytes else {}
        llm = start(vllm, args, case.sequences, max_model_len=longest, **memory)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)
        engine = llm.llm_engine
        for number, ids in enumerate(prompts(case, args.vocab)):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        with marked(llm) as marks:
            while not any(output.finished for output in engine.step()):
                pass
        yield case._asdict() | _graphs(llm) | _plateau(pure_decode_steps(marks), case)


def _plateau(found: dict[int, list[float]], case: Case) -> dict[str, Any]:
    """Return the largest batch that decoded for several steps, and its speed."""
    sizes = [size for size, seconds in found.items() if len(seconds) >= FEWEST]
    if not sizes:
        return {"skipped": f"no batch decoded {FEWEST} steps before the first sequence ended"}
    most = max(sizes)
    seconds = statistics.median(found[most])
    return {
        "together": most,
        "tokens": most * case.context,
        "step_ms": round(1e3 * seconds, 3),
        "tokens_s": round(most / seconds),
    }


def storm(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the tokens of many requests of different lengths in a pool of `--blocks`, in float32.

    Preemptions, the most blocks in use, and what did not come back stand beside them.
    """
    (case,) = args.cases
    together, longest = min(STORM_SEQUENCES, case.sequences), case.context + args.new_tokens
    enough = together * (longest // 16 + 3)  # for all tokens, in blocks of 16
    llm = start(
        vllm, args, together, dtype="float32", max_model_len=longest, gpu_memory_utilization=0.5,
        num_gpu_blocks_override=args.blocks or enough, enforce_eager=args.eager,
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    with marked(llm) as marks, _preemptions(core.scheduler) as preempted:
        outputs = llm.generate(*_storm_work(vllm, args), use_tqdm=False)
    core.model_executor.execute_model(core.scheduler.schedule())  # tells of the last finished ones
    (free_pages,) = llm.apply_model(lambda model: int(model.retrofit.cache.pool.free.left))
    (pages,) = llm.apply_model(lambda model: model.retrofit.cache.pool.max_pages)
    pool = core.scheduler.kv_cache_manager.block_pool
    yield {
        **case._asdict(),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "preemptions": len(preempted),
        "blocks": pool.num_gpu_blocks,
        "most_blocks": max(mark.blocks for mark in marks),
        "missing_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "missing_pages": pages - free_pages,
    }


def _storm_work(vllm: Any, args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Return prompts of 1 to `context` tokens, and parameters for 2 to `--new-tokens`."""
    (case,) = args.cases
    draw = random.Random(0)
    work = [
        {"prompt_token_ids": ids[: draw.randint(1, case.context)]}
        for ids in prompts(case, args.vocab)
    ]
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        for new in (draw.randint(2, args.new_tokens) for _ in work)
    ]
    return work, params


@contextmanager
def _preemptions(scheduler: Any) -> Iterator[list[str]]:
    """Collect the ids of preempted requests, once for each preemption."""
    preempted: list[str] = []
    plain = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        preempted.extend(output.preempted_req_ids or ())
        return output

    scheduler.schedule = schedule
    try:
        yield preempted
    finally:
        scheduler.schedule = plain


class InProcess:
    """Engine in this process, as the server of `steady.Traffic`."""

    def __init__(self, vllm: Any, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._params = vllm.SamplingParams
        self._numbers = itertools.count()
        self._deltas = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA

    def add(self, prompt: list[int], new: int) -> str:
        """As in `steady.Server`."""
        name = str(next(self._numbers))
        params = self._params(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=self._deltas,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> Iterable[tuple[str, int]]:
        """As in `steady.Server`."""
        return [(o.request_id, len(o.outputs[0].token_ids)) for o in self._engine.step()]

    def abort(self, requests: list[str]) -> None:
        """As in `steady.Server`."""
        self._engine.abort_request(requests)


def trace(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the requests per second that an engine sustains within `--max-itl-ms`.

    At most `sequences` requests run at once. vLLM chooses the sizes of its graphs.
    """
    (case,) = args.cases
    limits = Limits(args.max_itl_ms, args.max_wait_s)
    durations = Durations(args.warm_up_s, args.window_s)
    llm = start(
        vllm, args, case.sequences, max_model_len=case.context + args.new_tokens,
        max_num_batched_tokens=CHUNK, compilation_config=mode(not args.eager_prefill),
    )  # fmt: skip
    lengths = Lengths(case.context, args.new_tokens)
    traffic = Traffic(InProcess(vllm, llm), lengths, args.vocab)
    with _preemptions(llm.llm_engine.engine_core.engine_core.scheduler) as preempted:
        probes = search(
            lambda count: traffic.probe(count, durations), limits, case.sequences, HALVINGS
        )
    row = {**case._asdict(), **_graphs(llm), "preemptions": len(preempted), "chunk": CHUNK}
    yield row | limits._asdict() | durations._asdict() | figures(probes, limits)


def server(_: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what vLLM's own client measures of its server at `--request-rate`."""
    (case,) = args.cases
    plugins = "dms" if args.dms else ""
    if plugins and plugins not in entry_points(group="vllm.general_plugins").names:
        raise Refused("vllm serve does not find the plugin; pip install --no-deps -e .")
    options = engine_arguments(args, case.sequences) | {
        "max_model_len": case.context + args.new_tokens + SPARE,
        "max_num_batched_tokens": CHUNK,
        "compilation_config": mode(not args.eager_prefill),
    }
    load = Load(case.sequences, Lengths(case.context, args.new_tokens), args.request_rate)
    environment = os.environ | {
        "VLLM_PLUGINS": plugins,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # the client reuses connections that it has kept
    }
    row = measure_server(args.folder, options, environment, load)
    yield {**case._asdict(), "chunk": CHUNK, **row}


PARTS = {
    "steps": steps,
    "two_gpus": two_gpus,
    "capacity": capacity,
    "grown": capacity,
    "trace": trace,
    "server": server,
    "storm": storm,
}

if __name__ == "__main__":
    main()
