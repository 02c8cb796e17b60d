"""FastDMS on the CPU, in its own environment.

Its metadata reader, weight loader, models, compact cache, the preparation and recording of the
engine's steps and its trainer run as they are; its Triton kernels run in Triton's interpreter
(TRITON_INTERPRET=1). Replaced: `flash_attn` (ours, `standins`), the engine's constructor (it opens
NCCL and divides up a GPU), copies to the GPU (kept where they are) and the download of a data set.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from fastdms.config import Config
from fastdms.engine.compact_kv import CompactKVManager
from fastdms.engine.model_runner import ModelRunner
from fastdms.engine.sequence import Sequence
from fastdms.models import llama, qwen3
from fastdms.models.registry import build_model
from fastdms.sampling_params import SamplingParams
from fastdms.utils.context import get_context, reset_context
from fastdms.utils.loader import load_model
from jobs import main, word_tokenizer
from torch import Tensor
from training import dms_train


class HostRunner(ModelRunner):
    """The engine's runner, built without a GPU."""

    def __init__(self, config: Config) -> None:
        self.config, self.rank, self.world_size, self.enforce_eager = config, 0, 1, True
        self.block_size = config.kvcache_block_size
        self.compact_decode_cudagraph = False
        self.compact_live_tokens_peak = 0
        self.compact_live_tokens_peak_device = None
        self.last_dms_decode_stats = []
        self.dms_metadata = self.load_dms_metadata()
        hf, usual = config.hf_config, torch.get_default_dtype()
        torch.set_default_dtype(hf.dtype)
        self.model = build_model(hf)
        load_model(self.model, config.model)
        torch.set_default_dtype(usual)
        self.compact_kv_manager = CompactKVManager(
            num_layers=hf.num_hidden_layers,
            num_kv_heads=hf.num_key_value_heads,
            capacity_tokens=4096,
            max_model_len=config.max_model_len,
            device="cpu",
            head_dim=hf.head_dim,
            compact_dtype=config.resolve_kv_cache_dtype(),
            per_layer_storage=True,
            max_active_seqs=1,
        )
        attention = [m for m in self.model.modules() if hasattr(m, "compact_k_cache")]
        for number, module in enumerate(attention):
            module.layer_id = number
        self.compact_kv_manager.attach_attention_modules(attention)


def _config(model: str, dtype: str) -> Config:
    config = Config(model, compact_kv_enabled=True, compact_kv_retention_mode="dms")
    config.hf_config.dtype = getattr(torch, dtype)
    return config


def run(
    model: str,
    tokens: list[int],
    prompt: int,
    dtype: str,
    kernels: bool,
    expiry: str = "0",
) -> dict[str, Tensor]:
    """Prefill and decode given tokens.

    Args:
        model: Directory.
        tokens: The text.
        prompt: Tokens of it that are prefilled.
        dtype: Compute dtype; the engine itself takes the one in config.json.
        kernels: Whether its Triton kernels run wherever it has some, as on a GPU; otherwise
            only where it has nothing else.
        expiry: FASTDMS_DMS_EXPIRY_TRITON: `0` and `1` expire at every token (in torch, in
            Triton), `auto` once per window.

    Returns:
        logits [T - prompt + 1, vocab] from the last prompt token on; decisions
        [layers, kv_heads, T]; live [T - prompt + 1, layers, kv_heads].
    """
    os.environ["FASTDMS_DMS_EXPIRY_TRITON"] = expiry
    torch.Tensor.is_cuda = property(lambda _: kernels)
    for family in (llama, qwen3):
        family.dms_fused_decode_preprocess_enabled = lambda: kernels
    runner = HostRunner(_config(model, dtype))
    sequence = Sequence(tokens[:prompt], SamplingParams(max_tokens=len(tokens)))
    sequence.num_scheduled_tokens = prompt
    logits, decisions, live = [], [], []
    for step, token in enumerate([None, *tokens[prompt:]]):
        if token is not None:
            sequence.append_token(token)
        prepare = runner.prepare_decode if step else runner.prepare_prefill
        ids, positions = prepare([sequence])
        logits.append(runner.run_model(ids, positions, is_prefill=not step).float())
        evicted = get_context().dms_layer_evictions
        decisions.append(torch.stack([evicted[number].T for number in range(len(evicted))]))
        if step:
            runner.record_dms_decode_decisions([sequence])
        reset_context()
        live.append(runner.compact_kv_manager.seq_states[sequence.seq_id].live_counts.clone())
    return {
        "logits": torch.cat(logits),
        "decisions": torch.cat(decisions, -1),
        "live": torch.stack(live).long(),
    }


def train(base: str, output: str, window: int) -> dict[str, Tensor]:
    """One step of its trainer from a dense model; its eviction channels hardly change."""
    torch.manual_seed(0)
    word_tokenizer(61).save_pretrained(base)
    text = " ".join(f"w{i}" for i in torch.randint(1, 61, (200,)).tolist())
    dms_train.load_dataset = lambda *_, **__: {"text": [text]}
    dms_train.train_dms(
        base,
        target_cr=2,
        context_len=32,
        window_size=window,
        zeroing_steps=0,
        steps_per_cr=1,
        grad_accum_steps=1,
        lr=1e-4,
        device="cpu",
        output_dir=str(Path(output)),
    )
    return {}


if __name__ == "__main__":
    real_tensor = torch.tensor
    torch.tensor = lambda *values, pin_memory=False, **kinds: real_tensor(*values, **kinds)
    torch.Tensor.cuda = lambda self, **_: self
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main({"run": run, "train": train})
