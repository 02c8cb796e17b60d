"""Decode step in six kernels per layer, with the weights of a decoder.

The first kernel of a layer computes queries, keys and values. The second applies RoPE, decides
about evictions and stores the token. The third computes attention. Three more matrix products
follow. RMSNorm, SwiGLU and the residual additions are parts of the products. Triton is imported on
first use.

Shape letters: m tokens, one per sequence; h query heads; g KV heads; d head size; c hidden
size; f width of the MLP.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.hf.rope import Rope
from dms_train.inference.cache.interface import CapturableCache
from dms_train.inference.decode_inputs import DecodeInputs
from dms_train.inference.models.blocks import MLP, NoNorm, RMSNorm, rotary_tables
from dms_train.inference.models.decoder import Decoder, DecoderLayer, SandwichLayer
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import HeadNorms, Step
from dms_train.kernels.layers.types import EmbeddingTables, LinearWorkspace, NormedInput

_SEQUENCES = 64  # most sequences of a program
_SHARED_BYTES = 192 * 2**10  # shared memory of the largest program; an H100 has 227 KiB
_CACHED_BYTES = 16 * 2**20  # weights that stay in the L2 cache of an H100 or H200


def can_fuse(decoder: Decoder, sequences: int) -> bool:
    """Return whether the kernels support a step of this many sequences, and are as fast as torch.

    They do not support decision projections, experts, sinks, linear attention, norms of updates,
    nor GPUs with too little shared memory. With more sequences than a program takes, products read
    their weights several times. These must then fit into the L2 cache.
    """
    device = decoder.embed_tokens.weight.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # torch has no such property on ROCm, and its type stubs omit it
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        if shared < _SHARED_BYTES:
            return False
    layers = decoder.decoder_layers
    if decoder.architecture.linear is not None:
        return False
    mlp = layers[0].mlp
    projected = any(layer.self_attn.decision_projection for layer in layers)
    sinks = decoder.architecture.described.sinks
    if projected or sinks or not isinstance(mlp, MLP) or isinstance(layers[0], SandwichLayer):
        return False
    weights = [decoder.lm_head.weight, mlp.gate_up_proj.weight]
    return sequences <= _SEQUENCES or max(weight.nbytes for weight in weights) <= _CACHED_BYTES


class _Buffers(NamedTuple):
    """Buffers of a step of m sequences.

    Attributes:
        residual: [m, c], the residual stream.
        normed: Residual stream before the division of the next RMSNorm.
        qkv: [m, (h + 2 g) * d].
        inner: [m, f].
        logits: [m, vocab].
        cos: [m, d].
        sin: [m, d].
        ones: [m, d], cosines of layers without RoPE.
        zeros: [m, d], sines of these layers.
        work: Scratch memory of the products.
    """

    residual: Tensor
    normed: NormedInput
    qkv: Tensor
    inner: Tensor
    logits: Tensor
    cos: Tensor
    sin: Tensor
    ones: Tensor
    zeros: Tensor
    work: LinearWorkspace


def _weight(norm: RMSNorm | NoNorm) -> Tensor:
    assert isinstance(norm, RMSNorm)  # `can_fuse` refuses other layers
    return norm.weight


class FusedDecoder:
    """Decode steps of a decoder.

    Args:
        decoder: A decoder that `can_fuse`, on a device where Triton runs.
        cache: Its cache.
        longest: Most tokens of a sequence.
    """

    def __init__(self, decoder: Decoder, cache: CapturableCache, longest: int) -> None:
        embedding = decoder.embed_tokens.weight
        self._decoder, self._cache = decoder, cache
        self._kernels = dispatch.triton_kernels()
        position = torch.arange(longest, device=embedding.device)
        a = decoder.architecture
        angles = rotary_tables(a, position, embedding.dtype, Rope(a.rotary_base, a.rope_scaling))
        self._cos, self._sin = (table.view(longest, -1) for table in angles)
        self._layers = decoder.decoder_layers
        self._buffers: dict[int, _Buffers] = {}

    def logits(self, inputs: DecodeInputs, last: Tensor) -> Tensor:
        """Run one token of every sequence.

        Args:
            inputs: Inputs of the step.
            last: int64 [cache rows], newest token of each row.

        Returns:
            [m, vocab], overwritten by the next step of the same number of sequences.
        """
        decoder, kernels = self._decoder, self._kernels
        m = len(inputs.tokens)
        if m not in self._buffers:
            self._buffers[m] = self._allocate(m)
        memory = self._buffers[m]
        layers = self._layers
        first, *following = (_weight(layer.input_layernorm) for layer in layers)
        following.append(decoder.norm.weight)
        kernels.embed(
            inputs.tokens,
            inputs.position,
            inputs.rows,
            EmbeddingTables(decoder.embed_tokens.weight, self._cos, self._sin, last),
            norm=first,
            residual=memory.residual,
            after=memory.normed,
            cos=memory.cos,
            sin=memory.sin,
        )
        for layer, norm in zip(layers, following, strict=True):
            self._attention(layer, inputs, memory)
            self._mlp(layer, norm, memory)
        weight = decoder.lm_head.weight
        return kernels.linear(memory.normed, weight, memory.work, out=memory.logits)

    def _attention(self, layer: DecoderLayer, inputs: DecodeInputs, memory: _Buffers) -> None:
        """Add the attention's update to the residual stream."""
        block, m = layer.self_attn, len(inputs.tokens)
        product, work = block.qkv_proj, memory.work
        self._kernels.linear(memory.normed, product.weight, work, bias=product.bias, out=memory.qkv)
        heads = memory.qkv.view(m, -1, block.size)
        query, key, value = heads.split(
            (heads.shape[1] - 2 * block.groups, block.groups, block.groups), 1
        )
        turns = block.rope.base is not None
        cos, sin = (memory.cos, memory.sin) if turns else (memory.ones, memory.zeros)
        token = Step(query, key, value, cos, sin, inputs.position, inputs.rows, signal=None)
        norms = None
        if isinstance(block.q_norm, RMSNorm) and isinstance(block.k_norm, RMSNorm):
            norms = HeadNorms(block.q_norm.weight, block.k_norm.weight, block.q_norm.epsilon)
        attended = self._cache.decode(block.layer, token, block.spec, norms)
        self._kernels.add_linear(
            attended.view(m, -1),
            block.o_proj.weight,
            work,
            residual=memory.residual,
            norm=layer.post_attention_layernorm.weight,
            after=memory.normed,
        )

    def _mlp(self, layer: DecoderLayer, norm: Tensor, memory: _Buffers) -> None:
        """Add the MLP's update to the residual stream; `norm` is the next weight of a norm."""
        kernels, work, mlp = self._kernels, memory.work, layer.mlp
        assert isinstance(mlp, MLP)
        kernels.swiglu_linear(memory.normed, mlp.gate_up_proj.weight, work, out=memory.inner)
        kernels.add_linear(
            memory.inner,
            mlp.down_proj.weight,
            work,
            residual=memory.residual,
            norm=norm,
            after=memory.normed,
        )

    def _allocate(self, m: int) -> _Buffers:
        a, weight = self._decoder.architecture, self._decoder.embed_tokens.weight
        residual = weight.new_empty(m, a.hidden_size)
        qkv = weight.new_empty(m, len(self._layers[0].self_attn.qkv_proj.weight))
        cos, sin = weight.new_empty(2, m, a.kv_channels)
        return _Buffers(
            residual=residual,
            normed=self._kernels.normed_input(residual, a.layernorm_epsilon),
            qkv=qkv,
            inner=weight.new_empty(m, a.ffn_hidden_size),
            logits=weight.new_empty(m, a.vocab_size),
            cos=cos,
            sin=sin,
            ones=torch.ones_like(cos),
            zeros=torch.zeros_like(sin),
            work=self._kernels.linear_workspace(m, weight.device),
        )
