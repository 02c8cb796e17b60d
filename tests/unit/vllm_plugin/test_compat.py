"""Signatures that the plugin relies on, in the wheels of every tested version of vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dms_train.vllm_plugin import compat
from dms_train.vllm_plugin.compat import REQUIRED, TESTED, difference

MODELS = Path(compat.__file__).with_name("models.py")


def download(version: str, folder: Path) -> Path:
    """The wheel of a version; it is kept in pytest's cache."""
    pattern = f"vllm-{version}.*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)]
        options = ["--only-binary=:all:", "--python-version=3.12", *platforms, "-d", str(folder)]
        done = subprocess.run(
            [*command, *options, f"vllm=={version}.*"],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"pip finds no wheel of vllm {version}: {done.stderr.strip()[-200:]}")
    return next(folder.glob(pattern))


def parameters(tree: ast.AST, path: str) -> list[str] | None:
    """Parameters of a function, or fields of a dataclass; None if there is no such name."""
    for name in path.split("."):
        body = [n for n in tree.body if getattr(n, "name", None) == name]
        if not body:
            return None
        tree = body[0]
    if isinstance(tree, ast.ClassDef):
        return [n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)]
    names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    return names[1:] if names[:1] == ["cls"] else names  # as `inspect` has them


def model_classes() -> dict[str, str]:
    """Classes of vLLM that the plugin's models extend, by module."""
    imports = [n for n in ast.walk(ast.parse(MODELS.read_text())) if isinstance(n, ast.ImportFrom)]
    prefix = "vllm.model_executor.models."
    names = {n.module: n.names[0].name for n in imports if n.module.startswith(prefix)}
    return {module: name for module, name in names.items() if name.endswith("ForCausalLM")}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", TESTED)
def test_wheels_have_the_required_signatures(version, request):
    folder = request.config.cache.mkdir("vllm_wheels")
    problems = []
    with zipfile.ZipFile(download(version, folder)) as wheel:
        for hook, required in REQUIRED.items():
            module, _, path = hook.partition(":")
            tree = ast.parse(wheel.read(f"{module.replace('.', '/')}.py"))
            found = parameters(tree, path)
            missing = "missing" if found is None else difference(found, *required)
            problems += [(hook, missing)] if missing else []
        for module, name in model_classes().items():
            source = wheel.read(f"{module.replace('.', '/')}.py").decode()
            assert f"class {name}(" in source
            if "Attention(" in source:  # Phi-4 has that of Llama
                assert "self.rotary_emb(positions, q, k)" in source
                assert "self.attn(q, k, v)" in source
        llama = wheel.read("vllm/model_executor/models/llama.py").decode()
        for name in ("def _init_model(", " layer_type:", "attn_layer_type:", "_init_rotary_emb("):
            assert name in llama  # the layers of OLMo 3 are given there
    assert problems == []


def test_a_signature_differs_by_its_first_missing_name():
    assert difference(["self", "a", "b", "c"], ("self", "a"), ("c",)) is None
    assert difference(["self", "b", "a"], ("self", "a"), ()) == "a"
    assert difference(["self"], ("self", "a"), ()) == "a"
    assert difference(["self", "a"], ("self",), ("a", "c")) == "c"
