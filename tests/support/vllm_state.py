"""The model state of the vLLM plugin with stand-ins for its parts; see `vllm_cpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.offloader.base import NoopOffloader, set_offloader

from dms_train.vllm_plugin import state as module
from dms_train.vllm_plugin.state import DMSModelState, can_capture


def calls(_: dict[str, Any]) -> dict[str, list[str]]:
    """Return what the state calls when memory is bound and when vLLM captures steps."""
    made: list[str] = []
    layer = SimpleNamespace(layer_name="0", num_heads=2, kv_cache=torch.zeros(1))
    state = DMSModelState.__new__(DMSModelState)
    state._attention, state._rows, state._memory = [layer], {}, None
    pool = SimpleNamespace(bind=lambda memory: None)
    state._cache = SimpleNamespace(pool=pool, device=torch.device("cuda"))
    state._inputs = SimpleNamespace(set_rows=lambda rows: None)
    state._mixed_steps = SimpleNamespace(
        forget=lambda: made.append("forget"), capture=lambda: made.append("capture")
    )
    state._captures, state._captured = True, False
    state.model_config = SimpleNamespace(dtype=torch.float32)
    module.compile_steps = lambda *_, **__: made.append("compile")
    module.batch_attention = lambda *_: None
    batch = SimpleNamespace(req_ids=["dummy"], idx_mapping=torch.zeros(1))

    def step(for_capture: bool) -> list[str]:
        made.clear()
        state.prepare_attn(batch, for_capture=for_capture)
        return list(made)

    found = {"measuring": step(False), "captured": step(True), "again": step(True)}
    layer.kv_cache = torch.zeros(2)
    found |= {"rebound": step(False), "captured anew": step(True)}
    state._captures, state._captured = False, False
    return {**found, "off": step(True)}


def gates(_: dict[str, Any]) -> dict[str, bool]:
    """Return whether steps are captured with each of some options."""

    def captured(
        mode: Any = CUDAGraphMode.FULL_AND_PIECEWISE,
        specs: tuple[Any, ...] = ("dms",),
        device: str = "cuda",
        ranks: int = 1,
        experts: bool | None = None,
    ) -> bool:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=ranks, is_moe_model=experts),
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
        )
        return can_capture(config, SimpleNamespace(device=torch.device(device), specs=specs))

    set_offloader(NoopOffloader())
    found = {
        "default": captured(),
        "no graphs": captured(mode=CUDAGraphMode.NONE),
        "a layer with a window": captured(specs=("dms", None)),
        "a CPU": captured(device="cpu"),
        "experts on data-parallel ranks": captured(ranks=2, experts=True),
        "data-parallel ranks without experts": captured(ranks=2, experts=False),
    }
    set_offloader(SimpleNamespace())
    return {**found, "offloaded weights": captured()}
