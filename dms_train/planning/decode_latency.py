"""Latency of a decoding step and the share of the KV cache in it (DMS paper, appendix G).

The model counts the large matrix-vector products: two operations for each multiplication and
addition, and 2 bytes for each parameter. Computation and memory traffic overlap ideally. Two terms
of the paper are misprints. Equation 3 has 4 d d_ff for the traffic of a layer's keys and values;
its own check (7.5 billion parameters read) needs 4 d d_kv. Equation 4 has 1.45e9 B in place of
1.50e10 B.
"""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.hf.architecture import Architecture
from dms_train.planning.gpus import Gpu

_STATE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One step of a batch: every sequence generates a token.

    Attributes:
        flops: Floating-point operations.
        reads: Bytes read from memory.
        kv_reads: Bytes of keys and values among them.
        seconds: Expected duration.
        memory_bound: True if memory traffic takes longer than computation.
        kv_share: Time to read keys and values over the duration.
    """

    flops: float
    reads: float
    kv_reads: float
    seconds: float
    memory_bound: bool
    kv_share: float


def decode_step(
    architecture: Architecture, gpu: Gpu, *, batch: int, length: int, cr: float = 1.0
) -> DecodeStep:
    """Return the cost of appending a token to `batch` sequences of `length` tokens.

    Args:
        architecture: Architecture of the model.
        gpu: Peak operations and memory bandwidth.
        batch: Sequences.
        length: Tokens of each.
        cr: Compression ratio: tokens over tokens held, in the layers without a window. Linear
            attention counts as other projections, with states that are read and written.
    """
    a = architecture
    d, d_kv = a.hidden_size, a.num_query_groups * a.kv_channels
    computed, read = _mlp_widths(a, batch)
    # three products of the MLP, queries and output, keys and values; a multiplication is 2
    attention = 4 * d * d + 4 * d * d_kv
    layer = 6 * d * computed + attention
    windows = [a.attention_layers[number].window for number in a.cache_layers]
    held = sum(length / cr if window is None else min(window, length) for window in windows)
    vocabulary = 2 * d * a.vocab_size
    flops = batch * (a.num_layers * layer + 4 * d * held + vocabulary)
    kv_reads = 4 * batch * held * d_kv
    states = 0 if a.linear is None else a.linear.values * a.linear.key_channels
    states *= a.num_layers - len(a.cache_layers)
    reads = a.num_layers * (6 * d * read + attention) + kv_reads + vocabulary
    reads += 2 * _STATE_BYTES * batch * states
    compute, memory = flops / (gpu.tflops * 1e12), reads / (gpu.memory_tbs * 1e12)
    seconds = max(compute, memory)
    return DecodeStep(
        flops=flops,
        reads=reads,
        kv_reads=kv_reads,
        seconds=seconds,
        memory_bound=memory >= compute,
        kv_share=kv_reads / (gpu.memory_tbs * 1e12) / seconds,
    )


def _mlp_widths(a: Architecture, batch: int) -> tuple[float, float]:
    """Return the width of the MLPs that a token passes through, and of those that a step reads.

    Experts are read if any of the sequences chooses them, here all with the same probability.
    """
    experts = a.experts
    if experts is None:
        return a.ffn_hidden_size, a.ffn_hidden_size
    chosen = experts.count * (1 - (1 - experts.topk / experts.count) ** batch)
    return experts.topk * experts.ffn_hidden_size, chosen * experts.ffn_hidden_size
