"""The fused kernels beside attention against plain operations, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.layers import triton_decide, triton_rope
from dms_train.kernels.layers.triton_gate import geglu, swiglu
from dms_train.kernels.layers.triton_norm import add_norm, rms_norm
from dms_train.kernels.layers.types import EvictionChannel
from dms_train.method import decisions
from dms_train.method.accounting import live_slots
from dms_train.method.base import MethodOptions
from dms_train.method.dmc.attention import DMCLayer
from dms_train.method.dmc.spec import DMCOptions
from dms_train.method.dms.spec import DMSOptions
from dms_train.method.documents import PackedDocuments
from dms_train.method.layer import LayerPass
from dms_train.method.noise import LayerNoise
from dms_train.method.plan import StepPlan
from dms_train.method.visibility import align_to_keys

S, B, G, R = 37, 2, 3, 2
# Documents of the two samples in shares of their positions, with some padding behind the first's.
SHARES = ((0.4, 0.05, 0.3), (0.6, 0.4))


def documents(s: int, device: torch.device) -> tuple[PackedDocuments, list[tuple[int, slice]]]:
    """Packed documents of two samples of s positions, and (sample, positions) of each of them."""
    lengths = [[max(1, int(share * s)) for share in own] for own in SHARES]
    lengths[1][-1] = s - lengths[1][0]
    packed = PackedDocuments.of([torch.tensor(own) for own in lengths], s)
    ends = [torch.tensor(own).cumsum(0).tolist() for own in lengths]
    where = [
        (b, slice(end - length, end))
        for b, own in enumerate(lengths)
        for length, end in zip(own, ends[b], strict=True)
    ]
    return packed.map(lambda x: x.to(device)), where


def frequencies(d: int, device: torch.device) -> Tensor:
    inverse = 100.0 ** -(torch.arange(0, d, 2, device=device) / d)
    angle = torch.arange(S, device=device)[:, None] * inverse
    return torch.cat([angle, angle], -1)[:, None, None]


def _leaves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone().requires_grad_(), x.double().requires_grad_()


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def rotated(mixed: Tensor, eviction_channel: EvictionChannel) -> tuple[Tensor, ...]:
    """Query, key, value and eviction channel of mixed [s, b, g, r + 2, d] in plain operations."""
    angle = frequencies(mixed.shape[-1], mixed.device).to(mixed.dtype)[:, :, None]
    query, key, value = mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]
    end = decisions.scale_eviction_channel(query, eviction_channel.channel, 0.0)
    end = _turn(end, angle)
    if eviction_channel.clear_after_rope:
        end = decisions.scale_eviction_channel(end, eviction_channel.channel, 0.0)
    query_out = end + eviction_channel.factor * (_turn(query, angle) - end)
    return (
        query_out.flatten(2, 3),
        _turn(key, angle[:, :, 0]),
        value,
        query[..., 0, eviction_channel.channel],
    )


def worst_rotation(
    eviction_channel: EvictionChannel, d: int, device: torch.device, *, apart: bool
) -> float:
    """Largest error of outputs and gradient in float32 against float64."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(S, B, G, R + 2, d, device=device, generator=generator)
    mixed, exact = _leaves(x)
    table = triton_rope.rope_table(frequencies(d, device))
    if apart:
        query, key = mixed[..., :-2, :], mixed[..., -2, :]
        query, key, raw = triton_rope.rotate(query, key, table, eviction_channel)
        found = (query, key, mixed[..., -1, :], raw)
    else:
        found = triton_rope.split_and_rotate(mixed, table, eviction_channel)
    wanted = rotated(exact, eviction_channel)
    weights = [torch.randn(w.shape, device=device, generator=generator) for w in wanted]
    sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
    sum((f * w).sum() for f, w in zip(wanted, weights, strict=True)).backward()
    pairs = [*zip(found, wanted, strict=True), (mixed.grad, exact.grad)]
    return max((f - w).abs().max().item() for f, w in pairs)


def decided(
    eviction_channel: Tensor, spec: DMSOptions, noise: LayerNoise | None
) -> tuple[Tensor, ...]:
    """log(1 - alpha) by key [b, g, s] and eviction statistics [b, 3] in plain operations."""
    drawn = None if noise is None else _drawn(noise, eviction_channel)
    return _decided(eviction_channel, spec, drawn)


def _drawn(noise: LayerNoise, like: Tensor) -> Tensor:
    s, _, g = like.shape
    return noise.logistic(s, g).to(like.dtype)


def _decided(
    eviction_channel: Tensor, spec: DMSOptions, drawn: Tensor | None
) -> tuple[Tensor, ...]:
    s = len(eviction_channel)
    logits = decisions.eviction_logits(eviction_channel, spec)
    alpha, log_keep, straight_through = decisions.relax(logits, drawn, spec.tau)
    counted = straight_through if spec.alpha_in_loss == "hard_st" else alpha
    live = live_slots(decisions.hard_decisions(logits.detach()).permute(1, 2, 0), spec)
    ends = (live[..., -1].sum(1), live.sum((1, 2)) / s)
    eviction_stats = torch.stack(
        [counted.sum((0, 2)), *(x.to(eviction_channel.dtype) for x in ends)], -1
    )
    return align_to_keys(log_keep.permute(1, 2, 0), spec, keep=0.0), eviction_stats


def worst_packed_rotation(eviction_channel: EvictionChannel, d: int, device: torch.device) -> float:
    """Largest difference of packed documents to each document alone, outputs and gradient."""
    packed, where = documents(S, device)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(S, B, G, R + 2, d, device=device, generator=generator)
    table = triton_rope.rope_table(frequencies(d, device))
    mixed = x.clone().requires_grad_()
    found = triton_rope.split_and_rotate(
        mixed, table[packed.positions.t().contiguous()], eviction_channel
    )
    weights = [torch.randn(f.shape, device=device, generator=generator) for f in found]
    sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
    worst = 0.0
    for b, at in where:
        alone = x[at, b : b + 1].clone().requires_grad_()
        parts = triton_rope.split_and_rotate(alone, table[: len(alone)], eviction_channel)
        cut = [w[at, b : b + 1] for w in weights]
        sum((f * w).sum() for f, w in zip(parts, cut, strict=True)).backward()
        pairs = [*((f[at, b : b + 1], p) for f, p in zip(found, parts, strict=True))]
        pairs.append((mixed.grad[at, b : b + 1], alone.grad))
        worst = max(worst, *((f - p).abs().max().item() for f, p in pairs))
    return worst


def worst_packed_decision(
    spec: DMSOptions, device: torch.device, *, noisy: bool, s: int = S
) -> float:
    """As `worst_decision` for packed documents, each of which is decided alone in plain torch."""
    packed, where = documents(s, device)
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(s, B, G, device=device, generator=generator) / spec.alpha_scale
    given, exact = _leaves(x)
    keys = torch.tensor([7, -(2**62) + 3], device=device)
    noise = LayerNoise(keys, 5, 2) if noisy else None
    found, stats = triton_decide.decide(given, spec, noise, packed)
    drawn = _drawn(noise, x.double()) if noisy else None
    sums, kept = torch.zeros(B, 3, device=device, dtype=torch.float64), []
    for b, at in where:
        parts = None if drawn is None else drawn[at, b : b + 1]
        keep, one = _decided(exact[at, b : b + 1], spec, parts)
        kept.append((found[b : b + 1, :, at], keep))
        one = one * torch.tensor([1, 1, (at.stop - at.start) / s], device=device)
        sums = sums + one * (torch.arange(B, device=device)[:, None] == b)
    pairs = [*kept, (stats, sums)]
    weights = [torch.randn(w.shape, device=device, generator=generator) for _, w in pairs]
    for side, leaf in enumerate((given, exact)):
        sum((pair[side] * w).sum() for pair, w in zip(pairs, weights, strict=True)).backward()
        assert leaf.grad is not None
    pairs.append((given.grad, exact.grad))
    return max(((f - w).abs().max() / w.abs().max().clamp_min(1e-3)).item() for f, w in pairs)


def worst_decision(spec: DMSOptions, device: torch.device, *, noisy: bool, s: int = S) -> float:
    """Largest error of outputs and gradient, relative to the largest value of each."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(s, B, G, device=device, generator=generator) / spec.alpha_scale
    eviction_channel, exact = _leaves(x)
    keys = torch.tensor([7, -(2**62) + 3], device=device)
    noise = LayerNoise(keys, 5, 2) if noisy else None
    found, wanted = triton_decide.decide(eviction_channel, spec, noise), decided(exact, spec, noise)
    weights = [torch.randn(w.shape, device=device, generator=generator) for w in wanted]
    sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
    sum((f * w).sum() for f, w in zip(wanted, weights, strict=True)).backward()
    pairs = [*zip(found, wanted, strict=True), (eviction_channel.grad, exact.grad)]
    return max(((f - w).abs().max() / w.abs().max().clamp_min(1e-3)).item() for f, w in pairs)


def layer_pass(
    options: MethodOptions, noise: LayerNoise | None, packed: PackedDocuments | None, heads: int
) -> LayerPass:
    """A microbatch on one rank, without RoPE."""
    return LayerPass(
        plan=StepPlan(eviction="soft", channel_scale=0.0, target_cr=2.0),
        options=options,
        target=0.5,
        documents=packed,
        noise=noise,
        rotate=lambda query, key: (query, key),
        sum_ranks=lambda x: x,
        first_rank=True,
        heads=heads,
        recorded=False,
    )


def worst_merge_decision(
    spec: DMCOptions, device: torch.device, *, noisy: bool, packed: bool, s: int = S
) -> float:
    """As `worst_decision` for decisions to merge, against the torch operations of the layer."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(s, B, G, device=device, generator=generator) / spec.alpha_scale
    given, exact = _leaves(x)
    keys = torch.tensor([7, -(2**62) + 3], device=device)
    noise = LayerNoise(keys, 5, 2) if noisy else None
    where = documents(s, device)[0] if packed else None
    found = triton_decide.decide_merges(given, spec, noise, where)
    alpha, decided = DMCLayer(spec)._decide(exact, layer_pass(spec, noise, where, G))
    wanted = (alpha, decided.log_keep, decided.stats[:, :3])
    weights = [torch.randn(w.shape, device=device, generator=generator) for w in wanted]
    sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
    sum((f * w).sum() for f, w in zip(wanted, weights, strict=True)).backward()
    pairs = [*zip(found, wanted, strict=True), (given.grad, exact.grad)]
    return max(((f - w).abs().max() / w.abs().max().clamp_min(1e-3)).item() for f, w in pairs)


def worst_gate(device: torch.device, name: str) -> float:
    """Largest error of output and gradient of `swiglu` or `geglu` in float32 against float64."""
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(5, B, 2 * 1100, device=device, generator=generator)
    given, exact = _leaves(x)
    gate, up = exact.chunk(2, -1)
    if name == "swiglu":
        found, wanted = swiglu(given), F.silu(gate) * up
    else:
        found, wanted = geglu(given), F.gelu(gate, approximate="tanh") * up
    weights = torch.randn(found.shape, device=device, generator=generator)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    pairs = [(found, wanted), (given.grad, exact.grad)]
    return max((f - w).abs().max().item() for f, w in pairs)


def worst_norm(device: torch.device, dtype: torch.dtype, t: int, c: int, *, added: bool) -> float:
    """Return the largest error of an RMSNorm and its gradients, relative to the largest value.

    The norm is compared with float64. With `added` it is that of a sum, and the sum is used too,
    like a residual stream.
    """
    generator = torch.Generator(device).manual_seed(t + c)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    (x, exact_x), (update, exact_update) = _leaves(normal(t, 2, c)), _leaves(normal(t, 2, c))
    weight, exact_weight = _leaves(1 + 0.3 * normal(c))
    d_total, d_out = normal(2, t, 2, c)
    if added:
        total, out = add_norm(x, update, weight, 1e-3)
        exact = exact_x + exact_update
        ((total * d_total).sum() + (out * d_out).sum()).backward()
    else:
        total, exact, out = x, exact_x, rms_norm(x, weight, 1e-3)
        (out * d_out).sum().backward()
    wanted = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-3) * exact_weight
    ((exact * d_total.double()).sum() * added + (wanted * d_out.double()).sum()).backward()
    pairs = [(total, exact), (out, wanted), (x.grad, exact_x.grad)]
    pairs.append((weight.grad, exact_weight.grad))
    if added:
        pairs.append((update.grad, exact_update.grad))
    return max(((f - w).abs().max() / w.abs().max()).item() for f, w in pairs)
