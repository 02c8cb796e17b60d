"""The jobs of a run and their batch scripts."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.app.model import read_architecture
from dms_train.cli.config_source import compose
from dms_train.config.build import ConfigError
from dms_train.config.cluster import ClusterOptions
from dms_train.launch.chain import Job, chain, container_options, frozen, needs, script
from dms_train.launch.nodes import Needs
from dms_train.planning.parameters import parameter_count
from tests.support.chains import config, stages


def test_a_retrofit_is_a_chain_from_data_to_validation(tmp_path: Path) -> None:
    jobs = chain(config(tmp_path))
    assert jobs == [
        Job("prepare", "convert"),
        Job("hf_to_megatron", "convert"),
        Job("zero_neuron", "train"),
        Job("retrofit", "train"),
        Job("hold", "train"),
        Job("export", "train"),
        Job("validate_export", "validate"),
    ]


def test_stages_that_are_not_needed_are_left_out(tmp_path: Path) -> None:
    scratch = compose(["experiment=tiny_pretrain", f"run.dir={tmp_path}/run"])
    assert stages(scratch) == ["prepare", "pretrain", "export"]
    loaded = config(tmp_path, "run.load=/some/checkpoint", "stage.run=[hold]")
    assert stages(loaded) == ["prepare", "hold"]
    assert stages(config(tmp_path), "prepare", "hf_to_megatron")[0] == "zero_neuron"


def test_an_export_is_evaluated_on_one_node_with_the_time_of_a_training_job(
    tmp_path: Path,
) -> None:
    made = config(
        tmp_path,
        "stage.run=[zero_neuron,export,validate_export,run_tasks]",
        "stage.run_tasks.tasks=[exam_sheets]",
        "cluster.time=09:00:00",
    )
    assert stages(made)[-3:] == ["export", "validate_export", "run_tasks"]
    job = chain(made)[-1]
    assert job == Job("run_tasks", "validate")
    assert "--time=09:00:00" in script(job, made, tmp_path)
    assert needs(job, made) == needs(Job("validate_export", "validate"), made)


def test_training_starts_from_the_imported_checkpoint(tmp_path: Path) -> None:
    made = frozen(config(tmp_path))
    assert made.run.load == str(tmp_path / "run" / "start")
    assert stages(made) == stages(config(tmp_path))  # the frozen file gives the same chain
    assert frozen(config(tmp_path), ["hf_to_megatron"]).run.load is None


@pytest.mark.parametrize(
    "words",
    [
        ("method.train=lora",),
        ("method.train=attention",),
        ("method=kvzap", "stage.export.format=kvzap"),
    ],
)
def test_a_student_with_frozen_weights_starts_from_the_original(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    plain = config(tmp_path, *words)
    assert stages(plain)[:2] == ["prepare", "zero_neuron"]
    assert frozen(plain).run.load is None
    assert frozen(plain).shares_teacher
    loaded = config(tmp_path, *words, "run.load=/some/checkpoint")
    assert frozen(loaded).run.load == "/some/checkpoint"


def test_stages_that_do_not_form_a_chain_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--skip retrofti: no such stage; this run has prepare"):
        chain(config(tmp_path), ["retrofti"])
    with pytest.raises(ConfigError, match="name each once"):
        chain(config(tmp_path, "stage.run=[export,retrofit,export]"))


@pytest.mark.parametrize("job", [Job("prepare", "convert"), Job("hold", "train")])
def test_no_placeholder_is_left_and_every_value_is_quoted(tmp_path: Path, job: Job) -> None:
    odd = tmp_path / "it's a $HOME run"
    plain = config(tmp_path)
    text = script(job, replace(plain, run=replace(plain.run, dir=f"{odd}/run")), odd)
    assert not re.search(r"@[A-Z_]+@", text)
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export "))
    shown = subprocess.run(
        ["bash", "-c", f'{exports}\nprintf "%s|%s" "$RUN" "$WORKDIR"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{odd}/run|{odd}"


def test_sbatch_reads_odd_names_as_one_word_without_fields(tmp_path: Path) -> None:
    plain = config(tmp_path)
    odd = replace(plain, run=replace(plain.run, dir="/runs/it's @RUN@ at 50%j"))
    lines = script(Job("hold", "train"), odd, tmp_path).splitlines()
    words = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH ")]
    assert ["--output=/runs/it's @RUN@ at 50%%j/logs/hold-%j.log"] in words
    assert ["--job-name=it_s__RUN__at_50_j-hold"] in words


def test_nodes_are_checked_for_gpus_and_free_space(tmp_path: Path) -> None:
    site = ["cluster=gpu_node", "cluster.nodes=1", "parallel=tp4_pp2"]
    made = config(tmp_path, *site, "parallel.params_dtype=fp32")
    parameters = parameter_count(read_architecture(made.model))
    assert needs(Job("prepare", "convert"), made) == Needs(0, 0, 0)
    assert needs(Job("hf_to_megatron", "convert"), made) == Needs(0, 0, 4 * parameters)
    assert needs(Job("validate_export", "validate"), made) == Needs(1, 0, 0)
    # three checkpoints, the weights of zero_neuron and retrofit, and one export, written twice
    whole = Needs(8, 3 * 16 * parameters, (2 * 4 + 2 * 4) * parameters)
    assert needs(Job("hold", "train"), made) == whole
    assert needs(Job("export", "train"), made) == replace(whole, checkpoint_bytes=0)
    half = config(tmp_path, *site, "parallel.params_dtype=bf16")
    assert needs(Job("hf_to_megatron", "convert"), half) == Needs(0, 0, 2 * parameters)
    assert needs(Job("hold", "train"), half) == Needs(
        8, 3 * 14 * parameters, (2 * 2 + 2 * 2) * parameters
    )
    other = config(tmp_path, *site, "run.load=/some/checkpoint")  # its ratio is not known yet
    assert needs(Job("hold", "train"), other).kept_bytes <= whole.kept_bytes
    assert needs(Job("hold", "train"), config(tmp_path)).gpus == 0
    text = script(Job("hold", "train"), made, tmp_path)
    room = f"CHECKPOINT_BYTES={whole.checkpoint_bytes} KEPT_BYTES={whole.kept_bytes}"
    assert f"NODE_GPUS=8 {room} " in text


def test_cluster_options_are_written_to_the_script(tmp_path: Path) -> None:
    site = ["cluster=gpu_node", "cluster.nodes=1", "parallel=tp4_pp2", "cluster.account=a1"]
    made = config(tmp_path, *site, "cluster.partition=long", "cluster.qos=q")
    train = script(Job("hold", "train"), made, tmp_path).splitlines()
    for line in ("--account=a1", "--partition=long", "--qos=q", "--gpus-per-node=8", "--exclusive"):
        assert f"#SBATCH {line}" in train
    assert "#SBATCH --signal=B:USR1@300" in train
    convert = script(Job("prepare", "convert"), made, tmp_path)
    assert "--gpus-per-node" not in convert
    assert "--account=a1" in convert
    assert "--gpus-per-node=1" in script(Job("validate_export", "validate"), made, tmp_path)


def test_a_container_is_given_to_srun_with_the_run_mounted() -> None:
    run, here = Path("/runs/a"), Path("/home/me")
    assert container_options(ClusterOptions(), run, here) == []
    cluster = ClusterOptions(container_image="/i.sqsh", container_mounts=("/data:/data:ro",))
    assert container_options(cluster, run, here)[:2] == [
        "--container-image=/i.sqsh",
        "--container-mounts=/runs/a:/runs/a,/home/me:/home/me,/data:/data:ro",
    ]


def test_job_names_contain_the_name_of_the_run_folder(tmp_path: Path) -> None:
    made = config(tmp_path)
    other = replace(made, run=replace(made.run, dir="/runs/other"))
    assert "--job-name=other-hold" in script(Job("hold", "train"), other, tmp_path)
