"""Packages import downwards only, every module imports, and optional packages stay optional."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dms_train",)
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
OPTIONAL = (
    *("megatron", "hydra", "omegaconf", "psutil", "rich", "transformers"),
    *("starlette", "uvicorn", "pydantic", "prometheus_client"),
    *("datasets", "pyarrow", "math_verify", "lm_eval", "matplotlib", "wandb"),
)
# by the process that reads entry points, or before the version of vLLM is known to fit
WITHOUT_VLLM = [
    f"dms_train.vllm_plugin.{name}"
    for name in ("cache", "compat", "configurations", "errors", "plugin")
]


def modules() -> list[str]:
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        found += [m.name for m in pkgutil.walk_packages(module.__path__, f"{package}.")]
    return [name for name in found if not name.endswith("__main__")]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_import_contracts():
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", modules())
def test_every_module_imports(name):
    if name.startswith("dms_train.vllm_plugin.") and name not in WITHOUT_VLLM:
        pytest.importorskip("vllm")
    importlib.import_module(name)


def test_generation_needs_base_packages_only():
    done = python(f"{BLOCK}import dms_train.inference.exports, dms_train.server.async_llm")
    assert done.returncode == 0, done.stderr


def test_configuration_is_read_without_torch():
    done = python(
        "import sys\n"
        "import dms_train.planning.check, dms_train.cli.plan\n"
        "from dms_train.cli.config_source import compose\n"
        "compose(['experiment=tiny_pretrain'])\n"
        "sys.exit(', '.join({'torch', 'megatron', 'numpy', 'wandb'} & set(sys.modules)) or 0)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", SCRIPTS.values(), ids=SCRIPTS)
def test_help_is_shown_without_packages_that_take_seconds(target):
    module, _, function = target.partition(":")
    done = python(
        "import sys\n"
        f"from {module} import {function}\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n"
        f"    {function}()\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'torch', 'megatron', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() or "dms-train" in done.stdout


def test_data_is_written_without_torch(tmp_path):
    words = ["exam-sheets", "--out", str(tmp_path / "data"), "--sheets", "20"]
    done = python(
        "import sys\n"
        "from dms_train.data_prep import prepare\n"
        f"assert prepare.main({words!r}) == 0\n"
        "sys.exit(', '.join({'torch', 'megatron', 'hydra'} & set(sys.modules)) or 0)\n"
    )
    assert done.returncode == 0, done.stderr
