"""Interface of this package to the training loop."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.kernels import dispatch
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints import state as checkpoint_state
from dms_train.mcore.checkpoints.saving import CheckpointSaver
from dms_train.mcore.checkpoints.state import ADAPTERS
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters, fp8, fusions, retention
from dms_train.mcore.layers import backend as layers
from dms_train.mcore.layers.attention import MethodState
from dms_train.mcore.model import eviction_channel, gathering, low_rank, sharing, stored, weights
from dms_train.mcore.model.configuration import transformer_config
from dms_train.mcore.model.eviction_channel import ChannelRows
from dms_train.mcore.model.low_rank import AdapterTensors
from dms_train.mcore.model.model import DMSModel
from dms_train.mcore.model.offload import OffloadedTeacher
from dms_train.mcore.model.recording import Recording, record
from dms_train.mcore.options import ALL_WEIGHTS, OptimOptions, ParallelOptions, Trainable
from dms_train.mcore.schedule import optimizer as optim
from dms_train.mcore.schedule.graph import PassGraph, choose_graph
from dms_train.mcore.schedule.step import PassContext, run_pass, to_device, token_scale
from dms_train.mcore.schedule.step_statistics import DeviceTotals, PassTotals, StepStatistics
from dms_train.method.base import MethodOptions
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.method.token_losses import PLAIN_LOSS, TEACHER_LM, LossOptions
from dms_train.method.top_logits import TopLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineOptions:
    """Parts of the configuration that the engine needs.

    Attributes:
        trains: Whether to build gradient buffers and an optimizer; converters need none.
        kernels: Configured name of the attention's backend.
        loss: Parameters of the token losses.
        trainable: Weights of the student that train.
        reads_teacher: Whether the batches bring the stored distributions of the teacher.
        offloads_teacher: Whether the layers of a teacher with weights of its own stay in host
            memory between passes.
        packs_documents: Whether samples hold several documents.
    """

    parallel: ParallelOptions
    optim: OptimOptions
    seed: int
    trains: bool = True
    kernels: str = "auto"
    loss: LossOptions = PLAIN_LOSS
    trainable: Trainable = ALL_WEIGHTS
    reads_teacher: bool = False
    offloads_teacher: bool = False
    packs_documents: bool = False


class McoreEngine:
    """A student, and optionally a frozen teacher, on megatron-core in one parallel layout.

    Attributes:
        on_microbatch: Called before each forward pass.
    """

    def __init__(
        self,
        architecture: Architecture,
        method: MethodOptions,
        view: ParallelView,
        options: TrainEngineOptions,
        source: weights.WeightSource | None,
    ) -> None:
        self.architecture = architecture
        self.spec = method.spec
        self.view = view
        self._options = options
        if options.trains:
            optim.require_supported(options.optim, view.device)
        backend = dispatch.choose_train_attention(
            options.kernels, view.device, decays=self.spec.decays
        )
        self.on_microbatch: Callable[[], None] = lambda: None
        self._attend = dispatch.train_attention(backend)
        fused = dispatch.can_fuse(backend)
        self._layer_backend = layers.choose(
            options.parallel.layers,
            view.device,
            fused=fused,
            adapts=options.trainable.adapts,
            overlaps=options.parallel.tp_comm_overlap,
            fp8=options.parallel.fp8,
        )
        self._config = transformer_config(architecture, options.parallel)
        self._graph = self._choose_graph(fused=fused)
        fusions.apply(self._config, view.device, fused=fused)
        fused_on = view.device if fused else None
        self._method = MethodState(method, self._attend, loss=options.loss, fused_on=fused_on)
        self._models = self._build_chunks(self._method, source, options.trainable)
        self._saver = CheckpointSaver(is_main_rank=view.rank == 0)
        self._chunks = optim.mixed_precision(self._config, self._models)
        self._optimizer: Any = None
        self._scheduler: Any = None
        if options.trains:
            sharing.freeze(self._models, options.trainable)
            with self._stream():
                self._chunks = optim.data_parallel(
                    self._config,
                    self._chunks,
                    options.parallel.ddp_bucket_size,
                    overlaps=self._graph is None,
                )
            self._optimizer = optim.build_optimizer(options.optim, self._config, self._chunks)

    def _choose_graph(self, *, fused: bool) -> PassGraph | None:
        if not self._options.trains:
            return None
        return choose_graph(
            self._options.parallel,
            self.view,
            fused=fused,
            experts=self.architecture.num_experts,
            linear=self.architecture.linear is not None,
            packed=self._options.packs_documents,
        )

    def _build_chunks(
        self, method: MethodState, source: weights.WeightSource | None, trainable: Trainable
    ) -> list[DMSModel]:
        count = self._options.parallel.virtual_pipeline_model_parallel_size
        stages = [None] if count is None else list(range(count))
        common = self._config, self.architecture, method, self._layer_backend, trainable
        chunks = [DMSModel(*common, vp_stage=stage) for stage in stages]
        chunks = [chunk.to(self.view.device) for chunk in chunks]
        if source is not None:
            self._fill(chunks, source)
        return chunks

    def _fill(self, chunks: list[DMSModel], source: weights.WeightSource) -> None:
        weights.load(chunks, source, self.architecture, self.view)
        weights.initialize_adapters(chunks, self.view, self._options.seed)

    def describe_layers(self) -> str:
        """Describe the implementation of layers, norms and optimizer in one line."""
        return self._layer_backend.describe(self._optimizer)

    def attach_teacher(self, source: weights.WeightSource | None) -> None:
        """Attach the frozen original, in the same layout.

        Args:
            source: Weights of the original. None takes the current weights of the student: frozen
                weights are shared, and trained ones are copied.
        """
        fused_on = self.view.device if self._method.fused else None
        # Kernels round a head differently for another channel. A resumed run knows its channel
        # here, a new run chooses it later. The teacher always has channel 0, which it never scales.
        options = self._method.options.override(channel=0)
        method = MethodState(options, self._attend, fused_on=fused_on)
        if source is None:
            optim.wait_for_param_gather(self._chunks)
            if self._options.trainable.weights != "all":
                for student in self._models:
                    student.set_teacher(sharing.SharedTeacher(student, method))
                return
        teachers = self._build_chunks(method, source, ALL_WEIGHTS)
        if source is None:
            weights.copy(self._models, teachers)
        for student, teacher in zip(self._models, teachers, strict=True):
            frozen = teacher.to(self._config.params_dtype).requires_grad_(requires_grad=False)
            frozen.eval()
            offloads = self._options.offloads_teacher
            student.set_teacher(OffloadedTeacher(frozen, self.view.device) if offloads else frozen)

    def begin_stage(self, rate: LearningRate) -> None:
        """Set the learning-rate schedule that `StepPlan.stage_step` counts on."""
        if self._graph is not None:
            self._graph.release()
        self._scheduler = optim.build_scheduler(
            self._optimizer, rate, self._options.optim.weight_decay
        )

    def end_training(self) -> None:
        """Free the memory that only training steps use; further steps may follow."""
        if self._graph is not None:
            self._graph.release()

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._graph is None else self._graph.stream()

    def _context(self, batches: list[Batch], graph: PassGraph | None) -> PassContext:
        return PassContext(
            method=self._method.layer,
            options=self._method.options,
            statistics=StepStatistics(self._method.plan.token_loss.terms),
            step=self._method.step,
            target=self._method.overall_target,
            architecture=self.architecture,
            view=self.view,
            seed=self._options.seed,
            token_scale=token_scale(batches, self.view),
            on_microbatch=self.on_microbatch,
            graph=graph,
        )

    def _run(self, plan: StepPlan, batches: list[Batch], *, forward_only: bool) -> DeviceTotals:
        needs_teacher = plan.token_loss.needs_teacher
        if needs_teacher and not self.distills:
            raise ModelError(
                f"loss={plan.loss}: needs a teacher and none is attached; name it in model.path"
            )
        self._method.set_plan(plan)
        replays = None if forward_only else self._graph
        if replays is not None:
            replays.begin_step(self._method.computation(plan), len(batches))
        batches = to_device(batches, self.view.device)
        return run_pass(
            self._chunks,
            batches,
            self._context(batches, replays),
            self._config,
            has_teacher=needs_teacher and self.has_teacher,
            forward_only=forward_only,
        )

    def forward_backward(self, plan: StepPlan, batches: list[Batch]) -> PassTotals:
        """Compute the gradients of one global batch, without an update."""
        return self._gradients(plan, batches).read()

    def _gradients(self, plan: StepPlan, batches: list[Batch]) -> DeviceTotals:
        for chunk in self._chunks:
            if not chunk.training:  # `train` visits all modules
                chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        with self._stream():
            device_totals = self._run(plan, batches, forward_only=False)
        return device_totals

    def gradients(self, plan: StepPlan, batches: list[Batch]) -> tuple[float, float]:
        """Return loss and gradient norm of a batch, finite or not; nothing is updated."""
        pass_totals = self.forward_backward(plan, batches)
        return pass_totals.loss, optim.gradient_norm(self._optimizer)

    def train_step(
        self, plan: StepPlan, batches: list[Batch], meanwhile: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches of the global batch.

        Weights and optimizer stay as they are, on all ranks alike, when the loss or the gradient
        norm is not finite. `meanwhile` is called once while a GPU computes the gradients.
        """
        optim.set_step(self._scheduler, plan.stage_step)
        device_totals = self._gradients(plan, batches)
        meanwhile()
        # read between norm and update, so that the host waits for the GPU once, and for no update
        read_totals = functools.cache(device_totals.read)
        update = optim.step(self._optimizer, lambda: math.isfinite(read_totals().loss))
        learning_rate = max(group["lr"] for group in self._optimizer.param_groups)
        return read_totals().result(
            batches[0].tokens.shape[1],
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            memory_bytes=read_totals().memory_bytes,
            skipped=not update.updated,
        )

    def evaluate(self, plan: StepPlan, batches: list[Batch]) -> StepResult:
        """Compute losses and accounting of batches without gradients."""
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad(), retention.counted(self._models):
            pass_totals = self._run(plan, batches, forward_only=True).read()
            kept = self._kept(pass_totals) if plan.eviction != "none" else {}
        return pass_totals.result(batches[0].tokens.shape[1], **kept)

    def _kept(self, pass_totals: PassTotals) -> dict[str, Any]:
        """Return the values of `StepResult` about the tokens held by layer and KV head."""
        a = self.architecture
        shape = (a.num_layers, a.num_query_groups)
        kept = retention.kept(self._models, self.view, shape, pass_totals.positions)
        layers = tuple(a.method_layers)
        return {"kept": tuple(kept[layer] for layer in layers), "kept_layers": layers}

    @property
    def has_teacher(self) -> bool:
        """True if a teacher is attached."""
        return self._models[0].has_teacher

    @property
    def distills(self) -> bool:
        """True if a teacher is attached or the batches bring what is stored of it."""
        return self.has_teacher or self._options.reads_teacher

    def top_logits(self, batches: list[Batch], k: int) -> list[TopLogits]:
        """Return the k most probable tokens of every position of the student, without evictions.

        The temperature is that of the loss. See `stored.top_logits`.
        """
        for chunk in self._chunks:
            chunk.eval()
        self._method.set_plan(StepPlan(loss="lm"))
        stores = k, self._method.loss_options.kl_temperature
        batches = to_device(batches, self.view.device)
        return stored.top_logits(
            self._models, self._chunks, batches, self._config, self.view, stores
        )

    def teacher_loss(self, batches: list[Batch]) -> float:
        """Return the teacher's cross-entropy of batches in nats per token, the same on all ranks.

        Raises:
            ModelError: No teacher is attached.
        """
        return self.evaluate(StepPlan(loss=TEACHER_LM), batches).token_loss

    def reset_eviction_channel(self) -> None:
        """Zero the projection rows, bias and optimizer state of the eviction channels.

        From here every decision logit starts at -offset (paper equation 1 starts from w = 0).
        """
        optim.wait_for_param_gather(self._chunks)
        eviction_channel.reset(self._channel_rows(self.spec.channel), self._optimizer)

    def set_channel(self, channel: int) -> None:
        """Make `channel` the eviction channel, before the first step."""
        options = self._method.options.override(channel=channel)
        self._method.set_options(options)
        self.spec = options.spec
        eviction_channel.adapt(self._models, self.spec)
        # only adapters have changed; other fp32 weights may be more exact than the bf16 ones
        if self._optimizer is not None and self._options.trainable.adapts:
            self._optimizer.reload_model_params()

    def channel_losses(self, channels: Iterable[int], batches: list[Batch]) -> list[float]:
        """Return the loss of the student after zeroing each channel alone, without training.

        The weights of a channel are zeroed as `reset_eviction_channel` does, and restored. The same
        on every rank.

        Args:
            channels: Candidates for the eviction channel.
            batches: This rank's micro-batches.

        Returns:
            KL divergence from the teacher, or cross-entropy where there is none, in nats per token.
        """
        plan = StepPlan(loss="distill" if self.distills else "lm")
        losses = []
        for channel in channels:
            optim.wait_for_param_gather(self._chunks)
            eviction_channel.adapt(self._models, self.spec.override(channel=channel))
            with eviction_channel.zeroed(self._channel_rows(channel)):
                losses.append(self.evaluate(plan, batches).token_loss)
        eviction_channel.adapt(self._models, self.spec)
        return losses

    def _channel_rows(self, channel: int) -> Iterator[ChannelRows]:
        """Return the parameters of this rank that produce a channel, and its rows of each."""
        if self._options.trainable.adapts:
            return eviction_channel.adapter_rows(self._models)
        spec = self.spec.override(channel=channel)
        return eviction_channel.projection_rows(self._models, self.architecture, spec, self.view)

    @contextlib.contextmanager
    def _merged(self) -> Iterator[None]:
        """Merge the adapters inside the block, after the updated weights have been gathered."""
        optim.wait_for_param_gather(self._chunks)
        with adapters.merged(self._models):
            yield

    def record(self, plan: StepPlan, tokens: Tensor) -> Recording | None:
        """Return decision logits and logits of one text, on rank 0 (None elsewhere)."""
        self._method.set_plan(plan)
        with self._merged(), fp8.paused(self._models):  # as the export computes
            return record(self._models, self._chunks, tokens, self._config, self.view)

    def hf_shards(
        self, dtype: torch.dtype | None = None, shard_bytes: float = math.inf
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (number, full Hugging Face tensors) of this rank's shards of the model.

        Adapters are merged. Every rank must exhaust the iterator; see `gathering.gather`.
        """
        with self._merged():
            yield from gathering.gather(
                self._models, self.architecture, self.view, dtype=dtype, shard_bytes=shard_bytes
            )

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors on rank 0, which holds them together; every rank must exhaust it."""
        for _, tensors in self.hf_shards():
            yield from tensors.items()

    def adapter_tensors(self) -> AdapterTensors | None:
        """Return the adapters in PEFT's format on rank 0, None elsewhere; every rank calls it."""
        optim.wait_for_param_gather(self._chunks)
        scale = self._options.trainable.lora.scale
        return low_rank.collect(self._models, self.view, self.architecture.num_layers, scale)

    def hf_gradients(self) -> dict[str, Tensor]:
        """Return reduced gradients by Hugging Face name on rank 0 (for checks of layouts)."""
        return gathering.gather_gradients(
            self._models, self._optimizer, self.architecture, self.view
        )

    def save(self, path: Path, state: dict[str, Any], *, wait: bool = True) -> None:
        """Write a checkpoint that any parallel layout can load.

        Args:
            path: Folder of the checkpoint, which appears when it is complete.
            state: JSON values to store with the checkpoint.
            wait: Return when it is complete; otherwise `finish_save` reports it.

        Raises:
            SaveError: The checkpoint cannot be written; the same on every rank.
        """
        self._save(path, self._optimizer, {**state, ADAPTERS: self._options.trainable.adapters()})
        if wait:
            self._saver.finish(wait=True)

    def finish_save(self, *, wait: bool) -> Path | None:
        """Return a checkpoint whose writing has ended, or must end now; None without one.

        Raises:
            SaveError: The checkpoint could not be written; the same on every rank.
        """
        return self._saver.finish(wait=wait)

    def annotate(self, path: Path, state: dict[str, Any]) -> None:
        """Change values in the JSON state of a checkpoint, if there is one at `path`."""
        if self.view.rank == 0 and path.is_dir():
            checkpoint_state.annotate(path, state)

    def save_weights(self, path: Path, state: dict[str, Any]) -> None:
        """Write the weights alone with adapters merged, in the same form; SaveError as `save`."""
        with self._merged():
            self._save(path, None, {**state, ADAPTERS: None})
            self._saver.finish(wait=True)

    def _save(self, path: Path, optimizer: Any, state: dict[str, Any]) -> None:
        names = ("tp", "pp", "cp", "dp")
        layout = {name: getattr(self.view, f"{name}_size") for name in names}
        described = {**state, "spec": self.spec.to_dict(), "layout": layout}
        optim.wait_for_param_gather(self._chunks)
        self._saver.begin(path, self._models, optimizer, described)

    def load(self, path: Path, *, with_optimizer: bool, verified: bool = False) -> dict[str, Any]:
        """Load a checkpoint and return its JSON state.

        Without the optimizer's state, a bf16 engine still takes the optimizer's fp32 weights, if
        the checkpoint has them.

        Args:
            path: Folder of the checkpoint.
            with_optimizer: Load the optimizer's state too.
            verified: True if the checksums were compared already; otherwise all ranks compare them
                first.

        Raises:
            CheckpointError: See `checkpoint.verify`, `checkpoint.load` and `require_adapters`.
            ModelError: The weights hold NaN or infinite numbers.
        """
        if not verified:
            checkpoint.verify(path, self.view)
        state = checkpoint_state.read_state(path)
        checkpoint_state.require_adapters(path, state, self._options.trainable)
        optim.wait_for_param_gather(self._chunks)
        checkpoint.load(path, self._models, self._optimizer if with_optimizer else None)
        weights.require_finite(self._models, f"checkpoint {path}")
        if self._optimizer is not None and not with_optimizer:
            self._optimizer.reload_model_params()
            if self._config.bf16:  # fp32 weights are their own masters
                checkpoint.load_masters(path, self._models, self._optimizer)
        return state

    def load_hf(self, source: weights.WeightSource) -> None:
        """Replace the student's weights by the weights of a Hugging Face directory."""
        optim.wait_for_param_gather(self._chunks)
        self._fill(self._models, source)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
