"""Steps, exports and disk space of a run, compared with what runs of the loop write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.config.schema import RunConfig
from dms_train.planning.parameters import parameter_count
from dms_train.planning.run_size import checkpoint_count, run_size
from tests.support import configs
from tests.support.training_loop import FakeParts, only, run

ARCHITECTURE = configs.architecture()
HELD = replace(only().hold, branch_ratios=(2, 3))
RUNS = {
    "recipe": only("zero_neuron", "retrofit", "export"),
    "held": only("zero_neuron", "retrofit", "hold", "export"),
    "branched": only("zero_neuron", "retrofit", "hold", "export", hold=HELD),
    "limited": only(
        "retrofit", "hold", "export", retrofit=replace(only().retrofit, max_kl=0.8)
    ),  # a limit that the run does not reach
    "not_exported": only("retrofit", "hold"),
    "pretrained": only("pretrain", "export"),
    "fractional": only(
        "retrofit", "hold", "export", retrofit=replace(only().retrofit, target_cr=2.5)
    ),
}


def config_of(name: str, *, every: bool, **options: Any) -> RunConfig:
    """A configuration with the stages of `RUNS[name]`."""
    config = configs.config()
    stages = RUNS[name]
    stage = replace(
        config.stage,
        run=stages.run,
        pretrain=stages.pretrain,
        zero_neuron=stages.zero_neuron,
        retrofit=stages.retrofit,
        hold=stages.hold,
        export=replace(stages.export, every_integer_cr=every),
    )
    return replace(config, stage=stage, run=replace(config.run, **options))


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_the_steps_and_writes_the_exports_that_were_planned(
    tmp_path: Path, name: str, every: bool
) -> None:
    size = run_size(config_of(name, every=every), ARCHITECTURE)
    fakes: FakeParts = run(tmp_path, RUNS[name], every_integer_cr=every)
    assert size.steps == len(fakes.of("train"))
    assert size.exports == len(fakes.of("export"))
    assert size.weights == len(fakes.of("weights"))


@pytest.mark.parametrize("keep", [1, 2, 9])
@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_the_most_checkpoints_at_a_time(
    tmp_path: Path, name: str, interval: int, keep: int
) -> None:
    """Counted after each save and before the removal of old ones."""
    options = {"save_interval": interval, "keep_checkpoints": keep, "async_save": False}
    size = run_size(config_of(name, every=True, **options), ARCHITECTURE)
    seen = []

    class Counting(FakeParts):
        def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
            super().save(path, state, wait=wait)
            seen.append(len(list(path.parent.glob("step_????????"))))

    run(tmp_path, RUNS[name], every_integer_cr=True, fakes=Counting(), **options)
    assert max(seen) <= size.checkpoints
    assert size.checkpoints <= max(seen) + (name in ("branched", "limited"))


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_the_most_checkpoints_from_a_stage_on(tmp_path: Path, name: str, keep: int) -> None:
    options = {"save_interval": 1, "keep_checkpoints": keep, "async_save": False}
    seen: dict[int, int] = dict.fromkeys(range(len(RUNS[name].run)), 0)  # by stage

    class Counting(FakeParts):
        def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
            super().save(path, state, wait=wait)
            stage = state["stage"] - (state["stage_step"] == 0 and state["branch_start"] is None)
            seen[stage] = max(seen[stage], len(list(path.parent.glob("step_????????"))))

    run(tmp_path, RUNS[name], every_integer_cr=True, fakes=Counting(), **options)
    config = config_of(name, every=True, **options)
    for index, stage in enumerate(RUNS[name].run):
        most = max(seen[later] for later in seen if later >= index)
        assert checkpoint_count(config, 1.0, stage) == most, stage


@pytest.mark.parametrize(("dtype", "checkpoint", "weights"), [("fp32", 16, 4), ("bf16", 14, 2)])
def test_bytes_of_a_parameter(dtype: str, checkpoint: int, weights: int) -> None:
    config = configs.config(parallel__params_dtype=dtype)
    size = run_size(config, ARCHITECTURE)
    count = parameter_count(ARCHITECTURE)
    assert size.checkpoint_bytes == checkpoint * count
    assert size.weights_bytes == weights * count
    assert size.export_bytes == 2 * weights * count
    exported = replace(config.stage, export=replace(config.stage.export, dtype="fp32"))
    assert run_size(replace(config, stage=exported), ARCHITECTURE).export_bytes == (
        (weights + 4) * count
    )


def test_a_stored_teacher_is_disk_space_that_the_run_keeps() -> None:
    stored = {"samples": 16, "top_k": 8}
    changes = {"stage__run": ["teacher_logits"], "stage__teacher_logits": stored}
    size = run_size(configs.config(**changes, run__eval_samples=3), ARCHITECTURE)
    assert size.disk_bytes == size.kept_bytes == (16 + 3) * 64 * (8 * (2 + 4) + 4)
    assert (size.steps, size.checkpoints, size.exports) == (0, 0, 0)


def test_a_plan_of_more_steps_than_a_loop_could_count() -> None:
    """Each of the stages, its branches and its saves."""
    many, options = 10**11, {"save_interval": 1, "keep_checkpoints": 2}
    config = config_of("branched", every=True, **options)
    stage = replace(config.stage, retrofit=replace(config.stage.retrofit, steps_per_cr=many))
    stage = replace(stage, zero_neuron=replace(stage.zero_neuron, steps=many))
    size = run_size(replace(config, stage=stage), ARCHITECTURE)
    few = run_size(config, ARCHITECTURE)
    units = RUNS["branched"].retrofit.target_cr - 1
    branches = 2 * stage.hold.steps
    assert size.steps == many + units * many + stage.hold.steps + branches
    assert (size.checkpoints, size.exports) == (few.checkpoints, few.exports)
