"""Accesses to private attributes of megatron-core 0.16 to 0.19, patches, and version differences.

Without Transformer Engine or Apex the distributed optimizer wraps torch's AdamW, whose state
megatron does not restore completely when it loads a checkpoint. Megatron also takes fused kernels
from these packages, for which torch has equivalents.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from dms_train.mcore.host_adam import HostAdamW, load_groups
from dms_train.mcore.options import MOMENTS_PIECE

# 0.18 and newer log advice about interfaces that 0.16 lacks.
for _logger in ("transformer.transformer_layer", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_logger}").setLevel(logging.ERROR)


def run_forward_pre_hooks(module: torch.nn.Module) -> None:
    """Wait for weights that are still being gathered, as Megatron does before a module call."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def add_to_main_grad(weight: Any, inputs: Tensor, d_out: Tensor) -> Tensor | None:
    """Add d_out^T inputs to a weight's fp32 `main_grad`, as megatron's fused layers do.

    Returns:
        Placeholder gradient for autograd, not initialized, which megatron drops; it marks the
        weight as finished. None if an embedding shares the weight, because the embedding's own
        gradient marks it.
    """
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, d_out, weight.main_grad)
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return None
    # of the weight's own strides, because autograd would copy others
    return torch.empty_like(weight)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """List the distributed optimizers of Megatron's (possibly chained) optimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _wraps_torch_adam(part: Any) -> bool:
    inner = part.optimizer
    return isinstance(inner, torch.optim.Adam) and not isinstance(inner, HostAdamW)


def _holds_masters(part: Any) -> bool:
    """Return whether the inner optimizer has the fp32 weights, beside those of the model."""
    return bool(part.config.use_precision_aware_optimizer)


@contextlib.contextmanager
def host_optimizer(config: Any, threads: int) -> Iterator[None]:
    """Let Megatron build `HostAdamW` as its optimizer on the CPU inside the block.

    Args:
        config: Megatron's. Its own check of these values fails without Transformer Engine.
        threads: Number of threads of an update.
    """
    config.optimizer_cpu_offload = config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    before = megatron_optimizer.HybridDeviceOptimizer
    megatron_optimizer.HybridDeviceOptimizer = partial(HostAdamW, threads=threads)
    try:
        yield
    finally:
        megatron_optimizer.HybridDeviceOptimizer = before


def adapt_masters(optimizer: Any) -> None:
    """Complete Megatron's optimizers whose inner optimizer has the fp32 weights.

    Megatron does not set these when other weights are loaded. FusedAdam makes fp32 copies of all
    bf16 moments at once when it updates, saves or loads.
    """
    for part in filter(_holds_masters, optimizer_parts(optimizer)):
        part._copy_model_params_to_main_params = partial(_reload_masters, part.optimizer)
        if isinstance(part.optimizer, HostAdamW):
            continue
        part.optimizer.step = partial(_step_in_pieces, part.optimizer, part.optimizer.step)
        part.optimizer.state_dict = partial(torch.optim.Optimizer.state_dict, part.optimizer)
        part.optimizer.load_state_dict = partial(load_groups, part.optimizer)


def _reload_masters(inner: Any, state_dict: None = None) -> None:
    """Set the fp32 weights that exist to the weights of the model."""
    del state_dict
    for group in inner.param_groups:
        for parameter in group["params"]:
            if inner.state.get(parameter):
                weights = parameter.detach()
                if not isinstance(inner, HostAdamW):  # which converts them itself
                    weights = weights.float()
                inner.set_scaled_state(parameter, "master_param", weights)


def _step_in_pieces(inner: Any, step: Any) -> None:
    """Update a few parameters at a time."""
    groups = inner.param_groups
    try:
        for group in groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            for parameters in _pieces(group["params"]):
                inner.param_groups = [{**settings, "params": parameters}]
                step()
                group["step"] = inner.param_groups[0]["step"]
    finally:
        inner.param_groups = groups


def _pieces(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Divide parameters into lists of at most `MOMENTS_PIECE` numbers, or of one parameter."""
    piece: list[Tensor] = []
    for parameter in parameters:
        if piece and sum(p.numel() for p in (*piece, parameter)) > MOMENTS_PIECE:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece


def create_optimizer_state(optimizer: Any) -> None:
    """Create Adam's state, which a checkpoint is saved from or loaded into; change no weight.

    Megatron creates the state of torch's Adam by an update with zero gradients. These take as much
    memory as the fp32 weights.
    """
    for part in optimizer_parts(optimizer):
        if part.optimizer.state:
            continue
        if _holds_masters(part):
            _initialize_masters(part.optimizer)
            continue
        if not _wraps_torch_adam(part):
            part.init_state_fn(part.optimizer, part.config)
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.numel():  # torch keeps no state for an empty shard
                    part.optimizer.state[parameter] = _zero_state(parameter, bool(group["fused"]))


def _initialize_masters(inner: Any) -> None:
    # Megatron's function lacks this argument of FusedAdam
    given = {} if isinstance(inner, HostAdamW) else {"store_param_remainders": False}
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.initialize_state(parameter, **given)


def _zero_state(parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    """Make torch's state before the first update; a fused optimizer counts on the device."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def accept_loaded_state(optimizer: Any) -> None:
    """Let a loaded state without torch's `step` entry keep the one that is there."""
    for part in optimizer_parts(optimizer):
        if not _wraps_torch_adam(part) or hasattr(part, "_keeps_step"):
            continue
        part._keeps_step = True
        part._set_main_param_and_optimizer_states = _keep_step(part)


def _keep_step(part: Any) -> Any:
    inner = part._set_main_param_and_optimizer_states

    def set_state(model_param: Any, tensors: dict[str, Tensor]) -> None:
        state = _state_of(part, model_param)
        inner(model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return set_state


def _state_of(part: Any, model_param: Any) -> dict[str, Tensor]:
    group, order = part.model_param_group_index_map[model_param]
    return part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]


def load_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load optimizer state for every parameter dtype, with a step counter per parameter."""
    parts = optimizer_parts(optimizer)
    before = [[dict(group) for group in part.optimizer.param_groups] for part in parts]
    with torch.no_grad():  # fp32 main shards are views of leaf parameters
        optimizer.load_state_dict(state)
    for part, groups in zip(parts, before, strict=True):
        for group, known in zip(part.optimizer.param_groups, groups, strict=True):
            # a checkpoint of another Adam lacks some of this one's settings
            group.update({key: value for key, value in known.items() if key not in group})
        if _wraps_torch_adam(part):
            # torch increments the counter in place, once per parameter that shares it
            for entry in part.optimizer.state.values():
                entry["step"] = entry["step"].clone()
        else:
            for group in part.optimizer.param_groups:
                group["step"] = int(group.get("step", 0))  # torch's Adam counts in floating point


def reduced_gradient(optimizer: Any, parameter: Any, group: dist.ProcessGroup) -> Tensor:
    """Return the whole reduced gradient; each data rank holds only a shard of it."""
    whole = torch.zeros_like(parameter.main_grad).view(-1)
    for part in optimizer_parts(optimizer):
        if parameter in part.model_param_group_index_map:
            shard = part._get_model_param_range_map(parameter)["param"]
            own = slice(shard.start, shard.end)
            whole[own] = parameter.main_grad.view(-1)[own]
    dist.all_reduce(whole, group=group)
    return whole.view_as(parameter.main_grad)


def zero_optimizer_rows(optimizer: Any, parameter: Any, rows: list[int]) -> None:
    """Zero rows of a parameter's fp32 copy and Adam moments, wherever this rank holds them."""
    width = parameter[0].numel()
    for part in optimizer_parts(optimizer):
        if parameter not in part.model_param_group_index_map:
            continue
        shard = part._get_model_param_range_map(parameter)["param"]
        tensors = _stored_state(part, parameter)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            for row in rows if name in tensors else ():
                first = min(max(row * width, shard.start), shard.end) - shard.start
                last = min(max((row + 1) * width, shard.start), shard.end) - shard.start
                tensors[name].detach()[first:last].zero_()


def parameter_state(part: Any, parameter: Any) -> dict[str, Tensor]:
    """Return this rank's shard of a parameter in fp32: `param` and Adam's moments.

    Moments in bf16 are converted on the host, so that a save needs no memory of the GPU for them.
    """
    return {
        name: tensor if tensor.dtype == torch.float32 else tensor.cpu().float()
        for name, tensor in _stored_state(part, parameter).items()
    }


def _stored_state(part: Any, parameter: Any) -> dict[str, Tensor]:
    if not _holds_masters(part):
        tensors: dict[str, Tensor] = part._get_main_param_and_optimizer_states(parameter)
        return tensors
    state = dict(_state_of(part, parameter))
    return {"param": state.pop("master_param"), **state}


def clip_in_few_kernels() -> None:
    """Compute gradient norms in few kernels; megatron's own functions wait for each parameter."""
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(
    _chunk: int, _flag: Tensor, lists: list[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    norms = torch.stack(torch._foreach_norm(lists[0]))
    return torch.linalg.vector_norm(norms).reshape(1), None


def _scale(_chunk: int, _flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiply in place, because Megatron names the same tensors twice."""
    torch._foreach_mul_(lists[1], factor)


def accumulate_in_place(device: torch.device) -> bool:
    """Let the matrix product of a weight gradient add it to the fp32 buffer.

    Returns:
        Whether it does; a torch without matrix products of mixed precision cannot.
    """
    if layers._grad_accum_fusion_available:
        return True
    try:
        weight_grad = torch.zeros(16, 16, device=device)
        one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        _add_weight_gradient(one, one, weight_grad)
        _add_weight_gradient(one, one, weight_grad)
        if (weight_grad != 32.0).any():
            return False
    except (AttributeError, TypeError, RuntimeError):
        return False
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_add_weight_gradient
    )
    layers._grad_accum_fusion_available = True
    return True


def _add_weight_gradient(inputs: Tensor, d_out: Tensor, weight_grad: Tensor) -> None:
    """Add d_out^T inputs to `weight_grad`, float32 [out, in].

    `d_out` is [tokens, out], `inputs` [tokens, in].
    """
    if not len(inputs):  # an expert without tokens
        return
    if inputs.dtype == torch.float32:
        weight_grad.addmm_(d_out.t(), inputs)
    else:
        torch.ops.aten.addmm.dtype_out(
            weight_grad, d_out.t(), inputs, torch.float32, out=weight_grad
        )


def plan_save(strategy: Any, tensors: dict[str, Any], folder: Path) -> Any:
    """Plan a checkpoint and return Megatron's request to write it with Megatron's own writers.

    Since 0.17 Megatron prefers the writers of another package, nvidia-resiliency-ext.
    """
    chosen = "async_strategy" in inspect.signature(strategy.async_save).parameters
    return strategy.async_save(tensors, folder, **({"async_strategy": "mcore"} if chosen else {}))


def use_results_queue(queue: Any) -> None:
    """Let the processes that write a checkpoint return their results through this queue."""
    filesystem_async._results_queue = queue


def rng_state_setter() -> tuple[Any, str]:
    """Return owner and name of the function with which Megatron's tracker sets a random state."""
    return megatron_random, "_set_cuda_rng_state"


def close_process_groups() -> None:
    """Close megatron's groups, which hold threads and connections; megatron only drops them."""
    for group in parallel_state._global_process_group_list or ():
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
