"""Bytes that one microbatch occupies on a rank: what a layer keeps for its backward pass, and peaks.

Counted from the modules of `mcore` one saved tensor at a time; the tests compare the counts with
the tensors that a real step holds. Letters: t tokens of a microbatch, b its samples, h hidden size,
f MLP size, q and k channels of all query and all KV heads, p bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import VOCABULARY_MULTIPLE, ParallelOptions

# Logits of one model that the loss holds at a time.
LOGITS_CHUNK = 2**28
_FP32 = 4
_INT64 = 8
_ROW_TILE = 128  # the attention's statistics are padded to whole tiles of queries
# float32 numbers of a KV head and token: alpha, the negated logit and log(1 - alpha)
_DECISION_VALUES = 3
# Backends that keep float32 copies of q, k and v instead of tiles' statistics.
_WIDE_KERNELS = ("blockwise", "reference")


def padded_vocab(architecture: Architecture) -> int:
    """Rows of the embedding once it is padded for tensor parallelism."""
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch in a layout, as each rank sees it.

    Attributes:
        distills: Whether the frozen teacher runs beside the student.
        kernels: Backend of the attention.
    """

    architecture: Architecture
    parallel: ParallelOptions
    samples: int
    length: int
    distills: bool
    kernels: str = "triton"

    @property
    def width(self) -> int:
        """Bytes of a number in the precision of the weights."""
        return 2 if self.parallel.params_dtype == "bf16" else _FP32

    @property
    def tokens(self) -> int:
        """Tokens, all of them on every tensor-parallel rank."""
        return self.samples * self.length

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

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
        return self.tokens * self.architecture.ffn_hidden_size // self.tp * self.width

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
        """Bytes of what travels between pipeline stages: both models and the side row."""
        row = self.samples * self.architecture.hidden_size * self.width
        return (2 if self.distills else 1) * self.residual + row

    @property
    def logits(self) -> int:
        """Bytes of one model's logits on this rank, in the precision of the weights."""
        return self.tokens * padded_vocab(self.architecture) // self.tp * self.width


def norm_statistics(m: Microbatch) -> int:
    """One float32 number per token and norm."""
    return m.own_tokens * _FP32


def attention_kernel(m: Microbatch) -> int:
    """What the attention keeps besides q, k, v: the output, a sum per row, the bias."""
    a = m.architecture
    heads, groups = a.num_attention_heads // m.tp, a.num_query_groups // m.tp
    if m.kernels in _WIDE_KERNELS:
        wide = (m.query + 2 * m.key) // m.width * _FP32
        return m.query + wide + m.tokens * groups * _FP32
    padded = m.samples * -(-m.length // _ROW_TILE) * _ROW_TILE
    return m.query + (padded * heads + m.tokens * groups) * _FP32


def layer(m: Microbatch, recompute: str | None) -> int:
    """Bytes a decoder layer keeps from its forward to its backward pass.

    Args:
        m: The microbatch.
        recompute: None or `selective`; with `full` see `recomputed_unit`.
    """
    a = m.architecture
    groups = a.num_query_groups // m.tp
    norms = 2 * (2 * m.residual + norm_statistics(m))  # inputs and outputs of both norms
    projected = m.query + 2 * m.key  # one tensor, of which the values are a view
    if a.qk_layernorm:
        # q is copied out of the projection before its norm, k is a view
        norms += m.query + m.tokens * (a.num_attention_heads // m.tp + groups) * _FP32
    rotated = m.query + m.key
    tables = 4 * m.length * a.kv_channels * m.width  # sine and cosine, for q and for k
    decisions = _DECISION_VALUES * m.tokens * groups * _FP32
    mlp = 5 * m.mlp_half  # both halves in one tensor, silu, the other half plus 0, their product
    attention = m.query if recompute == "selective" else attention_kernel(m)
    if m.kernels in _WIDE_KERNELS and recompute != "selective":
        projected = rotated = 0  # copied, not kept
    return norms + projected + rotated + tables + decisions + attention + mlp


def chunk(m: Microbatch, layers: int, *, first: bool, last: bool) -> int:
    """Bytes a chunk of `layers` layers keeps of one microbatch in flight, without the head."""
    p = m.parallel
    if p.recompute_granularity == "full":
        units = -(-layers // p.recompute_num_layers)
        frequencies = m.length * m.architecture.kv_channels * _FP32
        kept = units * m.residual + frequencies
    else:
        kept = layers * layer(m, p.recompute_granularity)
    # the first layer's input is the embedding's output or a view of the received tensor
    received = (
        2 * m.tokens * _INT64 if first else m.stage_tensor - m.residual
    )
    sent = 0 if last else m.stage_tensor
    return kept + received + sent


def head_kept(m: Microbatch) -> int:
    """Bytes the last stage keeps behind its layers: the final norm and the gradient of the logits."""
    return 2 * m.residual + norm_statistics(m) + m.logits


def head_workspace(m: Microbatch) -> int:
    """Bytes that exist only while the loss is computed: logits of a chunk of tokens."""
    share = padded_vocab(m.architecture) // m.tp
    models = 2 if m.distills else 1
    gathered = m.gathered if m.parallel.sequence_parallel else 0
    return models * min(LOGITS_CHUNK, m.tokens * share) * m.width + gathered


def forward_workspace(m: Microbatch) -> int:
    """Bytes of a forward pass without gradients at its fullest, inside an MLP.

    That is the teacher's pass, or one of the student that is computed again later.
    """
    if not m.distills and m.parallel.recompute_granularity != "full":
        return 0
    return 5 * m.mlp_half + 2 * m.residual + m.gathered


def backward_workspace(m: Microbatch) -> int:
    """Bytes of a layer's backward pass at its fullest, beyond what was kept.

    The product of the gated MLP is freed while its gradient and those of both factors exist; with
    full recomputation the layers of one unit exist again.
    """
    p = m.parallel
    work = 2 * m.mlp_half + m.residual + (m.gathered if p.sequence_parallel else 0)
    if p.recompute_granularity == "full":
        # the unit's input is counted with what was kept
        work += p.recompute_num_layers * layer(m, None) - m.residual
    return work
