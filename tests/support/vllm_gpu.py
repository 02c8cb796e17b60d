"""Tokens of vLLM and of the own engine on a GPU: `python -m tests.support.vllm_gpu EXPORT RESULT`.

Both read random prompts in float32. RESULT receives their tokens as JSON.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path

import torch

PROMPTS, LONGEST, NEW_TOKENS = 31, 240, 64
_SEQUENCES = 16


def _prompts(vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [draw.randint(1, LONGEST) for _ in range(PROMPTS)]
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def _generate_with_engine(export: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return tokens, and the share of all tokens that the cache holds at the end."""
    from dms_train.inference.llm import LLM
    from dms_train.inference.options import SamplingParams

    llm = LLM(export, dtype="float32", device="cuda", cache_bytes=10**9)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    held = sum(output.kv.live_tokens for output in outputs)
    share = held / sum(output.kv.tokens for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], share


def _generate_with_vllm(export: str, prompts: list[list[int]]) -> list[list[int]]:
    import vllm

    llm = vllm.LLM(
        model=export, skip_tokenizer_init=True, generation_config="vllm", dtype="float32",
        block_size=16, max_model_len=LONGEST + NEW_TOKENS + 16, max_num_batched_tokens=128,
        max_num_seqs=_SEQUENCES, gpu_memory_utilization=0.1,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                            "cudagraph_capture_sizes": [1, 2, 4, 8, _SEQUENCES]},
    )  # fmt: skip
    params = vllm.SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(given, params, use_tqdm=False)]


def main() -> None:
    export, result = sys.argv[1:]
    vocabulary = json.loads((Path(export) / "config.json").read_text())["vocab_size"]
    prompts = _prompts(vocabulary)
    tokens, share = _generate_with_engine(export, prompts)
    gc.collect()
    torch.cuda.empty_cache()  # vLLM measures what is free
    served = _generate_with_vllm(export, prompts)
    Path(result).write_text(json.dumps({"engine": tokens, "held": share, "vllm": served}))


if __name__ == "__main__":
    main()
