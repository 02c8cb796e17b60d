"""The stage `teacher_logits` stores what a retrofit needs, and the retrofit reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dms_train.app import teacher_logits
from dms_train.config.build import ConfigError
from dms_train.data.errors import DataError
from dms_train.hf.rope import RopeScaling
from dms_train.training import loop
from tests.support.training_loop import FakeParts
from tests.support.wiring import Assets, Built

SAMPLES = 40  # the stages of the runs below take 32
STORES = {"stage.run": ["teacher_logits"], "stage.teacher_logits": {"samples": SAMPLES, "top_k": 8}}
WHOLE = {"stage.teacher_logits": {"samples": SAMPLES, "top_k": 50}}  # the vocabulary


def store(run: Built, **fakes: Any) -> bool:
    """Run the stage, and return whether it came to its end."""
    watch = FakeParts(**fakes)
    return run.components.teacher_pass.store(watch)


@pytest.fixture(scope="module")
def stored(assets: Assets, view: Any, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A finished stage with all probabilities, whose first try was stopped."""
    changes = {key.replace(".", "__"): value for key, value in {**STORES, **WHOLE}.items()}
    run = Built(assets, tmp_path_factory.mktemp("stored"), view, **changes)
    assert not store(run, stops_at=0)
    (run.folder / "run/teacher_logits/train/000000004-0of1.safetensors.partial").write_text("half")
    assert store(run)
    return run


def losses(run: Built) -> list[float]:
    """Take the steps of a run and return the KL of each."""
    results: list[Any] = []
    step = run.engine.train_step

    def recorded(*arguments: Any) -> Any:
        results.append(step(*arguments))
        return results[-1]

    run.engine.train_step = recorded  # type: ignore[method-assign]
    stages = run.prepared.stages[:-1]  # without the export
    loop.run(stages, run.prepared.start.state, run.components)
    return [result.terms["kl"] for result in results]


def test_every_sample_is_stored_once_with_its_distribution(stored: Built) -> None:
    folder = stored.folder / "run" / "teacher_logits"
    files = [load_file(path) for path in sorted((folder / "train").glob("*.safetensors"))]
    numbers = torch.cat([file["samples"] for file in files])
    assert numbers.tolist() == list(range(SAMPLES))
    probabilities = files[3]["log_probs"].double().exp().sum(-1)
    torch.testing.assert_close(probabilities, torch.ones_like(probabilities), rtol=0, atol=2e-3)
    assert len(load_file(next((folder / "valid").iterdir()))["samples"]) == 2
    assert json.loads((folder / "teacher.json").read_text())["complete"]


def test_a_retrofit_without_the_teacher_is_the_one_with_it(
    built: Callable[..., Built], stored: Built
) -> None:
    """teacher.logits"""
    live, offline = built(), built(**{"teacher.logits": str(stored.folder / "run")})
    assert live.engine.has_teacher
    assert not offline.engine.has_teacher
    # probabilities are stored in 16 bits, and these KLs are tiny
    assert losses(offline) == pytest.approx(losses(live), rel=0.25, abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.seq_length": 24}, "data.seq_length=32 and this run has 24"),
        ({"run.seed": 5}, "run.seed=1234 and this run has 5"),
        ({"loss": {"kl_temperature": 2.0}}, "kl_temperature=1.0 and this run has 2.0"),
        ({"run.eval_samples": 4}, "run.eval_samples=2 and this run has 4"),
        ({"stage.retrofit.steps_per_cr": 20}, "holds 40 samples and this run takes 176"),
    ],
)
def test_what_was_stored_for_other_runs_is_refused(
    built: Callable[..., Built], stored: Built, changes: dict[str, Any], message: str
) -> None:
    run = built(**{"teacher.logits": str(stored.folder / "run"), **changes})
    with pytest.raises(ConfigError, match=message):
        _ = run.prepared


def test_too_few_validation_samples_are_refused_before_the_engine_is_built(
    built: Callable[..., Built], stored: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = built(**{"teacher.logits": str(stored.folder / "run"), "data.global_batch_size": 4})
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"stores 2 validation samples.*takes 4; store them with"):
        _ = run.prepared


def test_top_k_above_the_vocabulary_stores_all_tokens(built: Callable[..., Built]) -> None:
    large = {"stage.teacher_logits": {"samples": SAMPLES, "top_k": 64}}
    assert built(**{**STORES, **large}).components.teacher_pass.top_k == 50


def test_another_model_or_other_data_is_refused(
    built: Callable[..., Built], stored: Built, assets: Assets
) -> None:
    where = {"teacher.logits": str(stored.folder / "run")}
    with pytest.raises(ConfigError, match="stored with other data"):
        _ = built(**where, **{"data.paths": [assets.more]}).prepared
    run = built(**where)
    architecture = run.prepared.architecture
    with pytest.raises(ConfigError, match="stored with another model"):
        teacher_logits.check(run.config, architecture, 8, {"model_sha256": {"other": "hash"}})
    with pytest.raises(ConfigError, match=r"stored with another config\.json of the model"):
        teacher_logits.check(run.config, replace(architecture, rotary_base=500.0), 8)


def test_a_stage_that_was_not_finished_is_refused(
    built: Callable[..., Built], tmp_path: Path
) -> None:
    part = built(**STORES)
    assert not store(part, stops_at=0)
    run = built(**{"teacher.logits": part.config.run.dir})
    with pytest.raises(ConfigError, match="not finished"):
        _ = run.prepared
    absent = built(**{"teacher.logits": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="name the run folder of a finished stage"):
        _ = absent.prepared


def test_a_record_without_the_newest_keys_is_completed(tmp_path: Path) -> None:
    scaling = asdict(RopeScaling(factor=8.0, rope_type="llama3"))
    path = tmp_path / "teacher.json"
    for left_out in ((), ("truncate", "attention_factor")):
        stated = {key: value for key, value in scaling.items() if key not in left_out}
        path.write_text(json.dumps({"model.architecture": {"rope_scaling": stated}}))
        found = teacher_logits._read(path)["model.architecture"]["rope_scaling"]
        assert found == scaling
    earlier = {"rope_scaling": None, "layers": [{"rotary_base": 1e4, "window": None}]}
    path.write_text(json.dumps({"model.architecture": earlier}))
    found = teacher_logits._read(path)["model.architecture"]
    assert found["rope_scaling"] is None
    assert found["linear"] is None
    assert found["layers"] == [{"rotary_base": 1e4, "window": None, "linear": False}]


def test_a_folder_is_not_continued_with_other_settings(built: Callable[..., Built]) -> None:
    first = built(**STORES)
    assert not store(first, stops_at=0)
    settings = {**STORES, "stage.teacher_logits": {"samples": SAMPLES, "top_k": 7}}
    other = built(**settings, **{"run.dir": first.config.run.dir})
    with pytest.raises(ConfigError, match="begun with top_k=8 and this run has 7"):
        store(other)


def test_files_that_are_missing_or_damaged_are_named(
    built: Callable[..., Built], stored: Built, tmp_path: Path
) -> None:
    reader = teacher_logits.stored_teacher
    run = built(**{"teacher.logits": str(tmp_path)})
    source = stored.folder / "run" / "teacher_logits"
    folder = tmp_path / "teacher_logits" / "train"
    folder.mkdir(parents=True)
    (tmp_path / "teacher_logits" / "teacher.json").write_bytes(
        (source / "teacher.json").read_bytes()
    )
    files = sorted((source / "train").iterdir())
    for file in files[:-1]:
        (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="4 of 40 samples are missing, the first is 36"):
        reader(run.config, run.view, "train")
    (folder / files[-1].name).write_bytes(files[-1].read_bytes()[:-1])
    with pytest.raises(DataError, match="delete it and run teacher_logits again"):
        reader(run.config, run.view, "train")
    (folder / files[-1].name).write_bytes(files[-1].read_bytes())
    with pytest.raises(DataError, match="sample 3 has other tokens"):
        reader(run.config, run.view, "train").read([3], torch.zeros(1, 32, dtype=torch.int64))
