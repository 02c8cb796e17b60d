"""Megatron-core's own model in the same step: local or Transformer Engine layers, torch attention.

The optimizer is Transformer Engine's FusedAdam where it is installed, else torch's fused AdamW.
With a teacher the loss is the KL divergence in fp32, computed a piece of the sequence at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.train_step.shapes import SHAPES, Case
from dms_train.data.batches import Batch
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import fusions
from dms_train.mcore.model.configuration import (
    padded_vocab_size,
    rope_arguments,
    transformer_config,
)
from dms_train.mcore.options import ParallelOptions
from dms_train.mcore.schedule import optimizer as optim

_KL_ROWS = 1024


class TorchAttention(MegatronModule):
    """Causal attention by torch: cuDNN with Transformer Engine, else torch's own choice."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.fused = config.apply_rope_fusion

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map q [s, b, n, d], k and v [s, b, g, d] to [s, b, n * d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.fused else contextlib.nullcontext()
        with only:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def _model(case: Case, config: Any) -> GPTModel:
    architecture, length, _ = SHAPES[case.shape]
    arguments = {"qk_layernorm": architecture.qk_layernorm}
    if case.layers == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(**arguments)
    else:
        spec = get_gpt_layer_local_spec(**arguments, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size(architecture),
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        **rope_arguments(architecture.rope_scaling),
    )


def _config(case: Case, parallel: ParallelOptions) -> Any:
    config = transformer_config(SHAPES[case.shape][0], parallel)
    fused = case.layers == "transformer_engine"
    config.bias_activation_fusion = config.apply_rope_fusion = fused
    config.bias_dropout_fusion = config.gradient_accumulation_fusion = False
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _piece(student: Tensor, teacher: Tensor) -> Tensor:
    q, p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return F.kl_div(q, p, reduction="sum", log_target=True)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) of logits [s, b, vocabulary]."""
    pieces = zip(student.split(_KL_ROWS), teacher.split(_KL_ROWS), strict=True)
    total = torch.stack([checkpoint(_piece, s, t, use_reentrant=False) for s, t in pieces]).sum()
    return total / student[..., 0].numel()


def _forward_step(teacher: GPTModel | None, device: torch.device) -> Callable[..., Any]:
    def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
        if teacher is None:
            output = model(tokens, positions, None, labels=labels)
        else:
            with torch.no_grad():
                wanted = teacher(tokens, positions, None).transpose(0, 1)
            # transposed back to [s, b, v]; the wrapper would make fp32 copies of all logits
            logits = unwrap_model(model)(tokens, positions, None).transpose(0, 1)
            output = _divergence(logits, wanted)

        def loss(result: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = result.mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    return forward_step


def step_of_peer(
    case: Case, view: ParallelView, parallel: ParallelOptions, batches: list[Batch]
) -> Callable[[], float]:
    """Build a training step of the stock model, for cases that `Case.known` allows."""
    config = _config(case, parallel)
    model = _model(case, config).to(view.device)
    teacher = None
    if case.kind == "distill":
        teacher = _model(case, config).to(view.device).to(config.params_dtype)
        teacher.requires_grad_(requires_grad=False).eval()
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        optim.mixed_precision(config, [model])[0],
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-5, bf16=config.bf16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    fusions.fuse_adam(optimizer)
    forward_step, (_, length, size) = _forward_step(teacher, view.device), SHAPES[case.shape]

    def step() -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=ddp,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=False,
        )
        optimizer.step()
        return float(torch.stack([r["loss"] for r in reports]).mean())

    return step
