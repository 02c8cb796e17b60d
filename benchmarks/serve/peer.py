"""vLLM on random weights of the same shapes: one JSON line for each case.

    python -m benchmarks.serve.peer SHAPE SEQUENCESxCONTEXT ... [--kv-cache-dtype fp8]

vLLM's engine runs in this process, so that its steps can be observed. As for our engine, the median
time of steps in which all sequences decode is measured. vLLM is not a dependency of this project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serve.case import Case, Steps, figures, prompts
from benchmarks.serve.models import LONGEST, MEMORY, architecture
from benchmarks.serve.ours import skipped

_SHORT = 64  # number of prompt tokens in the warm-up of decoding


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("cases", nargs="+", type=Case.parse)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager-prefill", action="store_true", help="graphs for decoding only")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its steps are watched in this process
    vllm: Any = importlib.import_module("vllm")
    names = {
        "engine": f"vLLM {vllm.__version__}",
        "mode": "graphs for decoding" if args.eager_prefill else "default",
        "cache_dtype": args.kv_cache_dtype,
        "shape": args.shape,
    }
    for row in rows(vllm, args):
        print(json.dumps(names | row), flush=True)


def rows(vllm: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the cases; those that do not fit have the reason in `skipped`."""
    sequences = max(case.sequences for case in args.cases)
    try:
        llm = start(vllm, args.shape, args.kv_cache_dtype, sequences, not args.eager_prefill)
    except ValueError as error:  # such as a cache that cannot hold one sequence
        yield from skipped(args.cases, error)
        return
    for case in args.cases:
        tokens = prompts(case, architecture(args.shape).vocab_size)
        yield measure(vllm, llm, case, tokens, args.new_tokens)


def measure(
    vllm: Any, llm: Any, case: Case, tokens: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Measure a case after a warm-up.

    Returns:
        `figures`, and as `live` the tokens of the cache blocks that a sequence holds at its end.
    """
    run(vllm, llm, tokens[:1], 4)
    run(vllm, llm, [ids[:_SHORT] for ids in tokens], 4)
    prefill, _ = run(vllm, llm, tokens, 1)
    decode, blocks = run(vllm, llm, tokens, 1 + new_tokens)
    slots = blocks * llm.llm_engine.vllm_config.cache_config.block_size
    return figures(case, prefill, decode) | {"live": round(slots / case.sequences)}


def write_config(shape: str, folder: Path) -> None:
    """Write the Hugging Face configuration of the dense model of a shape."""
    a = architecture(shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.kv_channels,
        "hidden_act": "silu",
        "rms_norm_eps": a.layernorm_epsilon,
        "rope_theta": a.rotary_base,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def random_weights(shape: str) -> dict[str, Any]:
    """Return the arguments of a vLLM engine with random weights and the memory share of ours.

    Prefix caching is off, because the measured prompts repeat those of the warm-up.
    """
    folder = tempfile.mkdtemp()
    write_config(shape, Path(folder))
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "gpu_memory_utilization": MEMORY,
        "enable_prefix_caching": False,
    }


def start(vllm: Any, shape: str, kv_cache_dtype: str, sequences: int, compiled: bool) -> Any:
    """Start an offline engine.

    Args:
        vllm: The package.
        shape: One of `models.SHAPES`.
        kv_cache_dtype: Dtype of the KV cache.
        sequences: Largest number of concurrent sequences; decode steps are captured for this number
            and every smaller power of two.
        compiled: True to compile prompts; decode steps are captured in any case.
    """
    return vllm.LLM(
        **random_weights(shape),
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=LONGEST,
        max_num_seqs=sequences,
        attention_backend="FLASH_ATTN",
        compilation_config=graphs(sequences, compiled),
    )


def graphs(sequences: int, compiled: bool) -> dict[str, Any]:
    """Return vLLM's compilation settings; arguments as in `start`."""
    powers = {1 << power for power in range(sequences.bit_length())}
    sizes: dict[str, Any] = {"cudagraph_capture_sizes": sorted(powers | {sequences})}
    return sizes | mode(compiled)


def mode(compiled: bool) -> dict[str, Any]:
    """Return vLLM's compilation settings except the sizes of its graphs; see `start`."""
    return {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


class Mark(NamedTuple):
    """State of an engine after one of its steps.

    Attributes:
        at: Time in seconds.
        counts: Generated tokens of each running request.
        blocks: Blocks of the KV cache in use.
    """

    at: float
    counts: list[int]
    blocks: int


@contextmanager
def marked(llm: Any) -> Iterator[list[Mark]]:
    """Record every step of an engine that runs in this process."""
    marks: list[Mark] = []
    engine = llm.llm_engine
    plain, scheduler = engine.step, engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool

    def step() -> Any:
        outputs = plain()
        counts = [request.num_output_tokens for request in scheduler.running]
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # vLLM never grants one
        marks.append(Mark(time.perf_counter(), counts, used))
        return outputs

    engine.step = step
    try:
        yield marks
    finally:
        engine.step = plain


def pure_decode_steps(marks: list[Mark]) -> dict[int, list[float]]:
    """Return the seconds of steps in which every running sequence advanced by one token.

    The key is the number of sequences.
    """
    steps: dict[int, list[float]] = {}
    for before, after in pairwise(marks):
        size = len(after.counts)
        all_decode = size == len(before.counts) and min(before.counts, default=0) > 0
        if all_decode and sum(after.counts) - sum(before.counts) == size:
            steps.setdefault(size, []).append(after.at - before.at)
    return steps


def run(vllm: Any, llm: Any, tokens: list[list[int]], new: int) -> tuple[Steps, int]:
    """Decode all prompts; return their steps and the blocks in use at the end of decoding.

    A step counts if every sequence advanced by one token.
    """
    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    before = time.perf_counter()
    with marked(llm) as marks:
        llm.generate([{"prompt_token_ids": ids} for ids in tokens], params, use_tqdm=False)
    seconds = time.perf_counter() - before
    together = max(sum(count > 0 for count in mark.counts) for mark in marks)
    held = [mark.blocks for mark in marks if len(mark.counts) == len(tokens)]
    steps = pure_decode_steps(marks).get(len(tokens), [])
    return Steps(seconds, steps, together), held[-1] if held else 0


if __name__ == "__main__":
    main()
