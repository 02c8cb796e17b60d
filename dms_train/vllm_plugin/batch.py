"""Attention of a batch through the paged cache, without vLLM.

A decode step may be captured as a CUDA graph. Everything that a replay reads has a fixed address:
`StepInputs`, the cache, and the positions, which vLLM keeps in one buffer. The host reads nothing
back, neither in a decode step nor in a part of a prompt. `mixed_steps` captures steps with parts.

Shape letters: t tokens of a batch, b its requests, p parts of prompts, n tokens of a part, h query
heads, g KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cache_result
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.interface import AttentionStep
from dms_train.kernels.decode.types import Step
from dms_train.vllm_plugin.cache import GrantedCache

_MOST_COMPILED = 2048  # most requests of a decode step that is compiled before the first request


class Rotations(NamedTuple):
    """RoPE of the tokens of parts, as `AttentionStep` takes it.

    Attributes:
        cos: [p, n, 1, 1, d], both halves alike.
        sin: Likewise.
        table: `interface.rotation_table` of both.
    """

    cos: Tensor
    sin: Tensor
    table: Tensor


class StepInputs:
    """Cache rows, RoPE and pages of a step, in memory that never moves.

    Args:
        tables: RoPE of each layer by position, [positions, d]: cosines, then sines. Layers with the
            same RoPE share one tensor.
        requests: Most requests of a batch.

    Attributes:
        rows: int64 [requests], cache rows of the requests; -1 after the last one.
        pages: int32 [requests], pages that the requests hold after the step; -1 after a fault.
        angles: [k, requests, 2, d], cosines and sines of requests with one token, both halves
            alike, for each of the k different tables.
        table_of: Index of the table of each layer.
    """

    def __init__(self, tables: list[Tensor], *, requests: int) -> None:
        different = {id(table): table for table in tables}
        numbers = {name: number for number, name in enumerate(different)}
        self.table_of = [numbers[id(table)] for table in tables]
        self._tables = [table.unflatten(1, (2, -1)) for table in different.values()]
        first = tables[0]
        self.rows = torch.full((requests,), -1, dtype=torch.int64, device=first.device)
        self.pages = torch.zeros_like(self.rows, dtype=torch.int32)
        self.angles = first.new_empty(len(different), requests, 2, first.shape[1])

    def set_rows(self, rows: Tensor) -> None:
        """Set the rows of the requests of a step, integers [b]; the host does not wait."""
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = -1

    def rotations(self, position: Tensor) -> list[Rotations]:
        """Return RoPE at positions, integers [p, n] of at least 0, for each table."""
        result = []
        for table in self._tables:
            halves = table[position]
            cos, sin = torch.cat([halves, halves], -1)[:, :, :, None, None].unbind(2)
            flat = halves.float().view(-1, 1, *halves.shape[2:])
            result.append(Rotations(cos, sin, flat))
        return result

    def set_angles(self, position: Tensor) -> None:
        """Compute the angles of requests with one token at positions, integers [b]."""
        for table, angles in zip(self._tables, self.angles, strict=True):
            halves = table[position]
            torch.cat([halves, halves], -1, out=angles[: len(position)])

    def report_pages(self, cache: GrantedCache, requests: int) -> None:
        """Set the pages of the first requests, padding included; the host does not wait."""
        self.pages[:requests] = cache.held_pages(self.rows[:requests])


class Heads(NamedTuple):
    """Tokens of a layer without RoPE.

    Attributes:
        query: [..., h, d].
        key: [..., g, d].
        value: [..., g, d].
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def at(self, index: Any) -> Heads:
        """Select tokens."""
        return Heads(*(x[index] for x in self))


class SingleTokens(NamedTuple):
    """One token of each of some requests.

    Attributes:
        position: Integers [b].
        rows: Cache rows, int64 [b]; -1 for padding.
    """

    position: Tensor
    rows: Tensor


class PromptParts(NamedTuple):
    """Several tokens of each of some requests.

    Attributes:
        position: int64 [p, n]; -1 for padding.
        rows: Cache rows, int64 [p].
        begins: Whether the cache is known to hold nothing of the requests.
        rotations: Returns `StepInputs.rotations` of the tokens, which it computes once.
    """

    position: Tensor
    rows: Tensor
    begins: bool
    rotations: Callable[[], list[Rotations]]


def attend_singles(
    cache: GrantedCache,
    inputs: StepInputs,
    layer: int,
    heads: Heads,
    singles: SingleTokens,
    output: Tensor,
) -> None:
    """Store one token of each request in a layer, and write their attention.

    Args:
        cache: The cache.
        inputs: Inputs of the step; the angles are set.
        layer: Layer number; layers are visited in order.
        heads: Tokens [b, ...].
        singles: The requests.
        output: [b, h, d]; written, and 0 for padding.
    """
    angles = inputs.angles[inputs.table_of[layer], : len(singles.rows)]
    step = Step(*heads, angles[:, 0], angles[:, 1], *singles)
    cache.attend(layer, step, output)


def attend_parts(
    cache: GrantedCache, inputs: StepInputs, layer: int, heads: Heads, parts: PromptParts
) -> Tensor:
    """Store the tokens of parts in a layer, and return their attention.

    Args:
        cache: The cache.
        inputs: Inputs of the step.
        layer: Layer number; layers are visited in order.
        heads: Tokens [p, n, ...].
        parts: The parts.

    Returns:
        [p, n, h, d]; unspecified but finite for padding.
    """
    query, key, value = heads
    step = AttentionStep(
        query=query.unflatten(2, (key.shape[2], -1)),
        key=key.unsqueeze(3),
        value=value.unsqueeze(3),
        position=parts.position,
        rows=parts.rows,
        spec=cache.specs[layer],
        begins=parts.begins,
        sinks=cache.sinks[layer],
        lengths=(query.shape[1],) * len(query),
        **parts.rotations()[inputs.table_of[layer]]._asdict(),
    )
    return cache.step(layer, step).output.transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttention:
    """Attention of the tokens of a batch; vLLM passes it to every layer as metadata.

    Attributes:
        cache: The cache.
        inputs: Rows of the requests. The first layer writes the angles, the last one the pages.
        position: int64 [t]; for a captured step, in vLLM's buffer.
        starts: Integers [b + 1]: first token of each request, and the number of tokens.
        singles: Number of requests with one token, padding included; they come first.
        parts: All other requests: their tokens, and each as `PromptParts` of one.
    """

    cache: GrantedCache
    inputs: StepInputs
    position: Tensor
    starts: Tensor
    singles: int
    parts: list[tuple[slice, PromptParts]]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the tokens of a layer and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            query: [any, h, d]; entries after the tokens of the batch are padding.
            key: [any, g, d].
            value: [any, g, d].
            output: [any, h, d]; written, and 0 for padding.
        """
        heads, first = Heads(query, key, value), slice(self.singles)
        shared = self.cache, self.inputs, layer
        singles = SingleTokens(self.position[first], self.inputs.rows[first])
        if layer == 0:  # a replay computes the angles anew from its positions
            self.inputs.set_angles(singles.position)
        output[len(self.position) :] = 0
        if self.singles:  # vLLM may be capturing it
            attend_singles(*shared, heads.at(first), singles, output[first])
        for tokens, part in self.parts:
            (output[tokens],) = attend_parts(*shared, heads.at(tokens).at(None), part)
        if layer == len(self.inputs.table_of) - 1:  # a replay counts them without the host
            self.inputs.report_pages(self.cache, self.singles + len(self.parts))


def batch_attention(cache: GrantedCache, inputs: StepInputs, input_batch: Any) -> BatchAttention:
    """Describe a batch of vLLM for all layers.

    Args:
        cache: The cache.
        inputs: Inputs of the step; the rows are set.
        input_batch: vLLM's batch; requests with one token come first.
    """
    position = input_batch.positions[: input_batch.num_tokens]
    counts = input_batch.num_scheduled_tokens.tolist()
    starts = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    singles = counts.count(1)
    assert all(n == 1 for n in counts[:singles]), "vLLM no longer sorts single tokens first"
    parts = []
    for index in range(singles, len(counts)):
        tokens = slice(*starts[index : index + 2])
        own, rows = position[None, tokens], inputs.rows[index, None]
        rotations = cache_result(partial(inputs.rotations, own))  # not needed for a replay
        parts.append((tokens, PromptParts(own, rows, computed[index] == 0, rotations)))
    return BatchAttention(cache, inputs, position, input_batch.query_start_loc, singles, parts)


def compile_steps(
    cache: GrantedCache, inputs: StepInputs, *, heads: int, dtype: torch.dtype
) -> None:
    """Run decode steps that store nothing, so that none is compiled while requests wait.

    Kernels are compiled apart between powers of two, and there for numbers of KV lists that 16
    divides and for others.

    Args:
        cache: The cache.
        inputs: Inputs of the steps; no row is set afterwards.
        heads: Query heads.
        dtype: Dtype of the tokens.
    """
    inputs.set_rows(inputs.rows[:0])
    layers, _, groups = cache.lists_shape
    for requests in _sizes_of_steps(min(len(inputs.rows), _MOST_COMPILED)):
        shape = requests, heads + 2 * groups, inputs.angles.shape[-1]
        tokens = torch.zeros(shape, dtype=dtype, device=cache.device)
        query, key, value = (x.contiguous() for x in tokens.split((heads, groups, groups), 1))
        position = inputs.rows.new_zeros(requests)
        batch = BatchAttention(cache, inputs, position, position, requests, [])
        for layer in range(layers):
            batch.attend(layer, query, key, value, torch.empty_like(query))


def _sizes_of_steps(most: int) -> list[int]:
    """Return the powers of two up to the next one of `most`, and the numbers before them."""
    powers = [2**k for k in range((most - 1).bit_length() + 1)]
    return sorted({min(n, most) for power in powers for n in (power - 1, power)} - {0})
