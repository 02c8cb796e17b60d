"""Bad input: cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.bad_inputs.cases import Case, check, command, file_in_place_of_run
from tests.support.refusals import Workspace


def _submit(*words: str, **programs: str) -> Callable[[Workspace], list[str]]:
    """Submit the small run; SLURM's commands are stand-ins, of which none is reached."""

    def arrange(workspace: Workspace) -> list[str]:
        workspace.stand_in(**(programs or {"sbatch": ""}))
        return ["submit", *workspace.train("cluster=default")[1:], *words]

    return arrange


def _resubmit(workspace: Workspace) -> list[str]:
    workspace.finish_run()
    return _submit("optim.lr=1e-3")(workspace)


def _submit_twice(workspace: Workspace) -> list[str]:
    (workspace.run / "launch").mkdir(parents=True)
    (workspace.run / "launch" / "submitting").write_text("ada on login2, process 71\n")
    return _submit()(workspace)


def _submit_into_a_file(workspace: Workspace) -> list[str]:
    file_in_place_of_run(workspace)
    return _submit()(workspace)


def _not_submitted(workspace: Workspace) -> list[str]:
    workspace.finish_run()
    return ["submit", "status", str(workspace.run)]


def _has_no_jobs(workspace: Workspace) -> None:
    assert not (workspace.run / "launch" / "jobs.json").exists()


def _on_a_node(*words: str, nvidia_smi: str) -> Callable[[Workspace], list[str]]:
    def arrange(workspace: Workspace) -> list[str]:
        workspace.run.mkdir()
        workspace.stand_in(**({"nvidia-smi": nvidia_smi} if nvidia_smi else {}))
        return ["preflight", "--node", "a1", *words, str(workspace.run)]

    return arrange


_INVALID = "sbatch: error: Batch job submission failed: Invalid account or account/partition"


CASES = {
    "submit-layout": Case(
        done="`dms-submit` of TP 2 on 1 process",
        arrange=_submit("parallel=tp2"),
        kind="config error",
        facts=("2", "1", "start"),
    ),
    "submit-unknown-key": Case(
        done="`dms-submit cluster.node=2`",
        arrange=_submit("cluster.node=2"),
        kind="config error",
        facts=("cluster.nodes", "did you mean"),
    ),
    "submit-skip": Case(
        done="`dms-submit --skip pretrain` of a run without that stage",
        arrange=_submit("--skip", "pretrain"),
        kind="config error",
        facts=("--skip", "hf_to_megatron", "zero_neuron"),
    ),
    "submit-no-image": Case(
        done="`dms-submit cluster=gpu_container` without an image",
        arrange=_submit("cluster=gpu_container"),
        kind="config error",
        facts=("cluster.container_image=", "set"),
    ),
    "submit-prepare": Case(
        done="`dms-submit --prepare` with a quote that is not closed",
        arrange=_submit("--prepare", "tokenize 'a"),
        kind="config error",
        facts=("--prepare", "quote"),
    ),
    "submit-no-time-to-save": Case(
        done="`dms-submit` with no less time to save than before the limit",
        arrange=_submit("cluster.save_seconds=300"),
        kind="config error",
        facts=("cluster.save_seconds=300", "cluster.signal_seconds=300"),
    ),
    "submit-without-slurm": Case(
        done="`dms-submit` where SLURM is not installed",
        arrange=_submit(true=""),
        kind="error",
        facts=("SLURM", "submit"),
    ),
    "submit-refused": Case(
        done="`dms-submit` of what SLURM refuses",
        arrange=_submit(
            "cluster.account=nobody", sbatch=f"echo '{_INVALID}' >&2; exit 1", squeue="", git=""
        ),
        kind="error",
        facts=("sbatch", "Invalid account or account/partition"),
        changes=("run", "run/*"),
        after=_has_no_jobs,
    ),
    "submit-into-a-file": Case(
        done="`dms-submit` with a `run.dir` that is a file",
        arrange=_submit_into_a_file,
        kind="config error",
        facts=("run.dir=RUN", "choose"),
    ),
    "submit-twice": Case(
        done="two `dms-submit` of one run folder at once",
        arrange=_submit_twice,
        kind="config error",
        facts=("2", "71", "RUN/launch/submitting", "wait"),
    ),
    "submit-changed": Case(
        done="`dms-submit` of a run that was started with another learning rate",
        arrange=_resubmit,
        kind="config error",
        facts=("run.dir=RUN", "optim.lr", "restore"),
        changes=("run/launch",),
    ),
    "submit-status-nothing": Case(
        done="`dms-submit status` without a folder",
        arrange=command("submit", "status"),
        kind="config error",
        facts=("dms-submit status",),
    ),
    "submit-status-missing": Case(
        done="`dms-submit status` of a folder that is not there",
        arrange=command("submit", "status", "{workspace.run}"),
        kind="config error",
        facts=("RUN/config.yaml", "give"),
    ),
    "submit-status-other": Case(
        done="`dms-submit status` of a run that was started by hand",
        arrange=_not_submitted,
        kind="config error",
        facts=("RUN", "dms-submit"),
    ),
    "node-gpus": Case(
        done="a job on a node that shows 1 of its 2 GPUs",
        arrange=_on_a_node("--gpus", "2", nvidia_smi="echo 'GPU 0: NVIDIA H200 (UUID: x)'"),
        kind="error",
        facts=("1", "GPU", "2", "--exclude=NODE", "cluster.options"),
        changes=("run/errors", "run/errors/*"),
    ),
    "node-driver": Case(
        done="a job on a node whose driver does not answer",
        arrange=_on_a_node("--gpus", "2", nvidia_smi="echo 'No devices were found'; exit 6"),
        kind="error",
        facts=("1", "-smi", "--exclude=NODE", "cluster.options"),
        changes=("run/errors", "run/errors/*"),
    ),
    "node-no-driver": Case(
        done="a job for GPUs on a node without a driver",
        arrange=_on_a_node("--gpus", "2", nvidia_smi=""),
        kind="error",
        facts=("1", "-smi", "--exclude=NODE", "cluster.options"),
        changes=("run/errors", "run/errors/*"),
    ),
    "node-disk": Case(
        done="a job whose run folder has no room for a checkpoint",
        arrange=_on_a_node("--checkpoint-bytes", str(2**60), nvidia_smi=""),
        kind="error",
        facts=("1", "RUN", "free disk space"),
        changes=("run/errors", "run/errors/*"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
