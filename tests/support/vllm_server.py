"""vLLM's HTTP server on a CPU: `python -m tests.support.vllm_server MODEL OPTION ...`.

See `vllm_cpu`. vLLM's engine runs in a process that imports this module again, so the replacements
are made when it is imported.
"""

from __future__ import annotations

import sys
import tempfile

from tests.support import vllm_cpu

vllm_cpu.pretend_gpu()
vllm_cpu.leave_out_idle_work()
vllm_cpu.pretend_platform()

from dms_train.vllm_plugin.plugin import register  # noqa: E402
from tests.support.vllm_engine import Recorder  # noqa: E402

register()


class ServingRecorder(Recorder):
    """Executor whose folder is temporary."""

    def _init_executor(self) -> None:
        sys.argv = [sys.argv[0], "", tempfile.mkdtemp()]
        super()._init_executor()


def main() -> None:
    from vllm.entrypoints.cli.main import main as run_command

    sys.argv = [
        *("vllm", "serve", *sys.argv[1:], "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--disable-custom-all-reduce"),
        *("--compilation-config", '{"custom_ops": ["none"]}', "--num-gpu-blocks-override", "200"),
        *("--distributed-executor-backend", "tests.support.vllm_server.ServingRecorder"),
    ]
    run_command()


if __name__ == "__main__":
    main()
