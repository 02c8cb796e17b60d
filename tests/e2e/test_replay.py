"""A batch that stopped a run is computed again, and the samples that did it are named."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dms_train.app.preparation import prepare
from dms_train.app.samples import datasets
from dms_train.cli import replay
from dms_train.config.frozen import read_frozen
from dms_train.mcore import groups
from tests.support import refusals

BATCH, STEPS = 4, 12


def words(folder: Path, run: Path) -> list[str]:
    return [
        "train",
        f"model.path={folder / 'model'}",
        f"data.paths=[{folder / 'data' / 'train'}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.seq_length=32",
        "data.micro_batch_size=1",
        f"data.global_batch_size={BATCH}",
        "method.window=4",
        "stage.run=[pretrain]",
        f"stage.pretrain.steps={STEPS}",
        "run.max_skipped_steps=1",
        "run.save_interval=1",
        "run.eval_samples=0",
        f"run.dir={run}",
        "observe=quiet",
        "observe.progress=false",
    ]


def train_tokens(run: Path) -> list[set[int]]:
    """The tokens of every sample of a run."""
    prepared = prepare(read_frozen(run / "config.yaml"))
    view = groups.start(prepared.config.parallel, 1)
    try:
        train, _ = datasets(prepared, view)
        assert train is not None
        return [set(train[number].tokens.tolist()) for number in range(BATCH * STEPS)]
    finally:
        groups.stop()


def late_token(samples: list[set[int]]) -> tuple[int, list[int]]:
    """A token that first appears after the first steps, in some samples of its batch only."""
    for token in range(50):
        found = [number for number, tokens in enumerate(samples) if token in tokens]
        if found and found[0] >= 2 * BATCH:
            step = found[0] // BATCH
            batch = [number for number in found if number // BATCH == step]
            if len(batch) < BATCH:
                return token, batch
    raise AssertionError("no token appears late")


@pytest.mark.timeout(300)
def test_the_samples_that_are_not_finite_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    made = refusals.run_here(["data", "exam-sheets", "--out", str(data), "--sheets", "60"])
    assert made.code == 0, made.stderr
    refusals.write_model(model, data / "tokenizer", tie_word_embeddings=False)
    sound = refusals.run_here(words(tmp_path, tmp_path / "sound"))
    assert sound.code == 0, sound.stderr
    token, expected = late_token(train_tokens(tmp_path / "sound"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = 3e38
    save_file(tensors, model / "model.safetensors", {"format": "pt"})

    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    stopped = refusals.run_here(words(tmp_path, Path("run")))
    assert stopped.code == 2, stopped.stderr
    (file,) = (run / "skipped").iterdir()
    described = json.loads(file.read_text())
    first = described["samples"][0]
    assert described["step"] == expected[0] // BATCH + 1
    assert described["samples"] == list(range(first, first + BATCH))
    frozen = run / "config.yaml"
    text = frozen.read_text()
    assert "cuda_graph: auto" in text
    frozen.write_text(text.replace("cuda_graph: auto", "cuda_graph: always"))  # as on a GPU
    shown, log = io.StringIO(), io.StringIO()
    monkeypatch.chdir(data)  # where run.dir=run is another folder
    with redirect_stdout(shown), redirect_stderr(log):
        assert replay.main([str(file)]) == 0
    assert f"resuming from {run}/checkpoints/step_{described['step'] - 1:08d}" in log.getvalue()
    assert not (data / "run").exists()
    lines = shown.getvalue().splitlines()
    assert len(lines) == BATCH
    bad = [line.partition(":")[0] for line in lines if "nan" in line]
    assert bad == [f"samples {number}" for number in expected]


def test_another_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.json").write_text("{}")
    assert replay.main([str(tmp_path / "step.json")]) == 2
    assert "not the record of a skipped step" in capsys.readouterr().err
