"""vLLM on random weights of the same shapes: one JSON line for each case.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.serve.peer SHAPE SEQUENCESxCONTEXT ...

The variable keeps vLLM's engine in this process, where its steps are watched: the median time of
those in which all sequences decode is measured, as for our engine. vLLM is not a dependency of this
project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serve.case import Case, prompts
from benchmarks.serve.models import LONGEST, architecture


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager-prefill", action="store_true", help="graphs for decoding only")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    vllm: Any = importlib.import_module("vllm")
    llm = start(vllm, args.shape, args.kv_cache_dtype, compiled=not args.eager_prefill)
    for text in args.cases:
        case = Case(*map(int, text.split("x")))
        tokens = prompts(case, architecture(args.shape).vocab_size)
        _run(vllm, llm, tokens, 4)
        prefill, _ = _run(vllm, llm, tokens, 1)
        _, steps = _run(vllm, llm, tokens, 1 + args.new_tokens)
        low, *_, high = statistics.quantiles(steps, n=5)
        record = {
            "engine": f"vLLM {vllm.__version__}",
            "mode": "graphs for decoding" if args.eager_prefill else "default",
            "cache_dtype": args.kv_cache_dtype,
            "shape": args.shape,
            "sequences": case.sequences,
            "context": case.context,
            "prefill_tok_s": round(case.sequences * case.context / prefill),
            "step_ms": round(1e3 * statistics.median(steps), 3),
            "step_ms_spread": [round(1e3 * low, 3), round(1e3 * high, 3)],
        }
        print(json.dumps(record), flush=True)


def start(
    vllm: Any, shape: str, kv_cache_dtype: str, *, compiled: bool, sequences: int = 32
) -> Any:
    """An engine on weights that vLLM makes up.

    Args:
        vllm: The package.
        shape: One of `models.SHAPES`.
        kv_cache_dtype: Of its cache.
        compiled: Whether prompts are compiled; steps that decode are captured in any case.
        sequences: Most at the same time.
    """
    a = architecture(shape)
    folder = Path(tempfile.mkdtemp())
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
    sizes: dict[str, Any] = {
        "cudagraph_capture_sizes": sorted(
            {1 << power for power in range(sequences.bit_length())} | {sequences}
        )
    }
    if not compiled:
        sizes |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=LONGEST,
        max_num_seqs=sequences,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        attention_backend="FLASH_ATTN",
        compilation_config=sizes,
        generation_config="vllm",
    )


def _run(vllm: Any, llm: Any, tokens: list[list[int]], new: int) -> tuple[float, list[float]]:
    """Seconds of a call, and of its steps in which every sequence advanced by one token."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    engine, marks = llm.llm_engine, []
    plain, scheduler = engine.step, engine.engine_core.engine_core.scheduler

    def step() -> Any:
        found = plain()
        counts = [request.num_output_tokens for request in scheduler.running]
        if len(counts) == len(tokens) and min(counts) > 0:
            marks.append((time.perf_counter(), sum(counts)))
        return found

    engine.step = step
    before = time.perf_counter()
    try:
        llm.generate([{"prompt_token_ids": ids} for ids in tokens], params, use_tqdm=False)
    finally:
        engine.step = plain
    pairs = pairwise(marks)
    steps = [b[0] - a[0] for a, b in pairs if b[1] - a[1] == len(tokens)]
    return time.perf_counter() - before, steps


if __name__ == "__main__":
    main()
