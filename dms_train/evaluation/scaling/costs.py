"""Costs of chains: KV reads and peak tokens, of one chain and of several at the same time.

Decoding only: G generated tokens take G - 1 forward passes, because the prompt gives the first
token. Reads of the prompt are counted apart. All numbers are means over layers and KV heads, so
that a model without compression reads t + 1 tokens at position t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dms_train.inference.accounting import KVTrace


def reads_within(trace: KVTrace, tokens: int) -> float:
    """Return the KV reads of a chain, cut off after `tokens` generated tokens."""
    kept = trace.kv_reads[:tokens]
    return kept[-1].item() if len(kept) else 0.0


def peak_within(trace: KVTrace, tokens: int) -> float:
    """Return the peak tokens of a chain, cut off in the same way; 0 for a chain without tokens."""
    kept = trace.live_tokens[:tokens]
    return kept.max().item() if len(kept) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Largest number of tokens in memory.

    Attributes:
        separate: Every chain holds its own prompt.
        shared: Chains hold the tokens of the prompt together.
    """

    separate: float
    shared: float


def joint_peaks(
    traces: Sequence[KVTrace], limits: Sequence[int], window: int | None
) -> list[list[Peak]]:
    """Return the joint peak tokens of the first chains of a document, for every number of chains.

    The chains decode in step from one prompt, and a chain frees its cache when it ends. During the
    first `window` + 1 steps no generated token leaves the window: a chain holds its prompt and all
    its tokens. Afterwards the part of the prompt that it holds does not change.

    Args:
        traces: Traces of the chains.
        limits: Generated tokens after which chains are cut off.
        window: Newest tokens that are never evicted. None if prompt tokens can be evicted at any
            time; the chains' shares of the prompt are then unknown, and each counts on its own.

    Returns:
        [chains][limits]: entry i is about the first i + 1 chains.
    """
    steps = max(1, *(len(trace.live_tokens) for trace in traces))
    held = torch.zeros(len(traces), steps, dtype=torch.float64)
    prompt = torch.zeros(len(traces), steps, dtype=torch.float64)
    settled = torch.arange(steps).clamp(max=(window or 0) + 1)
    for chain, trace in enumerate(traces):
        live = trace.live_tokens
        held[chain, : len(live)] = live
        if window is not None:
            prompt[chain, : len(live)] = live[settled[: len(live)]] - settled[: len(live)]
    alive = (held > 0).cumsum(0)
    separate = held.cumsum(0)
    shared = separate - (alive - 1).clamp(min=0) * prompt.cummax(0).values
    return [
        [
            Peak(
                separate=separate[chain, :limit].max().item(),
                shared=shared[chain, :limit].max().item(),
            )
            for limit in limits
        ]
        for chain in range(len(traces))
    ]
