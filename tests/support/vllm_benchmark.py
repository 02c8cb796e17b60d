"""The benchmark's process with vLLM's GPU engine on a CPU: see `vllm_cpu`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tests.support import vllm_cpu

# An engine without CUDA graphs and compiled kernels, which a CPU cannot run.
_ON_CPU = {
    "dtype": "float32",
    "enforce_eager": True,
    "disable_custom_all_reduce": True,
    "compilation_config": {"custom_ops": ["none"]},
    "kv_cache_memory_bytes": None,  # the executor states the memory
}


def main() -> None:
    vllm_cpu.pretend_gpu()
    vllm_cpu.leave_out_idle_work()
    vllm_cpu.pretend_platform()
    words = sys.argv
    sys.argv = [words[0], "", tempfile.mkdtemp()]  # the executor's folder
    import vllm

    from benchmarks.serve import vllm_engine, vllm_server
    from tests.support.vllm_engine import Recorder

    class Applier(Recorder):
        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), *_: Any, **__: Any
        ) -> Any:
            return [args[0](self.runner.model)] if method == "apply_model" else [None]

    vllm.LLM = _started(vllm.LLM, Applier)
    vllm_server.SERVE = [sys.executable, "-m", "tests.support.vllm_server"]
    sys.argv = words
    vllm_engine.main()


def _started(engine: Callable[..., Any], executor: type) -> Callable[..., Any]:
    def start(**options: Any) -> Any:
        bytes_given = options.get("kv_cache_memory_bytes")
        blocks = options.pop("num_gpu_blocks_override", None) or (40 if bytes_given else 2100)
        return engine(
            **{**options, **_ON_CPU},
            num_gpu_blocks_override=blocks,
            distributed_executor_backend=executor,
        )

    return start


if __name__ == "__main__":
    main()
