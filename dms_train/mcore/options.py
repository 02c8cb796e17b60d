"""Parallel layout, precision and optimizer settings; Megatron's names for the same things."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of the embedding table are padded to a multiple of this, whatever the tensor-parallel size,
# so that a checkpoint has the same shapes in every layout.
VOCABULARY_MULTIPLE = 128
# Logits of one model that the loss holds at a time on a GPU.
LOGITS_CHUNK = 2**28
LAYERS = ("auto", "local", "transformer_engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How one model is spread over processes.

    Attributes:
        virtual_pipeline_model_parallel_size: Model chunks per pipeline stage (interleaved
            schedule); None for one.
        sequence_parallel: Shard norms and residuals over tokens within the tensor-parallel group.
        params_dtype: `fp32` or `bf16` weights; optimizer state and reductions are always fp32.
        recompute_granularity: None, `selective` (core attention) or `full` (whole layers).
        recompute_num_layers: Layers per recomputed unit with `full`.
        layers: Whose linear layers and norms: `auto`, `local` (megatron-core's own) or
            `transformer_engine`; see `mcore.layers`.
        distributed_timeout_minutes: After this long without an answer a collective gives up; a rank
            without a sign of life for half of it counts as dead.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    params_dtype: str = "fp32"
    recompute_granularity: str | None = None
    recompute_num_layers: int = 1
    layers: str = "auto"
    distributed_timeout_minutes: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOptions:
    """AdamW settings shared by all stages; a stage may replace `lr`."""

    lr: float
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    lr_warmup_steps: int = 0
