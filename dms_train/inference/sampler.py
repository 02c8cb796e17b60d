"""Sampling of the next token of each sequence from logits, on the device of the logits.

Tokens are drawn by the Gumbel-max trick. Its random numbers depend only on the sequence's seed, its
index and the number of the generated token. A sequence therefore gets the same token in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import TokenLogprobs
from dms_train.inference.token_scores import HostScores, token_scores
from dms_train.kernels.layers.types import WEIGHT_BITS
from dms_train.method.splitmix import GOLDEN, Numbers, mix, uniform


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence whose next token is sampled.

    Attributes:
        params: Sampling parameters.
        seed: Seed of the random numbers.
        index: Index among the continuations of a request.
        prompt: Tokens before the generated ones.
        output: Generated tokens so far.
    """

    params: SamplingParams
    seed: int
    index: int
    prompt: list[int]
    output: list[int]

    @property
    def stream(self) -> tuple[int, int, int]:
        """Key of the random numbers of the next token: seed, index and number of the token."""
        return signed_seed(self.seed), self.index, len(self.output)


class SampledToken(NamedTuple):
    """A token and, if requested, the log-probabilities at its position."""

    token: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Draw one token per row.

    Args:
        logits: [b, vocab].
        rows: One entry for each row of the logits.
    """
    scores = _adjusted(logits.float(), rows)
    tokens = scores.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    logprobs = _logprobs(logits, tokens, rows)
    return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def _adjusted(scores: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Apply logit bias and penalties to scores [b, vocab]."""
    changed = [i for i, row in enumerate(rows) if row.params.penalizes or row.params.logit_bias]
    if changed:
        scores = scores.clone()
    for i in changed:
        bias = rows[i].params.logit_bias
        ids = torch.tensor(list(bias), dtype=torch.int64, device=scores.device)
        scores[i, ids] += torch.tensor(list(bias.values()), device=scores.device)
        if rows[i].params.penalizes:
            scores[i] = _penalized(scores[i], rows[i])
    return scores


def _penalized(scores: Tensor, row: SamplingRow) -> Tensor:
    """Apply the penalties to one row of scores, [vocab]."""
    params = row.params
    counts = [
        torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(scores))
        for ids in (row.prompt, row.output)
    ]
    prompt, output = torch.stack(counts).to(scores.device)
    repeated = torch.where(
        scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
    )
    scores = torch.where(prompt + output > 0, repeated, scores)
    return scores - params.frequency_penalty * output - params.presence_penalty * (output > 0)


def _draw(scores: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Draw tokens [b] from the softmax of scores [b, vocab] divided by the temperature."""
    vocab = scores.shape[1]
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    scores = scores.double() / temperature[:, None].to(scores.device)
    if any(row.params.restricts for row in rows):
        scores = _restricted(scores, [row.params for row in rows])
    seed, index, token_number = torch.tensor([row.stream for row in rows]).T
    noise = uniform(stream_keys(seed, index, token_number).to(scores.device), vocab)
    return (scores - (-noise.log()).log()).argmax(-1)


def _restricted(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Set the scores [b, vocab] that top-k, then top-p and min-p exclude to -inf.

    Of equal scores, the lowest token ids are kept. Weights are integers, because their sums are
    exact: `kernels.layers.triton_restrict` then excludes the same tokens.
    """
    vocab = scores.shape[1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params])
    shares = torch.tensor([[p.top_p, p.log_min_p] for p in params], dtype=torch.float64)
    top_k, (top_p, log_min_p) = top_k.to(scores.device), shares.to(scores.device).split(1, 1)
    ordered, index = scores.sort(stable=True, dim=-1, descending=True)
    best = ordered[:, :1]
    below_best = (ordered - best).masked_fill(ordered == best, 0)  # avoids inf - inf
    excluded = torch.arange(vocab, device=scores.device) >= top_k
    weight = (below_best.exp() * 2.0**WEIGHT_BITS + 0.5).long().masked_fill(excluded, 0)
    least = (weight.sum(-1, keepdim=True) * top_p).ceil().long()
    excluded |= (weight.cumsum(-1) - weight >= least) & (top_p < 1)
    excluded |= below_best < log_min_p
    return scores.scatter(1, index, ordered.masked_fill(excluded, -torch.inf))


def signed_seed(seed: int) -> int:
    """Map a seed, which may be any integer, into the range of int64, modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


def stream_keys(seed: Numbers, index: Numbers, token_number: Numbers) -> Numbers:
    """Compute the keys of `method.splitmix` for tokens.

    Args:
        seed: Seeds of the sequences, int64 tensor or array.
        index: Indices among the continuations of a request, of the same type.
        token_number: Numbers of the generated tokens, of the same type.

    Returns:
        Keys of the same type, in the shape that the arguments broadcast to.
    """
    return mix(mix(mix(seed * GOLDEN + 1) + index * GOLDEN) + token_number * GOLDEN)


def _logprobs(logits: Tensor, tokens: Tensor, rows: list[SamplingRow]) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that request them, by row."""
    wanted = {i: row.params.logprobs for i, row in enumerate(rows)}
    tops = {i: top for i, top in wanted.items() if top is not None}
    if not tops:
        return {}
    indices = list(tops)
    packed = token_scores(logits[indices], tokens[indices], max(tops.values()))
    entries = HostScores.of(packed.cpu()).entries(list(tops.values()))
    return dict(zip(indices, entries, strict=True))
