"""The training objective in plain torch and float64, written from the formulas alone.

Nothing here calls the code it checks; `Architecture`, `DMSOptions`, `StepPlan` and `Batch` are read
as plain records. Shape letters: b samples, t positions, g KV heads, r query heads per KV head, d
head size, i query positions, j key positions.
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
from dms_train.method.dms.spec import DMSOptions
from dms_train.method.plan import StepPlan
from dms_train.method.token_losses import PLAIN_LOSS, LossOptions
from tests.support import yarn
from tests.support.plain_delta import delta_net

Weights = dict[str, Tensor]  # float64, by Hugging Face name
SANDWICH = ("gemma3_text", "glm4")  # families that also normalise what a layer adds
_64_BITS = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Outcome(NamedTuple):
    """Results of one global batch; the last three are means over layers, heads and samples."""

    token_loss: float
    aux_loss: float
    alpha: float
    live: float
    reads: float
    gradients: Weights


class _Decided(NamedTuple):
    """Sums over the KV heads of one layer, [b]."""

    alpha: Tensor
    live: Tensor
    reads: Tensor
    layers: tuple[Tensor, ...] = ()  # alpha of each layer of a model


def outcome(
    architecture: Architecture,
    spec: DMSOptions,
    plan: StepPlan,
    student: Weights,
    teacher: Weights,
    batches: list[Batch],
    seed: int,
    loss: LossOptions = PLAIN_LOSS,
) -> Outcome:
    """Losses and gradients of the global batch that these microbatches make up.

    The objective is the mean token loss over all positions that count plus the mean over the
    samples of the compression hinge, each sample's own (paper section 3.2). With a target for each
    layer, the hinge is the mean of the layers'.
    """
    weights = {name: w.double().requires_grad_() for name, w in student.items()}
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    mask = torch.cat([batch.loss_mask for batch in batches]).double()
    samples = torch.cat([batch.samples for batch in batches]).tolist()
    noise = logistic_noise(architecture, seed, plan.step, samples, tokens.shape[1])
    logits, decided = forward(architecture, spec, plan, weights, tokens, noise)
    if plan.loss == "distill":
        dense = StepPlan(channel_scale=1.0, eviction="none")
        frozen = {name: w.double() for name, w in teacher.items()}
        aim, _ = forward(architecture, spec, dense, frozen, tokens, noise)
        per_token = divergence(logits, aim, loss)
    else:
        per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    token_loss = (per_token * mask).sum() / mask.sum().clamp(min=1)
    heads = len(architecture.method_layers) * architecture.num_query_groups
    alpha = decided.alpha / (heads * tokens.shape[1])
    short = (1 - 1 / plan.target_cr - alpha).clamp(min=0)
    if plan.layer_weights:
        decisions = architecture.num_query_groups * tokens.shape[1]
        aims = [(1 - 1 / plan.target_cr) * weight for weight in plan.layer_weights]
        own = [aim - x / decisions for aim, x in zip(aims, decided.layers, strict=True)]
        short = torch.stack(own).clamp(min=0).mean(0)
    if spec.aux_form == "sum":
        short = short * heads * tokens.shape[1]
    aux_loss = short.mean()
    found = torch.autograd.grad(token_loss + aux_loss, list(weights.values()))
    return Outcome(
        token_loss.item(),
        aux_loss.item(),
        alpha.mean().item(),
        decided.live.mean().item() / heads,
        decided.reads.mean().item() / heads,
        dict(zip(weights, found, strict=True)),
    )


def packed_outcome(
    architecture: Architecture,
    spec: DMSOptions,
    plan: StepPlan,
    student: Weights,
    teacher: Weights,
    batches: list[Batch],
    lengths: list[list[int]],
    seed: int,
) -> Outcome:
    """`outcome` of packed documents: every document goes through the models alone.

    `lengths` are those of each sample's documents. A sample draws noise for all its positions, and
    the hinge is that of the mean decision of its documents.
    """
    a = architecture
    weights = {name: w.double().requires_grad_() for name, w in student.items()}
    frozen = {name: w.double() for name, w in teacher.items()}
    tokens, labels = (torch.cat([getattr(b, n) for b in batches]) for n in ("tokens", "labels"))
    mask = torch.cat([batch.loss_mask for batch in batches]).double()
    samples = torch.cat([batch.samples for batch in batches]).tolist()
    noise = logistic_noise(a, seed, plan.step, samples, tokens.shape[1])
    if not plan.noise:
        noise = torch.zeros_like(noise)
    heads = len(a.method_layers) * a.num_query_groups
    total, hinge, alphas, live, reads = (torch.zeros((), dtype=torch.float64) for _ in range(5))
    for n, own in enumerate(lengths):
        at, alpha = 0, torch.zeros((), dtype=torch.float64)
        for length in own:
            where = (slice(n, n + 1), slice(at, at + length))
            drawn = noise[(slice(None), *where)]
            logits, decided = forward(a, spec, plan, weights, tokens[where], drawn)
            if plan.loss == "distill":
                dense = StepPlan(channel_scale=1.0, eviction="none")
                aim, _ = forward(a, spec, dense, frozen, tokens[where], drawn)
                losses = divergence(logits, aim, PLAIN_LOSS)
            else:
                losses = F.cross_entropy(logits.transpose(1, 2), labels[where], reduction="none")
            total = total + (losses * mask[where]).sum()
            alpha = alpha + decided.alpha.sum()
            live, reads = live + decided.live.sum() / heads, reads + decided.reads.sum() / heads
            at += length
        share = alpha / (heads * at)
        short = (1 - 1 / plan.target_cr - share).clamp(min=0)
        hinge = hinge + (short * heads * at if spec.aux_form == "sum" else short)
        alphas = alphas + share
    token_loss, aux_loss = total / mask.sum().clamp(min=1), hinge / len(lengths)
    found = torch.autograd.grad(token_loss + aux_loss, list(weights.values()))
    means = (x.item() / len(lengths) for x in (alphas, live, reads))
    return Outcome(
        token_loss.item(), aux_loss.item(), *means, dict(zip(weights, found, strict=True))
    )


def divergence(student: Tensor, teacher: Tensor, loss: LossOptions) -> Tensor:
    """KL of softmax(logits / temperature) times temperature squared, [b, t]."""
    temperature = loss.kl_temperature
    s, t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    p, q = (t, s) if loss.kl_direction == "teacher_student" else (s, t)
    kl = p.exp() * (p - q)
    return kl.sum(-1) * temperature**2


def forward(
    a: Architecture,
    spec: DMSOptions,
    plan: StepPlan,
    weights: Weights,
    tokens: Tensor,
    noise: Tensor,
) -> tuple[Tensor, _Decided]:
    """Logits [b, t, vocabulary] and what the decisions of all layers sum up to."""
    gemma, olmo, sandwich = a.family == "gemma3_text", a.family == "olmo3", a.family in SANDWICH
    hidden = weights["model.embed_tokens.weight"][tokens] * (a.hidden_size**0.5 if gemma else 1)
    total = _Decided(*(torch.zeros(len(tokens), dtype=torch.float64) for _ in range(3)))
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = hidden if olmo else _rms_norm(hidden, own["input_layernorm.weight"], a)
        alone = replace(a, layers=a.attention_layers[layer : layer + 1])
        if alone.layers[0].linear:
            attended, decided = _linear(alone, own, normed), _nothing(len(normed))
        else:
            attended, decided = _attention(alone, spec, plan, own, normed, noise[layer])
        if sandwich or olmo:
            attended = _rms_norm(attended, own["post_attention_layernorm.weight"], a)
        hidden = hidden + attended
        sums = (x + y for x, y in zip(total[:3], decided[:3], strict=True))
        total = _Decided(*sums, (*total.layers, decided.alpha))
        before_mlp = "pre_feedforward" if sandwich else "post_attention"
        normed = hidden if olmo else _rms_norm(hidden, own[f"{before_mlp}_layernorm.weight"], a)
        if a.family == "gpt_oss":
            update = _mixture(a, own, normed)
        else:
            gate, up = (normed @ own[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            update = ((_gelu if gemma else _silu)(gate) * up) @ own["mlp.down_proj.weight"].T
        if sandwich or olmo:
            update = _rms_norm(update, own["post_feedforward_layernorm.weight"], a)
        hidden = hidden + update
    head = "model.embed_tokens.weight" if a.tie_word_embeddings else "lm_head.weight"
    return _rms_norm(hidden, weights["model.norm.weight"], a) @ weights[head].T, total


def _linear(a: Architecture, own: Weights, x: Tensor) -> Tensor:
    mixer = {n.removeprefix("linear_attn."): w for n, w in own.items()}
    return torch.stack([delta_net(sample, mixer.__getitem__, a) for sample in x])


def _nothing(samples: int) -> _Decided:
    return _Decided(*torch.zeros(3, samples, dtype=torch.float64))


def _mixture(a: Architecture, own: Weights, x: Tensor) -> Tensor:
    """Experts of gpt-oss, each on all tokens, by a softmax over the best logits of the router."""

    def product(x: Tensor, name: str) -> Tensor:
        return x @ own[f"mlp.{name}.weight"].T + own[f"mlp.{name}.bias"]

    logits, update = product(x, "gate"), torch.zeros_like(x)
    least = logits.topk(a.experts.topk).values[..., -1:]
    shares = logits.masked_fill(logits < least, -math.inf).softmax(-1)
    for n in range(a.experts.count):
        gate, up = (product(x, f"experts.{n}.{p}_proj") for p in ("gate", "up"))
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        update = update + shares[..., n : n + 1] * product(inner, f"experts.{n}.down_proj")
    return update


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    """With the tanh approximation."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _rms_norm(x: Tensor, weight: Tensor, a: Architecture) -> Tensor:
    weight = 1 + weight if a.described.centered_norms else weight
    return weight * x / (x.square().mean(-1, keepdim=True) + a.layernorm_epsilon).sqrt()


def _attention(
    a: Architecture, spec: DMSOptions, plan: StepPlan, own: Weights, x: Tensor, noise: Tensor
) -> tuple[Tensor, _Decided]:
    b, t, _ = x.shape
    g, d = a.num_query_groups, a.kv_channels
    r = a.num_attention_heads // g
    q, k, v = (
        x @ own[f"self_attn.{n}_proj.weight"].T + own.get(f"self_attn.{n}_proj.bias", 0.0)
        for n in "qkv"
    )
    if a.family == "olmo3":  # over all heads
        q = _rms_norm(q, own["self_attn.q_norm.weight"], a)
        k = _rms_norm(k, own["self_attn.k_norm.weight"], a)
    q, k, v = q.view(b, t, g, r, d), k.view(b, t, g, d), v.view(b, t, g, d)
    if a.family != "olmo3" and "self_attn.q_norm.weight" in own:
        q = _rms_norm(q, own["self_attn.q_norm.weight"], a)
        k = _rms_norm(k, own["self_attn.k_norm.weight"], a)
    window = a.layers[0].window
    if window is None:
        bias, decided = _decide(spec, plan, q[:, :, :, 0, spec.channel], noise)
        q, k = _query(a, spec, plan, q), _rope(a, k)
    else:
        age = torch.arange(t)[:, None] - torch.arange(t)
        bias = torch.zeros(1, 1, t, t).double().masked_fill((age < 0) | (age >= window), -math.inf)
        decided = _nothing(b)
        q, k = _rope(a, q), _rope(a, k)
    scores = (
        torch.einsum("bigrd,bjgd->bgrij", q, k) / math.sqrt(a.query_scalar or d) + bias[:, :, None]
    )
    if "self_attn.sinks" in own:
        sinks = own["self_attn.sinks"].view(1, g, r, 1, 1).expand(b, -1, -1, t, -1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.einsum("bgrij,bjgd->bigrd", weights, v).reshape(b, t, -1)
    if "self_attn.gate_proj.weight" in own:
        out = out * (x @ own["self_attn.gate_proj.weight"].T).sigmoid()
    return out @ own["self_attn.o_proj.weight"].T + own.get("self_attn.o_proj.bias", 0.0), decided


def _query(a: Architecture, spec: DMSOptions, plan: StepPlan, q: Tensor) -> Tensor:
    """Rotated queries: a share of the whole ones, the rest without the eviction channel."""
    channel = torch.zeros(q.shape[-2:], dtype=torch.bool)
    channel[0, spec.channel] = True
    without = _rope(a, q.masked_fill(channel, 0.0))
    if spec.clear_after_rope:
        without = without.masked_fill(channel, 0.0)
    return plan.channel_scale * _rope(a, q) + (1 - plan.channel_scale) * without


def _decide(
    spec: DMSOptions, plan: StepPlan, activation: Tensor, noise: Tensor
) -> tuple[Tensor, _Decided]:
    """Bias [b or 1, g or 1, i, j] on the scores, and the sums; `activation` is [b, t, g]."""
    b, t, g = activation.shape
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    causal, late = j <= i, i - j > spec.window
    future = torch.zeros(t, t, dtype=torch.float64).masked_fill(~causal, -math.inf)
    if plan.eviction == "none":
        held = torch.full((b,), g * t, dtype=torch.float64)
        return future[None, None], _Decided(
            torch.zeros_like(held), held, g * causal.sum().expand(b)
        )
    x = spec.alpha_scale * activation - spec.alpha_offset
    z = (x + noise) / spec.tau
    alpha = torch.sigmoid(z)
    counted = (z > 0) + alpha - alpha.detach() if spec.alpha_in_loss == "hard_st" else alpha
    shift = spec.decision_shift + (spec.window if spec.eviction == "immediate" else 0)
    governed = j[0] + shift < t  # the others' decisions do not exist yet
    deciding = (j[0] + shift).clamp(max=t - 1)
    log_keep = -F.softplus(z)[:, deciding].transpose(1, 2)  # [b, g, j]
    applies = late & governed
    bias = torch.where(applies, log_keep[:, :, None, :], 0.0) + future
    evicted = (x > 0)[:, deciding].transpose(1, 2)[:, :, None, :] & applies
    held_by_query = (causal & ~evicted).sum(-1).double()  # [b, g, i]
    live, reads = held_by_query[..., -1].sum(1), held_by_query.sum((1, 2))
    return bias, _Decided(counted.sum((1, 2)), live, reads)


def _rope(a: Architecture, x: Tensor) -> Tensor:
    """Rotary embedding of x [b, t, ..., d] in the first layer of `a`, halves against each other."""
    if a.layers[0].rotary_base is None:
        return x
    half, base = x.shape[-1] // 2, a.layers[0].rotary_base
    turned = round(half * a.partial_rotary_factor)
    frequencies = [_scaled(a, base ** (-n / turned)) for n in range(turned)]
    frequencies += [0.0] * (half - turned)
    scale = 1.0
    if a.family == "gpt_oss" or (a.family == "olmo3" and a.layers[0].window is None):
        frequencies = yarn.frequencies(a.rope_scaling, base, half)
        scale = a.rope_scaling.attention_factor
    angle = torch.arange(x.shape[1]).double()[:, None] * torch.tensor(frequencies).double()
    angle = angle.view(1, x.shape[1], *[1] * (x.dim() - 3), half)
    first, second = x[..., :half], x[..., half:]
    halves = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    return scale * torch.cat(halves, -1)


def _scaled(a: Architecture, frequency: float) -> float:
    """Stretch all waves, or by Llama 3's rule long ones by the factor and those between partly."""
    rule = a.rope_scaling
    if rule is None or rule.rope_type == "yarn" or a.layers[0].window is not None:
        return frequency
    if rule.rope_type == "linear":
        return frequency / rule.factor
    turns = rule.original_max_position_embeddings * frequency / (2 * math.pi)
    if turns > rule.high_freq_factor:
        return frequency
    if turns < rule.low_freq_factor:
        return frequency / rule.factor
    share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    return (1 - share) * frequency / rule.factor + share * frequency


def logistic_noise(
    a: Architecture, seed: int, step: int, samples: list[int], length: int
) -> Tensor:
    """[layers, b, t, g], from SplitMix64 in whole numbers."""

    def draw(state: int, position: int) -> float:
        uniform = ((_mix(state + (position + 1) * _GOLDEN) >> 41) + 0.5) / 2**23
        return math.log(uniform / (1 - uniform))

    def head(sample: int, layer: int, number: int) -> list[float]:
        key = _mix(_mix(_mix(seed * _GOLDEN + 1) + step * _GOLDEN) + sample * _GOLDEN)
        state = _mix(_mix(key + (layer + 1) * _GOLDEN) + (number + 1) * _GOLDEN)
        return [draw(state, position) for position in range(length)]

    layers, heads = range(a.num_layers), range(a.num_query_groups)
    drawn = [[[head(s, layer, h) for h in heads] for s in samples] for layer in layers]
    return torch.tensor(drawn, dtype=torch.float64).transpose(2, 3)


def _mix(x: int) -> int:
    x &= _64_BITS
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _64_BITS
    return x ^ x >> 31
