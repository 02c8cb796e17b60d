"""From logits to the next token of each sequence, on the device of the logits.

A token is drawn by the Gumbel-max trick with numbers that depend on the sequence's seed, its index
and the number of the generated token only. A row of a batch therefore gives the token that it
gives alone.
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
        params: How.
        seed: Of its random numbers.
        index: Its number among the continuations of a request.
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
        """Which random numbers the next token is drawn with: seed, index and its number."""
        return signed_seed(self.seed), self.index, len(self.output)


class SampledToken(NamedTuple):
    """A token and, if asked for, the log-probabilities at its place."""

    token: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Draw one token per row.

    Args:
        logits: [b, vocab].
        rows: One for each of them.
    """
    scores = _adjusted(logits.float(), rows)
    tokens = scores.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    logprobs = _logprobs(logits, tokens, rows)
    return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def _adjusted(scores: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Scores [b, vocab] after logit bias and penalties."""
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
    """One row of scores, [vocab], after its penalties."""
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
    """Tokens [b] drawn from the softmax of scores [b, vocab] over the temperature."""
    vocab = scores.shape[1]
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    scores = scores.double() / temperature[:, None].to(scores.device)
    if any(row.params.restricts for row in rows):
        scores = _restricted(scores, [row.params for row in rows])
    seed, index, place = torch.tensor([row.stream for row in rows]).T
    noise = uniform(stream_keys(seed, index, place).to(scores.device), vocab)
    return (scores - (-noise.log()).log()).argmax(-1)


def _restricted(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Scores [b, vocab] with -inf for what top-k, then top-p and min-p exclude.

    Of equal scores the first ones are kept. Weights are integers, whose sums are exact, so that
    `kernels.layers.triton_restrict` excludes the same tokens.
    """
    vocab = scores.shape[1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params])
    shares = torch.tensor([[p.top_p, p.log_min_p] for p in params], dtype=torch.float64)
    top_k, (top_p, log_min_p) = top_k.to(scores.device), shares.to(scores.device).split(1, 1)
    ordered, index = scores.sort(stable=True, dim=-1, descending=True)
    best = ordered[:, :1]
    behind = (ordered - best).masked_fill(ordered == best, 0)  # infinite ones too
    excluded = torch.arange(vocab, device=scores.device) >= top_k
    weight = (behind.exp() * 2.0**WEIGHT_BITS + 0.5).long().masked_fill(excluded, 0)
    least = (weight.sum(-1, keepdim=True) * top_p).ceil().long()
    excluded |= (weight.cumsum(-1) - weight >= least) & (top_p < 1)
    excluded |= behind < log_min_p
    return scores.scatter(1, index, ordered.masked_fill(excluded, -torch.inf))


def signed_seed(seed: int) -> int:
    """A seed, which may be any integer, modulo 2**64 in the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63


def stream_keys(seed: Numbers, index: Numbers, place: Numbers) -> Numbers:
    """Keys of `method.splitmix` for tokens.

    Args:
        seed: int64 tensor or array, of the sequences.
        index: The same, their numbers among the continuations of a request.
        place: The same, the numbers of the generated tokens.

    Returns:
        The same, of the shape that the arguments broadcast to.
    """
    return mix(mix(mix(seed * GOLDEN + 1) + index * GOLDEN) + place * GOLDEN)


def _logprobs(logits: Tensor, tokens: Tensor, rows: list[SamplingRow]) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that request them, by row."""
    wanted = {i: row.params.logprobs for i, row in enumerate(rows)}
    tops = {i: top for i, top in wanted.items() if top is not None}
    if not tops:
        return {}
    places = list(tops)
    found = token_scores(logits[places], tokens[places], max(tops.values()))
    entries = HostScores.of(found.cpu()).entries(list(tops.values()))
    return dict(zip(places, entries, strict=True))
