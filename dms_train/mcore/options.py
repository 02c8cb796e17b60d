"""Parallel layout, precision and optimizer settings, with Megatron's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Annotated, Any

from dms_train.hf.options import PRECISIONS
from dms_train.limits import AtLeast, OneOf, Positive, Share
from dms_train.method.base import TRAINED_WEIGHTS

# Rows of the embedding table are padded to a multiple of this for every tensor-parallel size,
# so that a checkpoint has the same shapes in every layout.
VOCABULARY_MULTIPLE = 128
# Number of logits of one model that the loss holds at a time on a GPU.
LOGITS_CHUNK = 2**28
CUDA_GRAPH = ("auto", "always", "never")
RECOMPUTE_MODULES = ("core_attn", "mlp")
LAYERS = ("auto", "local", "transformer_engine")
LORA_TARGETS = ("q", "k", "v", "o")
# Number of layers of an offloaded teacher whose weights are on the GPU during a pass.
OFFLOAD_SLOTS = 2
# Number of parameters that an optimizer with `optim.offload` or bf16 moments updates at a time.
HOST_PIECE = 2**25
MOMENTS_PIECE = 2**27
# Number of bf16 addends that hold an fp32 value exactly.
EXACT_PARTS = 3
# Compute capability from which a GPU has FP8 products, and the multiple that their sizes must be.
FP8_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Distribution of one model over processes.

    Attributes:
        context_parallel_size: Ranks that share the positions of a sample, and in attention the KV
            heads of a tensor-parallel rank.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline stage (interleaved
            schedule); None for one.
        num_layers_in_first_pipeline_stage: Layers of the first stage; the stages without a number
            of their own divide the other layers evenly. None for an even share.
        num_layers_in_last_pipeline_stage: The same for the last stage, which also computes logits.
        expert_model_parallel_size: Number of data- and context-parallel ranks that share the
            experts of a mixture of experts; 1 where every rank holds all of them.
        sequence_parallel: Shard norms and residuals over tokens within the tensor-parallel group.
        tp_comm_overlap: Overlap the tensor-parallel communication of linear layers with their
            products; needs sequence parallelism and GPUs that read one another's memory.
        fp8: Run the products of MLPs and the output projections of attention in FP8, with
            Transformer Engine's layers; see `mcore.layers.fp8`.
        params_dtype: `fp32` or `bf16` weights; reductions are always fp32.
        recompute_granularity: None, `selective` (`recompute_modules`) or `full` (whole layers).
        recompute_modules: Modules of a layer that `selective` recomputes: `core_attn` (attention
            after the projections), `mlp`, or both.
        recompute_num_layers: Layers per recomputed unit with `full`.
        cuda_graph: Replay the passes of a microbatch as a CUDA graph: `auto` where each GPU has the
            whole model and `graph_obstacles` has none, `always` (refused elsewhere) or `never`.
            Copies then reduce gradients after the passes instead of during them.
        layers: Implementation of linear layers and norms: `auto`, `local` (megatron-core's own) or
            `transformer_engine`; see `mcore.layers`.
        ddp_bucket_size: Parameters of a gradient bucket, whose reduction overlaps the backward pass
            where there are data-parallel copies; None for megatron-core's max(40 million, 1 million
            x copies).
        distributed_timeout_minutes: Timeout of a collective; a rank
            without a heartbeat for half of it counts as stalled.
    """

    tensor_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    pipeline_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    context_parallel_size: Annotated[int, AtLeast(1)] = 1
    virtual_pipeline_model_parallel_size: Annotated[int | None, AtLeast(2)] = None
    num_layers_in_first_pipeline_stage: Annotated[int | None, AtLeast(1)] = None
    num_layers_in_last_pipeline_stage: Annotated[int | None, AtLeast(1)] = None
    expert_model_parallel_size: Annotated[int, AtLeast(1)] = 1
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    fp8: bool = False
    params_dtype: Annotated[str, OneOf(*PRECISIONS)] = "fp32"
    recompute_granularity: Annotated[str | None, OneOf(None, "selective", "full")] = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_num_layers: Annotated[int, AtLeast(1)] = 1
    cuda_graph: Annotated[str, OneOf(*CUDA_GRAPH)] = "auto"
    layers: Annotated[str, OneOf(*LAYERS)] = "auto"
    ddp_bucket_size: Annotated[int | None, AtLeast(1)] = None
    distributed_timeout_minutes: Annotated[float, Positive()] = 10.0

    def check(self, path: str) -> Iterator[str]:
        """Yield a line for each option that another one does not allow."""
        modules = f"{path}.recompute_modules=[{', '.join(self.recompute_modules)}]"
        if not self.recompute_modules or set(self.recompute_modules) - set(RECOMPUTE_MODULES):
            yield f"{modules}: name one or both of {', '.join(RECOMPUTE_MODULES)}"
        elif self.recompute_granularity != "selective" and self.recompute_modules != ("core_attn",):
            yield f"{modules}: needs {path}.recompute_granularity=selective; set that too"
        if self.fp8:
            yield from self._fp8_obstacles(path)

    def _fp8_obstacles(self, path: str) -> Iterator[str]:
        where = f"{path}.fp8=true"
        if self.params_dtype != "bf16":
            yield f"{where}: needs {path}.params_dtype=bf16; set that too"
        if self.layers == "local":
            yield (
                f"{where}: {path}.layers=local has no FP8 products; use "
                f"{path}.layers=transformer_engine"
            )
        if self.tp_comm_overlap:
            yield (
                f"{where}: {path}.tp_comm_overlap=true runs megatron-core's own layers, which have "
                "no FP8 products; set one of them to false"
            )

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks of one data-parallel copy."""
        pp, cp = self.pipeline_model_parallel_size, self.context_parallel_size
        return self.tensor_model_parallel_size * pp * cp

    def recomputes(self, module: str) -> bool:
        """Return whether the backward pass recomputes this module of every layer alone."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    @property
    def is_uneven(self) -> bool:
        """True if the first or the last pipeline stage has a number of layers of its own."""
        ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        return ends != (None, None)

    def stage_layers(self, num_layers: int) -> list[int]:
        """Return the layers of each pipeline stage; their sum differs if they do not divide."""
        pp = self.pipeline_model_parallel_size
        first, last = (
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
        )
        ends = [layers for layers in (first, last) if layers is not None]
        even = (num_layers - sum(ends)) // (pp - len(ends)) if pp > len(ends) else 0
        layers = [even] * pp
        if first is not None:
            layers[0] = first
        if last is not None:
            layers[-1] = last
        return layers

    def stage_chunks(self, num_layers: int) -> list[list[range]]:
        """Return the numbers of the layers of each model chunk of each pipeline stage."""
        vp = self.virtual_pipeline_model_parallel_size or 1
        sizes = [layers // vp for layers in self.stage_layers(num_layers)]
        firsts = list(accumulate(sizes, initial=0))
        total = firsts.pop()
        return [
            [range(first + chunk * total, first + chunk * total + size) for chunk in range(vp)]
            for first, size in zip(firsts, sizes, strict=True)
        ]

    def graph_obstacles(
        self, copies: int, experts: int = 0, *, linear: bool = False, packed: bool = False
    ) -> Iterator[str]:
        """Yield each reason why passes cannot be captured as a CUDA graph, with a remedy.

        Args:
            copies: Number of data-parallel copies.
            experts: Number of experts of a layer.
            linear: Whether layers have linear attention.
            packed: Whether samples hold several documents.
        """
        if (ranks := self.ranks_per_copy) > 1:
            yield f"the {ranks} ranks of a copy communicate within passes; use auto"
        if copies > 1 and self.ddp_bucket_size is not None:
            yield "replayed passes reduce no buckets; set parallel.ddp_bucket_size to null"
        if packed:
            yield "packed documents vary in number; set data.packing=false"
        if experts:
            yield "a mixture of experts counts the tokens of each on the host; use auto"
        if linear:
            yield "layers with linear attention are not captured; use auto"
        if self.recompute_granularity is not None:
            yield (
                f"parallel.recompute_granularity={self.recompute_granularity} reads random states "
                "on the host; set it to null"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOptions:
    """AdamW settings shared by all stages; a stage may replace `lr`.

    Attributes:
        offload: Keep fp32 weights and moments in host memory, and update them on the CPU.
        state_dtype: Dtype of the moments on a GPU; bf16 needs Transformer Engine. Checkpoints hold
            them in fp32.
    """

    lr: Annotated[float, Positive()]
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    adam_beta1: Annotated[float, Share(below_one=True)] = 0.9
    adam_beta2: Annotated[float, Share(below_one=True)] = 0.95
    adam_eps: Annotated[float, Positive()] = 1e-8
    clip_grad: Annotated[float, AtLeast(0)] = 1.0
    lr_warmup_steps: Annotated[int, AtLeast(0)] = 0
    offload: bool = False
    state_dtype: Annotated[str, OneOf(*PRECISIONS)] = "fp32"

    def check(self, path: str) -> Iterator[str]:
        """Yield one line if moments in host memory are to be in bf16."""
        if self.offload and self.state_dtype != "fp32":
            yield (
                f"{path}.state_dtype={self.state_dtype}: the CPU updates moments in fp32; use "
                f"fp32, or set {path}.offload=false"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters of `method.train=lora` (arXiv:2106.09685).

    A target's matrix W [out, in] becomes W + alpha / rank * B A, with B [out, rank] and
    A [rank, in]. B starts at zero.

    Attributes:
        rank: Rank of every adapter.
        alpha: Divided by the rank, the factor on B A.
        targets: Projections of attention with an adapter: `q`, `k`, `v` and `o`.
    """

    rank: Annotated[int, AtLeast(1)] = 16
    alpha: Annotated[float, Positive()] = 32.0
    targets: tuple[str, ...] = LORA_TARGETS

    def check(self, path: str) -> Iterator[str]:
        """Yield one line if the targets are not different projections of attention."""
        if not self.targets or len(set(self.targets) & set(LORA_TARGETS)) < len(self.targets):
            shown, known = (",".join(names) for names in (self.targets, LORA_TARGETS))
            yield f"{path}.targets=[{shown}]: name one or more of {known}, each once"

    @property
    def scale(self) -> float:
        """Factor on the product of an adapter."""
        return self.alpha / self.rank


PLAIN_LORA = LoraOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """Weights of the student that train; all others are frozen and shared with the teacher.

    Attributes:
        weights: `method.train`: `all`, `attention`, `channel` or `lora`.
        lora: Shape of the adapters of `lora`.
    """

    weights: Annotated[str, OneOf(*TRAINED_WEIGHTS)] = "all"
    lora: LoraOptions = PLAIN_LORA

    @property
    def adapts(self) -> bool:
        """True if trained parameters stand beside the frozen projections of attention."""
        return self.weights in ("channel", "lora")

    @property
    def targets(self) -> tuple[str, ...]:
        """Projections with a low-rank adapter."""
        return self.lora.targets if self.weights == "lora" else ()

    def adapters(self) -> dict[str, Any] | None:
        """Return what a checkpoint states about its adapters as JSON; None without adapters."""
        if not self.adapts:
            return None
        stated = {**asdict(self.lora), "targets": list(self.lora.targets)}
        return {"train": self.weights, **(stated if self.weights == "lora" else {})}

    def overrides(self) -> str:
        """Return the overrides that choose these weights, separated by spaces."""
        words = [f"method.train={self.weights}"]
        if self.weights == "lora":
            targets = ",".join(self.lora.targets)
            words += [f"lora.rank={self.lora.rank}", f"lora.alpha={self.lora.alpha:g}"]
            words += [f"lora.targets=[{targets}]"]
        return " ".join(words)

    @classmethod
    def of(cls, stated: dict[str, Any] | None) -> Trainable:
        """Invert `adapters`."""
        if stated is None:
            return cls()
        lora = {key: value for key, value in stated.items() if key != "train"}
        if "targets" in lora:
            lora["targets"] = tuple(lora["targets"])
        return cls(weights=stated["train"], lora=LoraOptions(**lora))


ALL_WEIGHTS = Trainable()
