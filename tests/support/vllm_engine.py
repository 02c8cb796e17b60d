"""Jobs for vLLM's engine; imported after `vllm_cpu` has prepared the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase
from vllm.v1.worker.workspace import init_workspace_manager

from dms_train.vllm_plugin.attention import DMSMetadataBuilder
from dms_train.vllm_plugin.credit import CreditManager
from dms_train.vllm_plugin.state import most_of_ranks
from tests.support.vllm_cpu import MEMORY


def join(ranks: int, rank: int, store: str) -> None:
    """Join the process group of tensor-parallel ranks, which meet in the file `store`."""
    init_distributed_environment(ranks, rank, f"file://{store}", 0, "gloo")
    ensure_model_parallel_initialized(ranks, 1)


class Recorder(Executor):
    """Runs the model in this process and records each step."""

    supported_tasks = ("generate",)
    rank, store = 0, ""
    steps: list[dict[str, Any]]
    padded: list[Any]

    def _init_executor(self) -> None:
        config = self.vllm_config
        ranks = config.parallel_config.tensor_parallel_size
        config.device_config.device = torch.device("cpu")
        config.load_config.device = "cpu"
        self.steps = []
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                join(ranks, self.rank, self.store or f"{Path(sys.argv[2]).resolve()}/store")
            init_workspace_manager(torch.device("cpu"))
            self.runner = GPUModelRunner(config, torch.device("cpu"))
            self.runner.load_model()
        self.cache = self.runner.model.retrofit.cache
        steps, self.padded = self.runner.model.mixed_steps, []
        run = steps.run
        steps.run = lambda kind, *args: (self.padded.append(kind), run(kind, *args))[1]

    def determine_available_memory(self) -> list[int]:
        return [MEMORY]

    def get_kv_cache_specs(self) -> list[Any]:
        return [self.runner.get_kv_cache_spec()]

    def initialize_from_config(self, configs: list[Any]) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.runner.initialize_kv_cache(configs[0])
            if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
                self.runner.capture_model()

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [WorkerBase.get_supported_kv_cache_layouts(self)]  # from 0.33 on

    def set_kv_cache_layout(self, *_: Any) -> None:
        pass  # the process has one configuration

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, *_: Any, **__: Any) -> list[None]:
        return [None]

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        done = self.runner.execute_model(output)
        self._record(output)
        return self._returned(done, non_block)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        output = self.runner.sample_tokens(grammar)
        # on a GPU the next step may write its pages before the host has those of this one
        self.runner.model_state._inputs.pages.fill_(-1)
        if hasattr(output, "get_output"):
            output = output.get_output()
        self.steps[-1]["reported"] = output.num_nans_in_logits
        return self._returned(output, non_block)

    def _record(self, output: Any) -> None:
        cache, state = self.cache, self.runner.req_states
        counts = output.num_scheduled_tokens
        lengths = cache.lists.lengths
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = {name: state.req_id_to_index[name] for name in counts}
        self.steps.append(
            {
                "preempted": sorted(output.preempted_req_ids or ()),
                "used": int(cache.lists.pages(lengths).sum()),
                "free": int(cache.pool.free.left) if cache.is_bound else None,
                "block_ids": [list(r.block_ids) for r in output.scheduled_new_reqs],
                "requests": {
                    name: {
                        "new": count,
                        "seen": computed[name] + count,
                        "lengths": lengths[:, rows[name]].tolist(),
                    }
                    for name, count in counts.items()
                },
            }
        )

    @staticmethod
    def _returned(output: Any, non_block: bool) -> Any:
        if hasattr(output, "get_output"):
            output = output.get_output()
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def check_health(self) -> None:
        pass

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


class RepeatedCalls:
    """Stands for a full CUDA graph on a CPU: a replay repeats the calls of its capture.

    Attributes:
        replays: Number of replays of all graphs.
    """

    replays = 0

    def __init__(self, calls: Callable[..., None]) -> None:
        self._calls = calls

    def replay(self) -> None:
        RepeatedCalls.replays += 1
        self._calls(CUDAGraphMode.NONE)

    @staticmethod
    def capture(manager: Any, create_forward_fn: Callable[..., Any], *_: Any, **__: Any) -> Any:
        """Replacement of vLLM's capture, which needs a GPU."""
        for described in manager._capture_descs[CUDAGraphMode.FULL]:
            created = create_forward_fn(described, warmup=False)
            calls = created[0] if isinstance(created, tuple) else created  # 0.24; 0.33
            calls(CUDAGraphMode.NONE)
            manager.graphs[described] = RepeatedCalls(calls)
        manager._graphs_captured = True
        return {}


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """Like `generate`, with decode steps as full CUDA graphs; also the number of replays."""
    DMSMetadataBuilder._cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    CudaGraphManager.capture = RepeatedCalls.capture
    RepeatedCalls.replays = 0
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4]}
    return {**generate(job, graphs), "replays": RepeatedCalls.replays}


def configure(job: dict[str, Any]) -> dict[str, Any]:
    """Build the configuration of an engine; the error if it is refused."""
    os.environ.update(job["environment"])
    try:
        config = EngineArgs(model=job["model"], **job["options"]).create_engine_config()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for name in job["environment"]:
            del os.environ[name]
    return {
        "scheduler": config.scheduler_config.scheduler_cls,
        "prefix_caching": config.cache_config.enable_prefix_caching,
    }


def generate(job: dict[str, Any], graphs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Continue `prompts` greedily; the tokens, and after each step the lengths of all KV lists.

    Tensor-parallel ranks are processes with a scheduler each, which share the file `store`.
    """
    Recorder.rank, Recorder.store = job.get("rank", 0), job.get("store", "")
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        generation_config="vllm",
        enforce_eager=graphs is None,
        disable_custom_all_reduce=True,
        distributed_executor_backend=Recorder,
        num_gpu_blocks_override=job["blocks"],
        compilation_config={"custom_ops": ["none"], **(graphs or {})},
        **job["options"],
    )
    core = llm.llm_engine.engine_core.engine_core
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in job["max_tokens"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    pool = core.scheduler.kv_cache_manager.block_pool
    recorder = core.model_executor
    recorder.execute_model(core.scheduler.schedule())  # workers learn of the last finished requests
    return {
        "tokens": [o.outputs[0].token_ids for o in outputs],
        "names": [o.request_id for o in outputs],
        "steps": recorder.steps,
        "padded": recorder.padded,
        "scheduler": type(core.scheduler).__name__,
        "free_blocks": pool.get_num_free_blocks(),
        "pages": recorder.cache.pool.max_pages,
        "block_bytes": core.scheduler.kv_cache_config.kv_cache_tensors[0].size // job["blocks"],
    }


def agree(job: dict[str, Any]) -> list[int]:
    """Reduce the pages of one of two tensor-parallel ranks."""
    with set_current_vllm_config(VllmConfig()):
        join(2, job["rank"], job["store"])
    return most_of_ranks(torch.tensor(job["pages"], dtype=torch.int32)).tolist()


def starve(job: dict[str, Any]) -> str:
    """Charge one block for each request instead of what it may need; the error that follows."""
    CreditManager._bound = lambda *_: 1
    try:
        generate(job)
    except Exception as error:
        return str(error)
    return ""
