"""Execution of a stage without training: `python -m dms_train.launch.stage RUN STAGE`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from dms_train.app import failures, launcher
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError
from dms_train.config.frozen import CONFIG_FILE, read_frozen
from dms_train.config.schema import RunConfig
from dms_train.launch.chain import IMPORT, PREPARE, START_FOLDER
from dms_train.observe import locks, log
from dms_train.observe.state_files import StateFiles
from dms_train.training.options import RUN_TASKS, VALIDATE_EXPORT

PREPARE_FILE = Path("launch") / "prepare.json"  # words for dms-data, written when submitting


def prepare(config: RunConfig) -> None:
    """Make the token files if the submission had --prepare, then verify every byte of them."""
    from dms_train.data_prep.prepare import main

    recipe = Path(config.run.dir) / PREPARE_FILE
    missing = [path for path in config.data.paths if not Path(f"{path}.manifest.json").is_file()]
    if missing and recipe.is_file():
        words = json.loads(recipe.read_text())
        try:
            failed = main(words) != 0
        except SystemExit:  # dms-data refused the words
            failed = True
        if failed:
            raise ConfigError(f"--prepare {shlex.join(words)}: failed; see the lines above")
    for path in config.data.paths:
        if main(["check", path]):
            raise ConfigError(f"data.paths={path}: not a sound shard; see the line above")


def import_model(config: RunConfig) -> None:
    """Make the checkpoint that training starts from, unless a complete one exists."""
    launcher.hide_gpus()  # before the import, in case a library asks CUDA when it is loaded
    from dms_train.app.conversion import import_model as import_checkpoint

    out = Path(config.run.dir) / START_FOLDER
    if out.exists():  # complete, because it is written under another name and then renamed
        return
    assert config.model.path is not None
    import_checkpoint(
        config.model.path,
        out,
        dtype=config.parallel.params_dtype,  # what training rounds the weights to
        revision=config.model.revision,
        download=not config.model.local_files_only,
    )


def validate(config: RunConfig) -> None:
    """Evaluate the final export beside the original on this run's validation text."""
    from dms_train.app.export_evaluation import evaluate_run

    evaluate_run(config)


def evaluate(config: RunConfig) -> None:
    """Evaluate the final export on the tasks of `stage.run_tasks`."""
    from dms_train.app.task_evaluation import evaluate_tasks

    evaluate_tasks(config.stage.run_tasks, Path(config.run.dir))


_STAGES: dict[str, Callable[[RunConfig], None]] = {
    PREPARE: prepare,
    IMPORT: import_model,
    VALIDATE_EXPORT: validate,
    RUN_TASKS: evaluate,
}


def run(folder: Path, stage: str) -> None:
    """Run a stage and leave its mark; a failure is recorded beside the errors of the ranks."""
    files = StateFiles(folder)
    try:
        config = read_frozen(folder / CONFIG_FILE)
        with locks.held(files.lock, f"run.dir={folder}", launcher.job()):
            _STAGES[stage](config)
    except locks.LockedError:
        raise  # the folder belongs to another process, and its lock may become stale
    except Exception as error:
        attempt = launcher.attempt() or "local"
        files.failed(launcher.rank(), attempt, error, failures.describe(error))
        if failures.is_refusal(error):
            files.refused(failures.describe(error))
        raise
    files.done(stage, 0)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    folder, stage = sys.argv[1:] if arguments is None else arguments
    log.configure(0)
    return run_main(lambda: run(Path(folder), stage))


if __name__ == "__main__":
    sys.exit(main())
