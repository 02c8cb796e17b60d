"""The YAML experiments: they compose, pass all checks, and have folders of their own."""

from __future__ import annotations

import pytest
import yaml

from dms_train.cli.config_source import CONF_DIR, compose
from dms_train.planning.check import check
from research.folders import CONFIG_DIR

FILES = {path.stem: path for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml"))}


@pytest.mark.parametrize("name", FILES)
def test_every_experiment_composes_and_passes(name: str) -> None:
    config = compose([f"experiment={name}"], CONFIG_DIR)
    teacher = "lab_teacher_s" if name.startswith("lab") else "tiny_pretrain"
    scratch = compose([f"experiment={teacher}"], CONFIG_DIR).model.architecture
    assert "# world_size: 1\n" in FILES[name].read_text()
    check(config, world_size=1, architecture=config.model.architecture or scratch)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("lab_retrofit", "outputs/lab/s/cr4"), ("lab_dmc", "outputs/lab/s/dmc_cr4")],
)
def test_a_retrofit_of_the_lab_names_its_folder_by_a_whole_ratio(name: str, folder: str) -> None:
    config = compose([f"experiment={name}"], CONFIG_DIR)
    assert (config.run.dir, config.stage.retrofit.target_cr) == (folder, 4.0)


def test_experiments_have_their_own_run_folders() -> None:
    files = [*FILES.values(), *(CONF_DIR / "experiment").glob("*.yaml")]
    folders = [yaml.safe_load(path.read_text())["run"]["dir"] for path in files]
    assert len(set(folders)) == len(folders)
    assert all(folder.startswith("outputs/") for folder in folders)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("ablation")])
def test_an_ablation_has_a_folder_for_every_point(name: str) -> None:
    values = yaml.safe_load(FILES[name].read_text())
    for key in values["hydra"]["sweeper"]["params"]:
        assert f"${{{key}}}" in values["run"]["dir"]
