"""Parallel layout, precision and optimizer settings, with Megatron's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dms_train.hf.options import PRECISIONS
from dms_train.limits import AtLeast, OneOf, Positive, Share

# Rows of the embedding table are padded to a multiple of this for every tensor-parallel size,
# so that a checkpoint has the same shapes in every layout.
VOCABULARY_MULTIPLE = 128
# Number of logits of one model that the loss holds at a time on a GPU.
LOGITS_CHUNK = 2**28
CUDA_GRAPH = ("auto", "always", "never")
LAYERS = ("auto", "local", "transformer_engine")
# Number of bf16 addends that hold an fp32 value exactly.
EXACT_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Distribution of one model over processes.

    Attributes:
        virtual_pipeline_model_parallel_size: Model chunks per pipeline stage (interleaved
            schedule); None for one.
        expert_model_parallel_size: Number of data-parallel ranks that share the experts of a
            mixture of experts; 1 where every rank holds all of them.
        sequence_parallel: Shard norms and residuals over tokens within the tensor-parallel group.
        params_dtype: `fp32` or `bf16` weights; optimizer state and reductions are always fp32.
        recompute_granularity: None, `selective` (core attention) or `full` (whole layers).
        recompute_num_layers: Layers per recomputed unit with `full`.
        cuda_graph: Replay the passes of a microbatch as a CUDA graph: `auto` on one GPU where
            nothing is recomputed or packed, `always` (refused elsewhere) or `never`.
        layers: Implementation of linear layers and norms: `auto`, `local` (megatron-core's own) or
            `transformer_engine`; see `mcore.layers`.
        distributed_timeout_minutes: Timeout of a collective; a rank
            without a heartbeat for half of it counts as stalled.
    """

    tensor_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    pipeline_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    virtual_pipeline_model_parallel_size: Annotated[int | None, AtLeast(2)] = None
    expert_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    sequence_parallel: bool = False
    params_dtype: Annotated[str, OneOf(*PRECISIONS)] = "fp32"
    recompute_granularity: Annotated[str | None, OneOf(None, "selective", "full")] = None
    recompute_num_layers: Annotated[int, AtLeast(1)] = 1
    cuda_graph: Annotated[str, OneOf(*CUDA_GRAPH)] = "auto"
    layers: Annotated[str, OneOf(*LAYERS)] = "auto"
    distributed_timeout_minutes: Annotated[float, Positive()] = 10.0

    def graph_obstacles(self, world_size: int, experts: int = 0) -> Iterator[str]:
        """Yield each reason why passes cannot be captured as a CUDA graph, with a remedy."""
        if world_size > 1:
            yield f"one process can be captured and there are {world_size}; use auto"
        if experts:
            yield "a mixture of experts counts the tokens of each on the host; use auto"
        if self.recompute_granularity is not None:
            yield (
                f"parallel.recompute_granularity={self.recompute_granularity} reads random states "
                "on the host; set it to null"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOptions:
    """AdamW settings shared by all stages; a stage may replace `lr`."""

    lr: Annotated[float, Positive()]
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    adam_beta1: Annotated[float, Share(below_one=True)] = 0.9
    adam_beta2: Annotated[float, Share(below_one=True)] = 0.95
    adam_eps: Annotated[float, Positive()] = 1e-8
    clip_grad: Annotated[float, AtLeast(0)] = 1.0
    lr_warmup_steps: Annotated[int, AtLeast(0)] = 0
