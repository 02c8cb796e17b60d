"""Gated delta rule (arXiv:2412.06464) and the short convolution before it, in operations of torch.

A head has a state S [k, v], which token t changes and reads:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t / sqrt(k)

Chunks of tokens are computed with matrix products, so that only one step for each chunk depends on
the one before it. Shape letters: b samples, s positions, g key heads, r value heads for each key
head, k and v channels of a head, c tokens of a chunk, n chunks, w channels, t taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.options import DELTA_CHUNK

_EPSILON = 1e-6  # added to the squared length of queries and keys


def causal_convolution(
    x: Tensor, weight: Tensor, *, first: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Convolve every channel with its own taps over the last tokens, and apply silu.

    Args:
        x: [b, s, w].
        weight: [w, t]; the last tap multiplies the token itself.
        first: First position of the document of each token, int64 [b, s], which the taps do not
            cross; None where a sample is one document.
        before: Tokens before x, [b, t - 1, w]; None for zeros.

    Returns:
        [b, s, w].
    """
    taps, length, dtype = weight.shape[1], x.shape[1], x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    if before is None:
        padded = F.pad(x, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat([before.to(x.dtype), x], 1)
    out = x * weight[:, -1]
    for age in range(1, taps):
        earlier = padded[:, taps - 1 - age : taps - 1 - age + length]
        if first is not None:
            own = torch.arange(length, device=x.device) - age >= first
            earlier = earlier * own[..., None]
        out = out + earlier * weight[:, -1 - age]
    return F.silu(out).to(dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    *,
    first: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the rule over all tokens, in float32 or wider.

    Args:
        query: [b, s, g, k]; normalised to length 1 here.
        key: The same.
        value: [b, s, g, r, v].
        log_decay: log a, at most 0, [b, s, g, r].
        rate: b, within 0 and 1, [b, s, g, r].
        first: First position of the document of each token, int64 [b, s]; the state is zero there.
            None where a sample is one document.
        state: State before the first token, [b, g, r, k, v]; None for zeros.

    Returns:
        Outputs [b, s, g, r, v] in the dtype of `value`, and the state after the last token in
        float32 or wider.
    """
    length, dtype = query.shape[1], torch.promote_types(value.dtype, torch.float32)
    chunk = min(DELTA_CHUNK, length)
    q, k = (_unit(x.to(dtype))[:, :, :, None] for x in (query, key))
    q = q / q.shape[-1] ** 0.5
    v, log_a, b = value.to(dtype), log_decay.to(dtype)[..., None], rate.to(dtype)[..., None]
    if state is None:
        sizes = (len(v), *v.shape[2:4], k.shape[-1], v.shape[-1])
        state = torch.zeros(sizes, dtype=dtype, device=value.device)
    if length == 1:
        tokens = q[:, 0], k[:, 0], v[:, 0], log_a[:, 0], b[:, 0]
        output, state = _one_token(*tokens, state.to(dtype))
        return output[:, None].to(value.dtype), state
    q, k, v, log_a, b = (_chunks(x, chunk) for x in (q, k, v, log_a, b))
    masks = _Masks(first, length, chunk, q.device)
    outputs, state = _scan(q, k, v, log_a.squeeze(-1), b, masks, state.to(dtype))
    joined = outputs.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, :length]
    return joined.to(value.dtype), state


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over a token [b, g, r or 1, ...]; return its output and the state after it."""
    state = log_a.exp()[..., None] * state
    q, k = q[..., None, :], k[..., None, :]
    missing = v[..., None, :] - k @ state
    state = state + k.mT @ (b[..., None] * missing)
    return (q @ state).squeeze(-2), state


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut [b, s, g, r, d] into [b, g, r, n, c, d]; zeros fill the last chunk."""
    short = -x.shape[1] % chunk
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, short))
    return padded.unflatten(1, (-1, chunk)).permute(0, 3, 4, 1, 2, 5)


class _Masks:
    """Pairs of tokens that belong to one document.

    Attributes:
        within: Tokens of a chunk that a token reads, itself included, [b or 1, 1, 1, n or 1, c, c].
        before: Tokens whose document has begun in an earlier chunk, [b or 1, 1, 1, n, c]; None for
            all.
        last: Tokens of the document of the last token of their chunk, likewise.
    """

    def __init__(self, first: Tensor | None, length: int, chunk: int, device: torch.device) -> None:
        causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
        self.within = causal.expand(1, 1, 1, 1, chunk, chunk)
        self.before: Tensor | None = None
        self.last: Tensor | None = None
        if first is None:
            return
        # the tokens that fill the last chunk continue the last document
        more = first[:, -1:].expand(-1, -length % chunk)
        filled = torch.cat([first, more], 1).unflatten(1, (-1, chunk))[:, None, None]
        starts = torch.arange(filled.shape[3], device=device)[:, None] * chunk
        self.within = causal & (filled[..., :, None] == filled[..., None, :])
        self.before = filled < starts
        self.last = filled == filled[..., -1:]


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _scan(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, masks: _Masks, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over chunks [b, g, r, n, c, ...]; return outputs and the last state."""
    total = log_a.cumsum(-1)
    # where j > i the difference is above 0 and could overflow
    gaps = (total[..., :, None] - total[..., None, :]).masked_fill(~masks.within, -torch.inf).exp()
    arrived = _masked(total.exp(), masks.before)[..., None]  # share of the state before the chunk
    left = _masked((total[..., -1:] - total).exp(), masks.last)[..., None]
    system = b * (k @ k.transpose(-1, -2)) * gaps
    targets = torch.cat([b * v, (b * arrived) * k], -1)
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    attended, q, k = (q @ k.transpose(-1, -2)) * gaps, q * arrived, k * left
    outputs = []
    for n in range(new.shape[3]):
        written = new[:, :, :, n] - read[:, :, :, n] @ state
        outputs.append(q[:, :, :, n] @ state + attended[:, :, :, n] @ written)
        kept = arrived[:, :, :, n, -1:]
        state = kept * state + k[:, :, :, n].transpose(-1, -2) @ written
    return torch.stack(outputs, 3), state


class MixerWeights(NamedTuple):
    """Weights of a gated delta net between its projections.

    Attributes:
        convolution: Taps of queries, keys and values, grouped by key head, [g (2 k + r v), t].
        decay_bias: Added to the projected decay, [g r].
        log_rate: Logarithm of the rates of decay, [g r].
        norm: Factors of the norm of outputs, [v].
        epsilon: Added to the mean square by this norm.
    """

    convolution: Tensor
    decay_bias: Tensor
    log_rate: Tensor
    norm: Tensor
    epsilon: float


class MixerState(NamedTuple):
    """Memory of a gated delta net of earlier tokens.

    Attributes:
        inputs: Last inputs of the convolution, [b, t - 1, g (2 k + r v)].
        heads: States of the value heads in float32 or wider, [b, g, r, k, v].
    """

    inputs: Tensor
    heads: Tensor


def mix_tokens(
    projected: Tensor,
    weights: MixerWeights,
    *,
    first: Tensor | None = None,
    real: Tensor | None = None,
    state: MixerState | None = None,
) -> tuple[Tensor, MixerState]:
    """Run a gated delta net between its projections.

    Args:
        projected: Queries, keys, values, output gate, rate and decay of every key head,
            [b, s, g, 2 k + 2 r v + 2 r].
        weights: Its weights.
        first: See `gated_delta_rule`.
        real: bool [b, s], False for padding, which follows the tokens of a sequence and does not
            change its state; None without padding.
        state: State before the first token; None for a new sequence.

    Returns:
        Outputs [b, s, g r v], and the state after the last token.
    """
    groups, channels = projected.shape[2], len(weights.norm)
    heads = len(weights.decay_bias) // groups
    values = heads * channels
    keys = (projected.shape[-1] - 2 * values - 2 * heads) // 2
    mixed, gate, rate, decay = projected.split([2 * keys + values, values, heads, heads], -1)
    mixed, (before, memory) = mixed.flatten(2), (None, None) if state is None else state
    convolved = causal_convolution(mixed, weights.convolution, first=first, before=before)
    q, k, v = convolved.unflatten(-1, (groups, -1)).split([keys, keys, values], -1)
    v, gate = (x.unflatten(-1, (heads, channels)) for x in (v, gate))
    log_decay, rate = _log_decay(decay, weights), rate.sigmoid()
    if real is not None:
        log_decay, rate = (x * real[..., None, None] for x in (log_decay, rate))
    outputs, after = gated_delta_rule(q, k, v, log_decay, rate, first=first, state=memory)
    last = _last_inputs(mixed, before, real, weights.convolution.shape[1] - 1)
    return _gated_norm(outputs, gate, weights).flatten(2), MixerState(last, after)


def _log_decay(projected: Tensor, weights: MixerWeights) -> Tensor:
    """Return the logarithm of the decay of every value head, [b, s, g, r] in float32 or wider."""
    wide = torch.promote_types(projected.dtype, torch.float32)
    bias, log_rate = (
        x.to(wide).view(projected.shape[2:]) for x in (weights.decay_bias, weights.log_rate)
    )
    return -log_rate.exp() * F.softplus(projected.to(wide) + bias)


def _gated_norm(x: Tensor, gate: Tensor, weights: MixerWeights) -> Tensor:
    """Normalise x [..., v] and multiply by weights and silu(gate); round as transformers does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + weights.epsilon).rsqrt()
    return ((weights.norm * normed.to(x.dtype)) * F.silu(gate.to(wide.dtype))).to(x.dtype)


def _last_inputs(mixed: Tensor, before: Tensor | None, real: Tensor | None, kept: int) -> Tensor:
    """Return the `kept` inputs that the convolution of later tokens reads, [b, kept, w]."""
    b, length, width = mixed.shape
    before = mixed.new_zeros(b, kept, width) if before is None else before
    joined = torch.cat([before.to(mixed.dtype), mixed], 1)
    if real is None:
        return joined[:, length:]
    index = real.sum(1)[:, None] + torch.arange(kept, device=mixed.device)
    return joined.gather(1, index[..., None].expand(-1, -1, width))
