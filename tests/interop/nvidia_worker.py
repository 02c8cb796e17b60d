"""NVIDIA Model-Optimizer's DMS code (`experimental/dms`) on the CPU, in its own environment.

Its model class, cache, prefill and checkpoint extraction run as they are; `flash_attn` is ours
(`standins`), and TORCHDYNAMO_DISABLE=1 turns `torch.compile` off.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from dms.training.engine import distillation_loss, dms_schedule
from jobs import main, pieces, word_tokenizer
from models.qwen3.configuration_qwen3_dms import Qwen3ConfigDMS
from models.qwen3.modeling_qwen3_dms import Qwen3ForCausalLMDMS
from models.qwen3.train import extract_student_model
from torch import Tensor


def _load(model: str, dtype: str, **options: object) -> Qwen3ForCausalLMDMS:
    weights = getattr(torch, dtype)
    return Qwen3ForCausalLMDMS.from_pretrained(model, dtype=weights, **options).eval()


@torch.no_grad()
def run(
    model: str, tokens: list[int], prompt: int, dtype: str, **options: object
) -> dict[str, Tensor]:
    """Prefill and decode given tokens.

    Returns:
        logits [T, vocab]; decisions [layers, kv_heads, T]; live [T - prompt, layers, kv_heads],
        tokens in the paged cache after each decoded one.
    """
    loaded = _load(model, dtype, **options)
    decisions: list[list[Tensor]] = [[] for _ in loaded.model.layers]
    for layer, seen in zip(loaded.model.layers, decisions, strict=True):
        layer.self_attn.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[1][0]))
    cache, logits, live = loaded.get_cache(), [], []
    for part in pieces(tokens, prompt):
        out = loaded(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
        logits.append(out.logits[0].float())
        if cache.is_inference_mode():
            live.append(
                torch.stack([x.paged_cache.get_seq_lengths().clone() for x in cache.layers])
            )
    return {
        "logits": torch.cat(logits),
        "decisions": torch.stack([torch.cat(seen, -1) for seen in decisions]) > 0.5,
        "live": torch.stack(live).flatten(2).long(),
    }


@torch.no_grad()
def generate(model: str, tokens: list[int], dtype: str, count: int) -> dict[str, Tensor]:
    """Its own greedy continuation, [count]."""
    done = _load(model, dtype).generate(
        torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return {"tokens": done[0, len(tokens) :]}


@torch.no_grad()
def write(directory: str, separate: bool, window: int, block: int) -> dict[str, Tensor]:
    """A random model of its class, saved by its own extraction (bfloat16)."""
    torch.manual_seed(3)
    config = Qwen3ConfigDMS(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_theta=1e6,
        dms_window_size=window,
        dms_paged_attention_block_size=block,
        dms_separate_alpha=separate,
    )
    model = Qwen3ForCausalLMDMS(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.copy_(1 + 0.2 * torch.randn_like(weight))
        else:
            weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    Path(directory).mkdir(parents=True)
    extract_student_model(SimpleNamespace(student_model=model), word_tokenizer(61), directory)
    return {}


def recipe(eos: int, initial_cr: float, final_cr: float, final_step: int) -> dict[str, Tensor]:
    """Its loss of random logits, and the compression ratio of every step of its training.

    Returns:
        student and teacher [2, 30, vocab]; tokens [2, 30]; loss [1]; ratios [steps].
    """
    torch.manual_seed(5)
    student, teacher = (3 * torch.randn(2, 30, 61) for _ in range(2))
    tokens = torch.randint(0, 61, (2, 30))
    loss = distillation_loss(student, teacher, tokens != eos, vocab_chunk=16)
    ratios = [
        dms_schedule(step, None, initial_cr, final_cr, final_step)[1] for step in range(final_step)
    ]
    named = {"student": student, "teacher": teacher, "tokens": tokens, "loss": loss[None]}
    return {**named, "ratios": torch.tensor(ratios, dtype=torch.float64)}


if __name__ == "__main__":
    main({"run": run, "generate": generate, "write": write, "recipe": recipe})
