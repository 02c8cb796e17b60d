"""The training objective of DMC in plain torch and float64, written from the formulas alone.

As `plain_objective`, whose norms, RoPE and noise it uses; the attention is one loop over queries
and one over the tokens of every slot. Shape letters are those of that module.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.method.dmc.spec import DMCOptions
from dms_train.method.plan import StepPlan
from dms_train.method.token_losses import PLAIN_LOSS
from tests.support.plain_objective import Weights, _rms_norm, _rope, divergence, logistic_noise


class Outcome(NamedTuple):
    """Results of one global batch; `alpha` and `live` are means over layers, heads and samples."""

    token_loss: float
    aux_loss: float
    alpha: float
    live: float
    gradients: Weights


def outcome(
    a: Architecture,
    spec: DMCOptions,
    plan: StepPlan,
    student: Weights,
    teacher: Weights,
    batches: list[Batch],
    seed: int,
) -> Outcome:
    """Losses and gradients of the global batch that these microbatches make up."""
    weights = {name: w.double().requires_grad_() for name, w in student.items()}
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    mask = torch.cat([batch.loss_mask for batch in batches]).double()
    samples = torch.cat([batch.samples for batch in batches]).tolist()
    noise = logistic_noise(a, seed, plan.step, samples, tokens.shape[1])
    logits, counted, alpha, hard = forward(a, spec, plan, weights, tokens, noise)
    if plan.loss == "distill":
        frozen = {name: w.double() for name, w in teacher.items()}
        dense = StepPlan(channel_scale=1.0, eviction="none")
        aim = forward(a, spec, dense, frozen, tokens, noise)[0]
        per_token = divergence(logits, aim, PLAIN_LOSS)
    else:
        per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    token_loss = (per_token * mask).sum() / mask.sum()
    dims = (0, 2, 3)  # of [layers, b, t, g]
    target = 1 - 1 / plan.target_cr
    if spec.prior == "layer":
        aux_loss = (target - counted.mean((2, 3))).clamp(min=0).mean()
    else:
        aux_loss = (target - counted.mean(dims)).clamp(min=0).mean()
    apart = (alpha - alpha.mean(-1, keepdim=True)).abs().mean()
    aux_loss = aux_loss + spec.consistency * apart
    found = torch.autograd.grad(token_loss + aux_loss, list(weights.values()))
    live = (1 - hard.double()).sum(2).mean()
    return Outcome(
        token_loss.item(),
        aux_loss.item(),
        counted.mean().item(),
        live.item(),
        dict(zip(weights, found, strict=True)),
    )


def forward(
    a: Architecture,
    spec: DMCOptions,
    plan: StepPlan,
    weights: Weights,
    tokens: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [b, t, vocabulary]; counted, soft and hard decisions [layers, b, t, g]."""
    hidden = weights["model.embed_tokens.weight"][tokens]
    decided = []
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = _rms_norm(hidden, own["input_layernorm.weight"], a)
        alone = replace(a, layers=a.attention_layers[layer : layer + 1])
        attended, found = _attention(alone, spec, plan, own, normed, noise[layer])
        hidden = hidden + attended
        decided.append(found)
        normed = _rms_norm(hidden, own["post_attention_layernorm.weight"], a)
        gate, up = (normed @ own[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if a.tie_word_embeddings else "lm_head.weight"
    logits = _rms_norm(hidden, weights["model.norm.weight"], a) @ weights[head].T
    return logits, *(torch.stack(x) for x in zip(*decided, strict=True))


def _attention(
    a: Architecture, spec: DMCOptions, plan: StepPlan, own: Weights, x: Tensor, noise: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    b, t, _ = x.shape
    g, d = a.num_query_groups, a.kv_channels
    q, k, v = (
        x @ own[f"self_attn.{n}_proj.weight"].T + own.get(f"self_attn.{n}_proj.bias", 0.0)
        for n in "qkv"
    )
    q, k, v = q.view(b, t, g, -1, d), k.view(b, t, g, d), v.view(b, t, g, d)
    if "self_attn.q_norm.weight" in own:
        q = _rms_norm(q, own["self_attn.q_norm.weight"], a)
        k = _rms_norm(k, own["self_attn.k_norm.weight"], a)
    activation, weighing = k[..., spec.channel], q[..., spec.channel].mean(-1)
    if spec.heads == "shared":
        drawn = (activation, weighing, noise)
        activation, weighing, noise = (y[..., :1].expand(b, t, g) for y in drawn)
    whole = torch.ones(d, dtype=torch.float64)
    whole[spec.channel] = plan.channel_scale
    q, k = q * whole, k * whole
    alpha, counted, hard, log_keep = _decide(spec, plan, activation, noise)
    if plan.eviction != "none":
        omega = torch.sigmoid(weighing + spec.importance_offset) + 1e-6
        omega = torch.ones_like(omega) if spec.importance == "uniform" else omega
        k, v = states(k, v, alpha, omega, spec.merge_window)
    q, k = _rope(a, q), _rope(a, k)
    out = torch.zeros_like(q)
    for i in range(t):
        scores = torch.einsum("bgrd,bjgd->bgrj", q[:, i], k[:, : i + 1]) / math.sqrt(d)
        bias = torch.cat([log_keep[:, 1 : i + 1], torch.zeros_like(log_keep[:, :1])], 1)
        scores = scores + bias.transpose(1, 2)[:, :, None]
        out[:, i] = torch.einsum("bgrj,bjgd->bgrd", scores.softmax(-1), v[:, : i + 1])
    return out.reshape(b, t, -1) @ own["self_attn.o_proj.weight"].T, (counted, alpha, hard)


def _decide(
    spec: DMCOptions, plan: StepPlan, activation: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """alpha, as counted, hard, and log(1 - alpha), each [b, t, g]; the first token stays."""
    if plan.eviction == "none":
        zero = torch.zeros_like(activation)
        return zero, zero, zero > 0, zero
    x = spec.alpha_scale * activation - spec.alpha_offset
    z = (x + noise) / spec.tau
    later = torch.ones(x.shape[1], 1, dtype=torch.float64)
    later[0] = 0
    soft = torch.sigmoid(z)
    counted = (z > 0) + soft - soft.detach() if spec.alpha_in_loss == "hard_st" else soft
    hard = (x > 0) & (later > 0)
    if plan.eviction == "hard":
        gone = torch.zeros_like(x).masked_fill(hard, -math.inf)
        return hard.double(), hard.double(), hard, gone
    return soft * later, counted * later, hard, -F.softplus(z)


def states(k: Tensor, v: Tensor, alpha: Tensor, omega: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The recurrence of section 3.2 from an empty slot `width` tokens back, for every token."""
    keys, values = [], []
    for i in range(k.shape[1]):
        z = torch.zeros_like(omega[:, 0])
        key, value = torch.zeros_like(k[:, 0]), torch.zeros_like(v[:, 0])
        for j in range(max(0, i - width + 1), i + 1):
            before, own = (alpha[:, j] * z)[..., None], omega[:, j][..., None]
            z = alpha[:, j] * z + omega[:, j]
            key = (key * before + k[:, j] * own) / z[..., None]
            value = (value * before + v[:, j] * own) / z[..., None]
        keys.append(key)
        values.append(value)
    return torch.stack(keys, 1), torch.stack(values, 1)
