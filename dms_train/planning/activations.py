"""Bytes of one microbatch on a rank: kept for the backward pass, and temporary.

Counted from the modules of `mcore` one saved tensor at a time; the tests compare the counts with
the tensors that a real step holds. Letters: t tokens of a microbatch, b its samples, h hidden size,
f MLP size, q and k channels of all query and KV heads, p bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.hf.architecture import Architecture
from dms_train.kernels.options import DELTA_CHUNK, ROW_TILE
from dms_train.mcore.options import (
    ALL_WEIGHTS,
    LOGITS_CHUNK,
    VOCABULARY_MULTIPLE,
    ParallelOptions,
    Trainable,
)
from dms_train.method.base import LayerSizes, MethodOptions
from dms_train.planning import fp8
from dms_train.planning.trained import adapters

_FP32 = 4
_INT64 = 8
# Hidden states in the order of experts that exist at once: inputs and outputs of the experts, one
# by one and joined, and their gradients.
_ROUTED_FORWARD = 3
_ROUTED_BACKWARD = 6
# Backends that keep float32 copies of q, k and v instead of statistics of tiles.
_WIDE_KERNELS = ("blockwise", "reference")


def padded_vocab(architecture: Architecture) -> int:
    """Return the number of rows of the embedding after padding for tensor parallelism."""
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch in a layout, as each rank sees it.

    Attributes:
        method: Retrofit method.
        distills: True if the frozen teacher runs beside the student.
        kernels: Backend of the attention.
        fused: True if the fused layers run besides the attention kernel, as on every GPU.
        trainable: Weights of the student that train.
        shares: True if the teacher shares the frozen weights of the student.
        offloads: True if the layers of the teacher stay in host memory between passes.
    """

    architecture: Architecture
    method: MethodOptions
    parallel: ParallelOptions
    samples: int
    length: int
    distills: bool
    kernels: str = "triton"
    fused: bool = True
    trainable: Trainable = ALL_WEIGHTS
    shares: bool = False
    offloads: bool = False

    @property
    def trains_all(self) -> bool:
        """True if no weight is frozen."""
        return self.trainable.weights == "all"

    @property
    def width(self) -> int:
        """Bytes of a number in the precision of the weights."""
        return 2 if self.parallel.params_dtype == "bf16" else _FP32

    @property
    def tokens(self) -> int:
        """Tokens of a context-parallel rank, all of them on every tensor-parallel rank."""
        return self.samples * self.length // self.cp

    @property
    def attended_tokens(self) -> int:
        """Tokens in attention, all of them on every rank."""
        return self.samples * self.length

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.parallel.context_parallel_size

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

    @property
    def ep(self) -> int:
        """Number of ranks with the same weights that share experts."""
        return self.parallel.expert_model_parallel_size

    @property
    def own_tokens(self) -> int:
        """Tokens whose residual stream lies on this rank."""
        return self.tokens // (self.tp if self.parallel.sequence_parallel else 1)

    @property
    def residual(self) -> int:
        """Bytes of the residual stream on this rank: t h p."""
        return self.own_tokens * self.architecture.hidden_size * self.width

    @property
    def gathered(self) -> int:
        """Bytes of the residual stream of all tokens."""
        return self.tokens * self.architecture.hidden_size * self.width

    @property
    def mlp_half(self) -> int:
        """Bytes of one half of the gated projection on this rank: t f p / tp."""
        a = self.architecture
        experts = a.experts
        width = a.ffn_hidden_size
        if experts is not None:
            width = experts.shared_ffn_hidden_size
        return self.tokens * width // self.tp * self.width + self.routed_half

    @property
    def routed_half(self) -> int:
        """Bytes of the part of `mlp_half` that routed experts compute."""
        experts = self.architecture.experts
        width = 0 if experts is None else experts.topk * experts.ffn_hidden_size
        return self.tokens * width // self.tp * self.width

    @property
    def routed(self) -> int:
        """Bytes of a hidden state of every token for each of its experts: t k h p."""
        experts = self.architecture.experts
        return 0 if experts is None else experts.topk * self.gathered

    @property
    def query(self) -> int:
        """Bytes of the queries on this rank: t q p / tp."""
        a = self.architecture
        return self.tokens * a.num_attention_heads * a.kv_channels // self.tp * self.width

    @property
    def key(self) -> int:
        """Bytes of the keys, and of the values, on this rank: t k p / tp."""
        a = self.architecture
        return self.tokens * a.num_query_groups * a.kv_channels // self.tp * self.width

    @property
    def stage_tensor(self) -> int:
        """Bytes of a stage tensor: both models and the row of eviction statistics."""
        row = self.samples * self.architecture.hidden_size * self.width
        return (2 if self.distills else 1) * self.residual + row

    @property
    def logits(self) -> int:
        """Bytes of one model's logits on this rank, in the precision of the weights."""
        return self.tokens * padded_vocab(self.architecture) // self.tp * self.width


def norm_statistics(m: Microbatch) -> int:
    """Return the bytes of one float32 number per token and norm."""
    return m.own_tokens * _FP32


def _centered(m: Microbatch, channels: int, numbers: int) -> int:
    """Return the bytes that norms of factors 1 + weight keep more than others.

    Args:
        m: The microbatch.
        channels: Channels that a norm normalises.
        numbers: Numbers that it keeps in float32, except with fused kernels.
    """
    if not m.architecture.described.centered_norms:
        return 0
    return channels * _FP32 + (0 if m.fused else numbers * (_FP32 - m.width))


def _outer_norms(m: Microbatch) -> int:
    """Return the bytes that the norms before attention and MLP keep."""
    # inputs of both, and outputs where a weight that trains reads them
    norms = 3 * m.residual + m.trains_all * _multiplied(m, m.residual) + 2 * norm_statistics(m)
    return norms + 2 * _centered(m, m.architecture.hidden_size, m.residual // m.width)


def _heads(m: Microbatch) -> tuple[int, int]:
    """Return the numbers of query and KV heads on a rank, in attention."""
    a, ranks = m.architecture, m.tp * m.cp
    return a.num_attention_heads // ranks, a.num_query_groups // ranks


def attention_kernel(m: Microbatch) -> int:
    """Return the bytes that attention keeps besides q, k, v: output, a sum per row, bias."""
    heads, groups = _heads(m)
    if m.kernels in _WIDE_KERNELS:
        wide = (m.query + 2 * m.key) // m.width * _FP32
        return m.query + wide + m.attended_tokens * groups * _FP32
    padded = m.samples * -(-m.length // ROW_TILE) * ROW_TILE
    return m.query + (padded * heads + m.attended_tokens * groups) * _FP32


def _projected(m: Microbatch, recompute: str | None) -> int:
    """Return the bytes of queries, keys and values between the projection and the attention."""
    heads, groups = _heads(m)
    statistics = 0
    mixed = rotated = m.query + 2 * m.key
    mixed += m.query * m.architecture.described.output_gate
    if m.architecture.qk_layernorm:
        # q is copied out of the projection before its norm (plain operations: where there are
        # several KV heads); k is too for the kernel, and a view for plain operations
        statistics = m.query * (m.fused or groups > 1) + m.key * m.fused
        if m.architecture.described.centered_norms and not m.fused and m.width < _FP32:
            statistics = (m.query + m.key) // m.width * _FP32
        statistics += _centered(m, 2 * m.architecture.kv_channels, 0)
        norms = 2 if m.architecture.described.joint_qk_norm else heads + groups
        statistics += m.attended_tokens * norms * _FP32
    elif m.fused or m.method.replaces_values:
        mixed = 0  # split and rotated in one kernel, or not saved for the backward pass
    if (m.architecture.qk_layernorm or not m.fused) and not m.method.replaces_values:
        rotated -= m.key  # the values are a view of the projection
    if m.kernels in _WIDE_KERNELS and not (
        recompute == "selective" and m.parallel.recomputes("core_attn")
    ):
        mixed = rotated = 0  # copied, not kept
    return statistics + mixed + rotated


def mlp_kept(m: Microbatch) -> int:
    """Return the bytes that an MLP, or a mixture of experts, keeps besides its input."""
    # their product is kept for the gradient of the weights alone
    product = m.trains_all * _multiplied(m, m.mlp_half)
    copies = _copied(m, fp8.mlp_weights(m.architecture))
    return _halves(m) * m.mlp_half + product + _routing(m) + copies


def _multiplied(m: Microbatch, size: int) -> int:
    """Return the bytes of a tensor that is kept as the input of an MLP's or output's product.

    Args:
        m: The microbatch.
        size: Bytes in the precision of the weights, of which FP8 has half.
    """
    return size // 2 if m.parallel.fp8 else size


def _copied(m: Microbatch, weights: int) -> int:
    """Return the bytes of the FP8 copies of weights that a rank keeps for its backward pass."""
    return weights // m.tp * fp8.WEIGHT_BYTES if m.parallel.fp8 else 0


def _halves(m: Microbatch) -> int:
    """Count the halves of an MLP before their product.

    Both are one tensor; megatron-core's operations keep silu and the other half.
    """
    return 2 if m.fused or m.architecture.described.clamped_gate else 4


def layer(m: Microbatch, recompute: str | None) -> int:
    """Return the bytes that a layer keeps from its forward to its backward pass.

    Args:
        m: The microbatch.
        recompute: None or `selective`; `chunk` handles `full`.
    """
    heads, groups = _heads(m)
    family = m.architecture.described
    norms = _outer_norms(m)
    if family.sandwich_norms and family.input_norms:
        norms += 2 * (m.residual + norm_statistics(m))
    # sine and cosine, for q and for k; the fused kernel has one table for all layers
    tables = 0 if m.fused else 4 * m.length * m.architecture.kv_channels * m.width
    sizes = LayerSizes(
        samples=m.samples,
        length=m.length,
        groups=groups,
        queries=heads // groups,
        head=m.architecture.kv_channels,
        width=m.width,
        fused=m.fused,
    )
    decisions = m.method.kept_bytes(sizes)
    attention = attention_kernel(m) + _exchanged(m) + _gated(m) + _cast_output(m)
    if recompute == "selective" and m.parallel.recomputes("core_attn"):
        # the output, and log(1 - alpha) by key
        attention = m.query + m.attended_tokens * groups * _FP32 + _gated(m) + _cast_output(m)
    mlp = mlp_kept(m)
    if recompute == "selective" and m.parallel.recomputes("mlp"):
        mlp = 0 if m.trains_all else m.residual  # its input, which `norms` counts if all train
    attention += _copied(m, fp8.output_weights(m.architecture))
    projected = _projected(m, recompute) + _adapted(m)
    return norms + projected + tables + decisions + attention + mlp


def _trains_output(m: Microbatch) -> bool:
    """Return whether the input of the output projection is kept."""
    return m.trains_all or m.trainable.weights == "attention" or "o" in m.trainable.targets


def _exchanged(m: Microbatch) -> int:
    """Return the bytes of the output of attention as context-parallel ranks have exchanged it."""
    return _multiplied(m, m.query) * (m.cp > 1 and _trains_output(m))


def _cast_output(m: Microbatch) -> int:
    """Return the bytes of the output of attention in FP8, beside what the kernel keeps of it."""
    is_plain = m.cp == 1 and not m.architecture.described.output_gate
    return _multiplied(m, m.query) * (m.parallel.fp8 and is_plain and _trains_output(m))


def _gated(m: Microbatch) -> int:
    """Return the bytes of the factors on the output of attention, and of their product."""
    is_kept = m.cp == 1 and _trains_output(m)  # otherwise it is exchanged
    kept = m.query + is_kept * _multiplied(m, m.query)
    return kept * m.architecture.described.output_gate


def _adapted(m: Microbatch) -> int:
    """Return the bytes that adapters keep: narrow products, and the joined narrow matrices."""
    a, rank, targets = m.architecture, m.trainable.lora.rank, m.trainable.targets
    count = adapters(a, m.trainable, m.method)
    own = count.channels // m.tp
    narrow = m.tokens * own + m.own_tokens * rank * ("o" in targets)
    if joined := [target for target in targets if target != "o"]:
        # one product for all of them and for the channels of all ranks
        narrow += m.tokens * (rank * len(joined) + count.channels)
        heads = a.num_attention_heads * (1 + a.described.output_gate) + 2 * a.num_query_groups
        narrow += heads * a.kv_channels // m.tp * rank * len(joined)
    return (count.inner * a.hidden_size + narrow) * m.width + own * _INT64


def _routing(m: Microbatch) -> int:
    """Return the bytes that a mixture of experts keeps besides what an MLP of its width keeps."""
    experts = m.architecture.experts
    if experts is None:
        return 0
    # the router's input in float32 takes the place of the norm's output
    router = m.own_tokens * m.architecture.hidden_size * (_FP32 - m.width)
    # probabilities of all experts, and two indices of each chosen one
    chosen = m.tokens * (_FP32 * experts.count + 2 * _INT64 * experts.topk)
    # probability and index of each chosen one before the tokens are gathered
    chosen += m.own_tokens * (_FP32 + _INT64) * experts.topk
    # every expert's share of its output bias
    hidden = m.architecture.hidden_size * m.width
    biases = experts.count // m.ep * hidden * m.architecture.described.linear_bias
    # the product of an expert is kept before and after it is scaled
    return m.trains_all * (router + m.routed) + chosen + biases + m.routed_half + _shared(m)


def _shared(m: Microbatch) -> int:
    """Return the bytes of the hidden states that an expert of all tokens keeps."""
    experts = m.architecture.experts
    if experts is None or not experts.shared_ffn_hidden_size:
        return 0
    # its output before the gate, and its input, which the router has in float32
    states = 1 + (m.trains_all and m.width < _FP32)
    gate = 1  # of each token
    return m.own_tokens * (states * m.architecture.hidden_size + gate) * m.width


def linear_layer(m: Microbatch, recompute: str | None) -> int:
    """Return what `layer` does for a layer with linear attention, which repeats its mixing."""
    linear = m.architecture.linear
    assert linear is not None
    norms = _outer_norms(m)
    rows = linear.key_heads * sum(linear.group_rows)
    projected = m.tokens * rows // m.tp * m.width
    mixed = _multiplied(m, m.tokens * linear.values // m.tp * m.width) * m.trains_all
    mixed += _copied(m, fp8.linear_output_weights(m.architecture))
    mlp = mlp_kept(m)
    if recompute == "selective" and m.parallel.recomputes("mlp"):
        mlp = 0 if m.trains_all else m.residual
    return norms + projected + mixed + mlp


def _mixing(m: Microbatch, *, backward: bool) -> int:
    """Return the temporary bytes of linear attention between its projections, in float32.

    They are matrices of the token pairs of a chunk, copies of keys and values, and in the backward
    pass a state for each chunk. The numbers are measured (`tests.unit.planning`).
    """
    linear = m.architecture.linear
    if linear is None:
        return 0
    heads, k, v = linear.value_heads // (m.tp * m.cp), linear.key_channels, linear.value_channels
    token = 3 * DELTA_CHUNK + 7 * k + 6 * v
    if backward:
        token = 8 * DELTA_CHUNK + 11 * k + 8 * v + 2 * k * v // DELTA_CHUNK
    return m.attended_tokens * heads * token * _FP32


def chunk(m: Microbatch, layers: int, *, linear: int = 0, first: bool, last: bool) -> int:
    """Return the bytes that the layers of a chunk keep of one microbatch in flight.

    Args:
        m: The microbatch.
        layers: Number of layers.
        linear: Number of those with linear attention.
        first: Whether the chunk has the embedding.
        last: Whether the chunk has the head, which is not counted.
    """
    p = m.parallel
    tables = len(set(m.architecture.ropes))
    frequencies = tables * m.length * m.architecture.kv_channels * _FP32
    if p.recompute_granularity == "full":
        units = -(-layers // p.recompute_num_layers)
        kept = units * m.residual + frequencies
    else:
        kept = (layers - linear) * layer(m, p.recompute_granularity) + frequencies * m.fused
        kept += linear * linear_layer(m, p.recompute_granularity) if linear else 0
    # the first layer's input is the embedding's output or a view of the received tensor
    received = 2 * m.tokens * _INT64 if first else m.stage_tensor - m.residual
    sent = 0 if last else m.stage_tensor
    return kept + received + sent


def head_kept(m: Microbatch) -> int:
    """Return the bytes that the last stage keeps after its layers: final norm, logits' gradient."""
    return m.residual + norm_statistics(m) + m.gathered + m.logits


def head_workspace(m: Microbatch) -> int:
    """Return the temporary bytes of the loss: the teacher's logits, one chunk at a time."""
    if not m.distills:
        return 0
    share = padded_vocab(m.architecture) // m.tp
    return min(LOGITS_CHUNK, m.tokens * share) * m.width + m.gathered


def forward_workspace(m: Microbatch) -> int:
    """Return the peak of temporary bytes in a forward pass without gradients, inside an MLP.

    This is the teacher's pass, or a pass of the student that recomputation repeats later.
    """
    p = m.parallel
    if not m.distills and p.recompute_granularity != "full" and not p.recomputes("mlp"):
        return 0
    mlp = (_halves(m) + 1) * m.mlp_half + 2 * m.residual + m.gathered
    mlp += _copied(m, fp8.mlp_weights(m.architecture))
    return max(mlp + _ROUTED_FORWARD * m.routed, _mixing(m, backward=False))


def backward_workspace(m: Microbatch) -> int:
    """Return the peak of temporary bytes in a layer's backward pass, beyond what was kept.

    The product of the gated MLP is freed while its gradient and the gradients of both factors
    exist. With full recomputation the activations of one unit of layers exist again.
    """
    p = m.parallel
    # the gradient of the gathered input, and with overlap the input itself, which megatron
    # gathers to a buffer that lasts
    gathered = m.gathered * (p.sequence_parallel + p.tp_comm_overlap)
    work = 2 * m.mlp_half + m.residual + gathered
    if p.recomputes("mlp"):
        work += mlp_kept(m)
    work += _ROUTED_BACKWARD * m.routed
    mixing = _mixing(m, backward=True)
    if p.recompute_granularity == "full":
        # the unit's input is counted with what was kept
        rest = (p.recompute_num_layers - 1) * layer(m, None) - m.residual
        work += rest + layer(m, None)
        if mixing:  # when the MLP's part is freed
            mixing += rest + linear_layer(m, None) - mlp_kept(m)
    return max(work, mixing)
