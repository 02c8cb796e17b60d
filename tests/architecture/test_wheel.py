"""The built wheel in clean environments: its contents, its commands, and what each extra adds."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
import urllib.request
from pathlib import Path

import pytest

from tests.support import clean_environment
from tests.support.clean_environment import ROOT, CleanEnvironment

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
OPTIONAL = {
    "megatron": {"train"},
    "hydra": {"train", "eval"},
    "transformers": {"train", "serve", "eval", "data"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "lm_eval": {"eval"},
    "math_verify": {"data", "eval"},
    "matplotlib": {"eval"},
    "datasets": {"data", "eval"},
    "gguf": {"gguf"},
    "wandb": {"track"},
}
# Commands that need an extra, and the line that they print without it. The others need none.
NEEDED = {
    ("dms-train", "experiment=demo"): 'dms-train needs hydra-core: pip install "dms-train[train]"',
    ("dms-plan", "experiment=demo"): 'dms-plan needs hydra-core: pip install "dms-train[train]"',
    (
        "dms-eval",
        "task.name=exam_sheets",
    ): 'dms-eval needs hydra-core: pip install "dms-train[eval]"',
    ("dms-eval", "harness", ".", "--tasks", "gsm8k"): (
        'dms-eval needs datasets: pip install "dms-train[eval]"'
    ),
    ("dms-serve", "."): 'dms-serve needs uvicorn: pip install "dms-train[serve]"',
    ("dms-import", ".", "out"): 'dms-import needs megatron-core: pip install "dms-train[train]"',
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_environment.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def base(wheel: Path) -> CleanEnvironment:
    return clean_environment.make(wheel.parent / "base", wheel)


@pytest.fixture(scope="module")
def train(wheel: Path) -> CleanEnvironment:
    return clean_environment.make(wheel.parent / "train", wheel, "train")


@pytest.fixture(scope="module")
def serve(wheel: Path) -> CleanEnvironment:
    return clean_environment.make(wheel.parent / "serve", wheel, "serve")


@pytest.fixture(scope="module")
def export(train: CleanEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in the environment with [train]."""
    folder = tmp_path_factory.mktemp("run")
    train.run("dms-data", "exam-sheets", "--out", "data", "--sheets", "60", cwd=folder)
    words = (
        f"model.path={train.site / 'dms_train' / 'assets' / 'exam_teacher'}",
        "data.paths=[data/train]",
        "data.seq_length=64",
        "data.micro_batch_size=2",
        "data.global_batch_size=2",
        "stage.run=[zero_neuron,retrofit,export]",
        "stage.zero_neuron.steps=1",
        "stage.retrofit.target_cr=2",
        "stage.retrofit.steps_per_cr=1",
        "method.window=8",
        "run.eval_samples=0",
        "run.dir=run",
        "observe=quiet",
    )
    train.run("dms-train", *words, cwd=folder)
    return folder / "run" / "exports" / "final" / "hf"


def files(package: Path) -> set[str]:
    return {
        str((Path(folder) / name).relative_to(package))
        for folder, _, names in os.walk(package)
        for name in names
        if not folder.endswith("__pycache__")
    }


def importable(environment: CleanEnvironment, cwd: Path) -> set[str]:
    code = f"import importlib.util as u; print(*(n for n in {list(OPTIONAL)} if u.find_spec(n)))"
    return set(environment.run("python", "-c", code, cwd=cwd).stdout.split())


def test_the_wheel_has_every_file_of_the_package(base):
    assert files(base.site / "dms_train") == files(ROOT / "dms_train")
    assert not any(path.is_symlink() for path in (ROOT / "dms_train").rglob("*"))


def test_the_checkout_is_not_importable_there(base, tmp_path):
    code = "import dms_train; print(dms_train.__file__)"
    found = base.run("python", "-c", code, cwd=tmp_path).stdout.strip()
    assert Path(found) == base.site / "dms_train" / "__init__.py"


@pytest.mark.parametrize("extra", ["", "train", "serve", "eval", "data"])
def test_an_environment_has_the_packages_of_its_extra_only(request, wheel, tmp_path, extra):
    if extra in ("", "train", "serve"):
        environment = request.getfixturevalue(extra or "base")
    else:
        environment = clean_environment.make(tmp_path / "environment", wheel, extra)
    expected = {name for name, extras in OPTIONAL.items() if extra in extras}
    assert importable(environment, tmp_path) == expected


@pytest.mark.parametrize("name", sorted({*SCRIPTS} - {"dms-train"}))  # whose help Hydra prints
def test_every_command_answers_help_without_extras(base, tmp_path, name):
    output = base.run(name, "--help", cwd=tmp_path).stdout
    assert name in output
    assert len(output.splitlines()) > 5


@pytest.mark.parametrize("words", NEEDED, ids=" ".join)
def test_a_command_names_the_extra_that_it_needs(base, tmp_path, words):
    assert base.run(*words, cwd=tmp_path, code=2).stderr.splitlines() == [NEEDED[words]]


def test_base_loads_an_export_and_generates(base, export, tmp_path):
    code = (
        "import sys\n"
        "from dms_train import SamplingParams, load_export\n"
        "llm = load_export(sys.argv[1], max_num_seqs=1)\n"
        "print(llm.spec.window, len(llm.generate('1', SamplingParams(max_tokens=3))))\n"
    )
    assert base.run("python", "-c", code, export, cwd=tmp_path).stdout.split() == ["8", "1"]
    shown = base.run("dms-generate", export, "--prompt", "1x+2=5:", cwd=tmp_path).stdout
    assert "cr_factor" in shown
    assert "dms" in base.run("dms-inspect", export, cwd=tmp_path).stdout


def test_base_compares_an_export_with_its_original_on_problems(base, export, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1x+2=5:", "answers": ["3"]}\n')
    teacher = base.site / "dms_train" / "assets" / "exam_teacher"
    words = ("dms-validate", export, "--teacher", teacher, "--output", "report", "--max-tokens")
    shown = base.run(*words, "2", "--problems", "problems.jsonl", cwd=tmp_path).stdout
    assert "Self-test through the compact cache: passed" in shown
    needed = base.run(*words, "2", "--data", "corpus", cwd=tmp_path, code=2).stderr
    assert needed == 'dms-validate needs megatron-core: pip install "dms-train[train]"\n'


def test_serve_answers_requests(serve, export, tmp_path):
    with subprocess.Popen(
        [serve.bin / "dms-serve", export, "--port", "0"],
        cwd=tmp_path,
        env=clean_environment.variables(),
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            address = next(
                word for line in server.stderr for word in line.split() if "http://" in word
            )
            body = json.dumps({"prompt": "1x+2=5:", "max_tokens": 3}).encode()
            request = urllib.request.Request(
                f"{address.rstrip('/')}/v1/completions",
                body,
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 3
        finally:
            server.terminate()


def test_train_plans_composes_and_verifies(train, export, tmp_path):
    output = train.run(
        "dms-train", "experiment=demo", "--cfg", "job", "--resolve", cwd=tmp_path
    ).stdout
    assert "target_cr: 4" in output
    assert str(train.site / "dms_train" / "assets") in output
    plan = train.run("dms-plan", "experiment=tiny_pretrain", cwd=tmp_path).stdout
    assert "stage pretrain" in plan
    assert "PASS" in train.run("dms-verify", export, cwd=tmp_path).stdout
    assert "dms-train" in train.run("dms-train", "--help", cwd=tmp_path).stdout
