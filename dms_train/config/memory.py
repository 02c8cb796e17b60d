"""How much memory the fullest process needs for what has a fixed size: everything but activations.

The layout is the one `mcore` uses: gradients in fp32 on every process, optimizer state in fp32
divided over the data-parallel copies, and a frozen teacher next to the student when distilling.
"""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import VOCABULARY_MULTIPLE

_FP32 = 4
_ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest process."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.logits


def estimate(config: RunConfig, architecture: Architecture, world_size: int) -> MemoryEstimate:
    """Memory of a configuration that passed `check`."""
    parallel, data = config.parallel, config.data
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    copies = world_size // (tp * pp)
    width = 2 if parallel.params_dtype == "bf16" else _FP32
    parameters = _parameters_of_fullest(architecture, tp, pp)
    models = 2 if needs_teacher(config) else 1
    states = _ADAM_MOMENTS + (parallel.params_dtype == "bf16")  # fp32 weights are their own master
    positions = data.seq_length * data.micro_batch_size
    return MemoryEstimate(
        weights=parameters * width,
        gradients=parameters * _FP32,
        optimizer=parameters * _FP32 * states // copies,
        teacher=parameters * width * (models - 1),
        # logits and their gradient in the weights' precision; fp32 lives in small chunks only
        logits=(models + 1) * positions * padded_vocab(architecture) * width // tp,
    )


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Size of one checkpoint: weights, their fp32 master copy and the moments of Adam."""
    width = 2 if config.parallel.params_dtype == "bf16" else _FP32
    return parameter_count(architecture) * (width + _FP32 * (1 + _ADAM_MOMENTS))


def needs_teacher(config: RunConfig) -> bool:
    """Whether any stage that is run distills."""
    blocks = (getattr(config.stage, name) for name in config.stage.run)
    return any(getattr(block, "loss", None) == "distill" for block in blocks)


def parameter_count(architecture: Architecture) -> int:
    """Parameters of the model, a tied output projection counted once."""
    a = architecture
    embeddings = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
    return a.num_layers * _layer_parameters(a) + embeddings + a.hidden_size


def padded_vocab(architecture: Architecture) -> int:
    """Rows of the embedding once it is padded for tensor parallelism."""
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def layer_products(a: Architecture) -> int:
    """Weights of one layer that are multiplied with every token."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    return 2 * a.hidden_size * (query + key) + 3 * a.hidden_size * a.ffn_hidden_size


def _layer_parameters(a: Architecture) -> int:
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    norms = 2 * a.hidden_size + (2 * a.kv_channels if a.qk_layernorm else 0)
    bias = query + 2 * key if a.add_qkv_bias else 0
    return layer_products(a) + norms + bias


def _parameters_of_fullest(a: Architecture, tp: int, pp: int) -> int:
    """A first or last stage; with one stage an untied output projection comes on top."""
    table = padded_vocab(a) * a.hidden_size
    tables = 2 * table if pp == 1 and not a.tie_word_embeddings else table
    return (a.num_layers // pp * _layer_parameters(a) + tables) // tp + a.hidden_size
