"""vLLM on a GPU gives the tokens of the own engine, for every family and export format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from tests.support.vllm_gpu import NEW_TOKENS, PROMPTS
from tests.unit.vllm_plugin.conftest import ROOT, declare, require_vllm
from tests.unit.vllm_plugin.test_engine import CHANGES, EXPORTS, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PLUGINS = "vllm.general_plugins"
# vLLM's kernel for experts otherwise multiplies float32 with the precision of TF32
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
VARIABLES |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the entry point of the plugin, if the package is not installed."""
    require_vllm()
    folders = [str(ROOT)]
    if not any(point.name == "dms" for point in entry_points(group=PLUGINS)):
        folders.append(str(declare(tmp_path_factory.mktemp("site"), PLUGINS)))
    return os.pathsep.join((*folders, os.environ.get("PYTHONPATH", "")))


@pytest.mark.parametrize("name", EXPORTS)
def test_tokens_are_those_of_the_own_engine(name: str, path: str, tmp_path: Path) -> None:
    export = write(tmp_path / "export", *EXPORTS[name], **CHANGES.get(name, {}))
    result = tmp_path / "result.json"
    words = [sys.executable, "-m", "tests.support.vllm_gpu", export, str(result)]
    given = IEEE if EXPORTS[name][0] in ("qwen3_moe", "gpt_oss") else {}
    env = {**os.environ, **VARIABLES, **given, "PYTHONPATH": path}
    process = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    generated = json.loads(result.read_text())
    assert [len(tokens) for tokens in generated["engine"]] == [NEW_TOKENS] * PROMPTS
    assert generated["held"] < 0.9
    assert generated["vllm"] == generated["engine"]
