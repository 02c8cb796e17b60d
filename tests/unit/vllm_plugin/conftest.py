"""vLLM's engine in a process of its own, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Functions of the driver that vLLM's libraries are linked with; no test calls one.
_DRIVER = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    *("cuGetErrorString", "cuGetProcAddress_v2", "cuInit", "cuMemAddressFree"),
    *("cuMemAddressReserve", "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap"),
    *("cuMemRelease", "cuMemSetAccess", "cuMemUnmap", "cuPointerGetAttribute"),
    "cuTensorMapEncodeTiled",
)
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it asks the GPU for its random state
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; pip install 'dms-train[vllm]'")


@pytest.fixture(scope="session")
def vllm_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which vLLM's CUDA platform can be imported without a driver."""
    require_vllm()
    if shutil.which("cc") is None:
        pytest.skip("cc, a C compiler, is not installed")
    folder = tmp_path_factory.mktemp("driver")
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER)
    library = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(folder / "libcuda.so.1"), "-"]
    subprocess.run(library, input=code, text=True, check=True, timeout=60)
    paths = {"LD_LIBRARY_PATH": str(folder), "VLLM_CACHE_ROOT": str(folder / "cache")}
    return {**os.environ, **_VARIABLES, **paths}


def declare(site: Path, group: str) -> Path:
    """Declare the entry points of a group in a folder for sys.path, as if it was installed."""
    info = site / "dms_train-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dms-train\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = project["entry-points"][group].items()
    (info / "entry_points.txt").write_text(f"[{group}]\n{declared[0]} = {declared[1]}\n")
    return site


@pytest.fixture(scope="session")
def declared_loggers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for sys.path in which the package declares its loggers."""
    return declare(tmp_path_factory.mktemp("site"), "vllm.stat_logger_plugins")


@pytest.fixture(scope="session")
def in_vllm(
    vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """(name of a function in tests.support.vllm_cpu, jobs) -> its results, from one process."""

    def _in_vllm(function: str, jobs: list[dict[str, Any]]) -> list[Any]:
        folder = tmp_path_factory.mktemp("vllm")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.vllm_cpu", function, str(folder)],
            env=vllm_environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return json.loads((folder / "results.json").read_text())

    return _in_vllm
