"""One decoder for every model family, dense or trained with DMS."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dms_train.hf.architecture import Architecture
from dms_train.hf.embeddings import embedding_scale
from dms_train.hf.rope import Rope
from dms_train.inference.cache.interface import KVCache, rotation_table
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.blocks import (
    MLP,
    Angles,
    Attention,
    AttentionInputs,
    NoNorm,
    RMSNorm,
    rotary_tables,
)
from dms_train.inference.models.experts import MixtureOfExperts
from dms_train.inference.models.linear_attention import LinearAttention
from dms_train.method.base import MethodSpec


def _input_norm(a: Architecture) -> RMSNorm | NoNorm:
    return RMSNorm(a.hidden_size, a.layernorm_epsilon) if a.described.input_norms else NoNorm()


class DecoderLayer(nn.Module):
    """Attention and MLP, or mixture of experts, around a residual stream.

    A layer with linear attention has `linear_attn` in place of `self_attn`.
    """

    def __init__(
        self, a: Architecture, spec: MethodSpec | None, layer: int, decision_projection: bool
    ) -> None:
        super().__init__()
        if a.attention_layers[layer].linear:
            self.linear_attn = LinearAttention(a, layer)
        else:
            self.self_attn = Attention(a, spec, layer, decision_projection)
        self.mlp: MLP | MixtureOfExperts
        self.mlp = MLP(a) if a.experts is None else MixtureOfExperts(a)
        self.input_layernorm = _input_norm(a)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.layernorm_epsilon)

    def forward(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs, following: RMSNorm | NoNorm
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the layer.

        Args:
            x: Residual stream after the layer's first norm, [t, c].
            residual: Residual stream before that norm.
            inputs: Shared by the layers.
            following: Norm after the layer.

        Returns:
            Residual stream after and before `following`, and slots read [sequences, kv_heads], None
            with linear attention.
        """
        update, reads = self._attend(x, residual, inputs)
        residual, x = self.post_attention_layernorm.added(residual, update)
        residual, x = following.added(residual, self.mlp(x))
        return x, residual, reads

    def _attend(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Return the update of the residual stream [t, c], and slots read."""
        if self.attends:
            update, reads = self.self_attn(x, residual, inputs)
            return update, reads
        return self.linear_attn(x, inputs), None

    @property
    def attends(self) -> bool:
        """True if the layer has keys and values."""
        return "self_attn" in self._modules


class SandwichLayer(DecoderLayer):
    """Layer that normalises the updates of attention and MLP before it adds them."""

    def __init__(
        self, a: Architecture, spec: MethodSpec | None, layer: int, decision_projection: bool
    ) -> None:
        super().__init__(a, spec, layer, decision_projection)
        self.pre_feedforward_layernorm = _input_norm(a)
        self.post_feedforward_layernorm = RMSNorm(a.hidden_size, a.layernorm_epsilon)

    def forward(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs, following: RMSNorm | NoNorm
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the layer; arguments and results are those of `DecoderLayer`."""
        update, reads = self._attend(x, residual, inputs)
        update = self.post_attention_layernorm(update)
        residual, x = self.pre_feedforward_layernorm.added(residual, update)
        update = self.post_feedforward_layernorm(self.mlp(x))
        residual, x = following.added(residual, update)
        return x, residual, reads


class Decoder(nn.Module):
    """Decoder that computes hidden states from token ids, through a cache.

    Args:
        architecture: The model.
        spec: Method it was trained with; None for a dense model.
        decision_projection: Whether decisions come from a projection of their own.
    """

    def __init__(
        self,
        architecture: Architecture,
        spec: MethodSpec | None,
        *,
        decision_projection: bool = False,
    ) -> None:
        super().__init__()
        a = self.architecture = architecture
        # without initial values: on the meta device torch would import Dynamo to draw them
        embeddings = torch.empty(a.vocab_size, a.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=False)
        kind = SandwichLayer if a.described.sandwich_norms else DecoderLayer
        layers = (kind(a, spec, number, decision_projection) for number in range(a.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(a.hidden_size, a.layernorm_epsilon)
        self.lm_head = nn.Linear(a.hidden_size, a.vocab_size, bias=False)

    def forward(self, batch: TokenBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run tokens that follow the tokens in the cache.

        Args:
            batch: t tokens.
            cache: Keys and values of earlier tokens; updated.

        Returns:
            Hidden states [t, c] and slots read, int64 [layers of the cache, sequences, kv_heads].
        """
        residual = self.embed_tokens(batch.tokens)
        if self.architecture.described.scaled_embeddings:
            residual = residual * embedding_scale(self.architecture, residual.dtype)
        ropes = {layer.self_attn.rope for layer in self.decoder_layers if layer.attends}
        angles = {rope: self._angles(batch, residual.dtype, rope) for rope in ropes}
        inputs = AttentionInputs(cache, batch.micro_batches, angles)
        norms = [layer.input_layernorm for layer in self.decoder_layers]
        x, reads = norms[0](residual), []
        for layer, following in zip(self.decoder_layers, [*norms[1:], self.norm], strict=True):
            x, residual, read = layer(x, residual, inputs, following)
            reads += [] if read is None else [read]
        return x, torch.stack(reads)

    def _angles(self, batch: TokenBatch, dtype: torch.dtype, rope: Rope) -> list[Angles]:
        """Return the rotation of each micro-batch."""
        cos, sin = rotary_tables(self.architecture, batch.position, dtype, rope)
        angles = []
        for micro_batch in batch.micro_batches:
            own = micro_batch.take(cos), micro_batch.take(sin)
            angles.append(Angles(*own, rotation_table(*own)))
        return angles

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Decoder layers."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Convert [..., c] to [..., vocab], at least float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
