"""State of a retrofitted model in vLLM's model runner V2: cache rows, batches, reports of pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from dms_train.vllm_plugin.batch import StepInputs, batch_attention, compile_steps
from dms_train.vllm_plugin.cache import GrantedCache
from dms_train.vllm_plugin.mixed_steps import MixedSteps


class ReportingSampler:
    """Sampler that adds the pages of each request to its output.

    They take the field for NaNs in logits, which vLLM copies to the host with the sampled tokens.

    Args:
        sampler: Sampler of vLLM.
        pages: Pages of each request of a step; the next step overwrites them.
    """

    def __init__(self, sampler: Any, pages: Tensor) -> None:
        self._sampler, self._pages = sampler, pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does."""
        output = self._sampler(logits, input_batch, *args, **kwargs)
        output.num_nans = most_of_ranks(self._pages[: len(input_batch.idx_mapping)].clone())
        return output


def most_of_ranks(pages: Tensor) -> Tensor:
    """Return the most pages of each request on any tensor-parallel rank; -1 after any fault.

    Ranks hold different KV heads, which evict different tokens. A credit must cover the fullest.

    Args:
        pages: Pages of each request on this rank, int32 [b]; -1 after a fault.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return pages
    fault = torch.iinfo(pages.dtype).max
    pages = torch.where(pages < 0, fault, pages)
    torch.distributed.all_reduce(pages, torch.distributed.ReduceOp.MAX, group=group.device_group)
    return torch.where(pages == fault, -1, pages)


def can_capture(config: Any, cache: GrantedCache) -> bool:
    """Return whether steps with parts of prompts may be captured.

    Graphs of layers with a window are not tested on a GPU. Experts on data-parallel ranks exchange
    tokens, so that the ranks must agree on the sizes of a step. Offloaded weights need waits.
    """
    parallel = config.parallel_config
    exchanges = parallel.data_parallel_size > 1 and parallel.is_moe_model is not False
    return (
        cache.device.type == "cuda"
        and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        and None not in cache.specs
        and not exchanges
        and isinstance(get_offloader(), NoopOffloader)
    )


class DMSModelState(DefaultModelState):
    """Model state that gives each request a row of the cache.

    A row is the request's index in vLLM's request state, which is fixed while the request runs.
    """

    def __init__(self, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, model, *args, **kwargs)
        self._attention, self._cache, tables = model.retrofit
        self._inputs = StepInputs(tables, requests=self.max_num_reqs)
        steps = MixedSteps(self._cache, self._inputs, self._forward, tokens=self.max_num_tokens)
        model.mixed_steps = self._mixed_steps = steps
        self._captures = can_capture(vllm_config, self._cache)
        self._captured = False
        self._rows: dict[str, int] = {}
        self._memory: Tensor | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Give a request, new or resumed after a preemption, an empty row.

        Raises:
            RuntimeError: Some of its tokens are already computed, in a cache that is gone.
        """
        super().add_request(req_index, new_req_data)
        if new_req_data.num_computed_tokens:
            raise RuntimeError(
                f"request {new_req_data.req_id} continues after {new_req_data.num_computed_tokens} "
                "tokens: streaming input is not supported with DMS; send the whole prompt"
            )
        self._rows[new_req_data.req_id] = req_index

    def remove_request(self, req_id: str) -> None:
        """Release the pages of a request that has finished or is preempted."""
        super().remove_request(req_id)
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._cache.free_row(row)

    def prepare_attn(
        self, input_batch: Any, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Set the inputs of a step and describe its batch for all layers.

        A replay of a captured step reads the inputs only. Dummy batches carry the rows of live
        requests; their rows are set to -1, so that they store nothing. With the first decode
        step that vLLM captures, the steps with parts of prompts are captured too, because vLLM
        then registers the buffers of reductions over ranks.

        Args:
            input_batch: The batch.
            *args: Not used: block tables and slot mappings have no meaning for the cache.
            for_capture: Whether the batch is a dummy of a decode step to capture.
            **kwargs: Not used.

        Returns:
            Metadata by name of the layer; None for a dummy batch that is not captured.
        """
        self._bind_memory()
        if for_capture and self._captures and not self._captured:
            self._mixed_steps.capture()
            self._captured = True
        is_real = all(req_id in self._rows for req_id in input_batch.req_ids)
        self._inputs.set_rows(input_batch.idx_mapping if is_real else input_batch.idx_mapping[:0])
        batch = None
        if is_real or for_capture:
            batch = batch_attention(self._cache, self._inputs, input_batch)
        return self._metadata(batch)

    def _metadata(self, batch: Any) -> dict[str, Any]:
        return {layer.layer_name: batch for layer in self._attention}

    def _forward(self, batch: Any, ids: Tensor, position: Tensor) -> Tensor:
        """Return the hidden states of a batch, without the graphs of vLLM."""
        config: Any = self.vllm_config
        with set_forward_context(self._metadata(batch), config, num_tokens=len(ids)):
            return self.model.hidden_states(ids, position)

    def _bind_memory(self) -> None:
        """Give the cache the memory of vLLM, which may replace one that it only measured with."""
        memory = self._attention[0].kv_cache
        if memory is not self._memory:
            self._cache.pool.bind(memory)
            self._memory = memory
            self._mixed_steps.forget()
            self._captured = False
            if self._cache.device.type == "cuda":
                heads, dtype = self._attention[0].num_heads, self.model_config.dtype
                compile_steps(self._cache, self._inputs, heads=heads, dtype=dtype)

    def custom_sampler(self, sampler: Any) -> tuple[ReportingSampler, None]:
        """Wrap the sampler."""
        return ReportingSampler(sampler, self._inputs.pages), None
