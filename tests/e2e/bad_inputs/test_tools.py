"""Bad input: tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest
from safetensors.torch import load_file, save_file

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from tests.e2e.bad_inputs.cases import Case, check, command, cut, edit_json
from tests.support.refusals import Workspace


def _foreign_out(workspace: Workspace) -> None:
    workspace.out.mkdir()
    (workspace.out / "notes.txt").write_text("mine")


def _other_reference(workspace: Workspace) -> None:
    """Another model's logits in the self-test."""
    file = workspace.export / "hf" / "dms_selftest" / "reference.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["logits"] = 9 * tensors["logits"].flip(0)
    save_file(tensors, file)


def _is_reported(workspace: Workspace) -> None:
    assert json.loads((workspace.out / "metrics.json").read_text())["selftest.kl"] > 0.02
    assert "FAILED" in (workspace.out / "report.md").read_text()


def _validate(*words: str) -> tuple[str, ...]:
    return (
        "validate",
        "{workspace.export}/hf",
        "--teacher={workspace.model}",
        "--output={workspace.out}",
        *words,
    )


def _export_to_a_small_disk(workspace: Workspace) -> list[str]:
    workspace.finish_run()
    workspace.small_disk(workspace.folder / "disk", 48)
    return ["export", str(workspace.export / "megatron"), str(workspace.folder / "disk" / "model")]


def _evaluate(*words: str) -> Callable[[Workspace], list[str]]:
    """`dms-eval` of a model with a tokenizer; a file holds one row of MATH-500's form."""

    def arrange(workspace: Workspace) -> list[str]:
        write_exam_tokenizer(workspace.model)
        row = {"problem": "1 + 1", "answer": "2"}
        (workspace.folder / "part.jsonl").write_text(json.dumps(row) + "\n")
        given = [word.format(workspace=workspace) for word in words]
        return ["eval", f"model.path={workspace.model}", "sweep.lengths=[1]", *given]

    return arrange


CASES = {
    "verify-missing": Case(
        done="`dms-verify` of a folder that is not there",
        arrange=command("verify", "{workspace.folder}/absent"),
        kind="",
        facts=("dms-verify", "FOLDER/absent/config.json"),
    ),
    "verify-dense": Case(
        done="`dms-verify` of a dense model",
        arrange=command("verify", "{workspace.model}"),
        kind="",
        facts=("dms-verify", "MODEL"),
    ),
    "verify-no-selftest": Case(
        done="`dms-verify` of an export without self-test",
        arrange=command(
            "verify",
            "{workspace.export}/hf",
            damage=lambda workspace: shutil.rmtree(workspace.export / "hf" / "dms_selftest"),
            finished=True,
        ),
        kind="",
        facts=("reference.safetensors", "-test", "export"),
    ),
    "verify-damaged-selftest": Case(
        done="`dms-verify` of an export with a cut-off self-test",
        arrange=command(
            "verify",
            "{workspace.export}/hf",
            damage=lambda workspace: cut(
                workspace.export / "hf" / "dms_selftest" / "reference.safetensors"
            ),
            finished=True,
        ),
        kind="",
        facts=("reference.safetensors", "-test"),
    ),
    "inspect-missing": Case(
        done="`dms-inspect` of a folder that is not there",
        arrange=command("inspect", "{workspace.folder}/absent"),
        kind="",
        facts=("dms-inspect", "FOLDER/absent"),
    ),
    "inspect-unknown": Case(
        done="`dms-inspect` of some other folder",
        arrange=command("inspect", "{workspace.folder}/data"),
        kind="",
        facts=("FOLDER/data", "config.json"),
    ),
    "inspect-cut": Case(
        done="`dms-inspect` of a model with cut-off weights",
        arrange=command(
            "inspect",
            "{workspace.model}",
            damage=lambda workspace: cut(workspace.model / "model.safetensors"),
        ),
        kind="",
        facts=("dms-inspect", "MODEL/model.safetensors", "copy"),
    ),
    "report-missing": Case(
        done="`dms-report` of a folder that is no run",
        arrange=command("report", "{workspace.folder}/absent"),
        kind="error",
        facts=("FOLDER/absent", "metrics.jsonl", "give"),
    ),
    "export-missing": Case(
        done="`dms-export` of a checkpoint that is not there",
        arrange=command("export", "{workspace.folder}/absent", "{workspace.out}"),
        kind="error",
        facts=("FOLDER/absent", "run_state.json"),
    ),
    "export-cut": Case(
        done="`dms-export` of a checkpoint with a cut-off file",
        arrange=command(
            "export",
            "{workspace.run}/checkpoints/step_00000004",
            "{workspace.out}",
            damage=lambda workspace: cut(workspace.checkpoint(4) / "__0_0.distcp"),
            finished=True,
        ),
        kind="error",
        facts=("__0_0.distcp", "use"),
    ),
    "validate-nothing": Case(
        done="`dms-validate` without `--data` and `--problems`",
        arrange=command(*_validate(), finished=True),
        kind="error",
        facts=("--data", "--problems", "give"),
    ),
    "validate-samples-of-none": Case(
        done="`dms-validate --samples 0`",
        arrange=command(*_validate("--data={workspace.data}", "--samples=0"), finished=True),
        kind="error",
        facts=("samples=0", "1"),
    ),
    "validate-dense": Case(
        done="`dms-validate` of a dense model",
        arrange=command(
            "validate",
            "{workspace.model}",
            "--teacher={workspace.model}",
            "--output={workspace.out}",
            "--data=x",
        ),
        kind="error",
        facts=("MODEL", "dense model", "give"),
    ),
    "validate-data": Case(
        done="`dms-validate --data` of files that are not there",
        arrange=command(*_validate("--data={workspace.folder}/absent"), finished=True),
        kind="error",
        facts=("FOLDER/absent.manifest.json", "dms-data tokenize", "data.paths", "make"),
    ),
    "validate-problems": Case(
        done="`dms-validate --problems` of a file that is not there",
        arrange=command(*_validate("--problems={workspace.folder}/absent.jsonl"), finished=True),
        kind="error",
        facts=("FOLDER/absent.jsonl",),
    ),
    "validate-selftest": Case(
        done="`dms-validate` of an export that does not pass its self-test",
        arrange=command(
            *_validate("--data={workspace.data}", "--seq-length=32", "--samples=1"),
            damage=_other_reference,
            finished=True,
        ),
        kind="error",
        facts=("RUN/exports/final/hf", "-test", "KL", "0.02"),
        changes=("out", "out/*"),
        after=_is_reported,
    ),
    "export-foreign-folder": Case(
        done="`dms-export` into a folder that holds somebody's files",
        arrange=command(
            "export",
            "{workspace.export}/megatron",
            "{workspace.out}",
            damage=_foreign_out,
            finished=True,
        ),
        kind="error",
        facts=("OUT", "choose"),
    ),
    "export-nvidia-of-llama": Case(
        done="`dms-export --format nvidia` of a Llama model",
        arrange=command(
            "export",
            "{workspace.export}/megatron",
            "{workspace.out}",
            "--format",
            "nvidia",
            finished=True,
        ),
        kind="error",
        facts=("export format nvidia", "family llama", "qwen3 only", "export in format dms"),
    ),
    "export-full-disk": Case(
        done="the disk is full when an export is written",
        arrange=_export_to_a_small_disk,
        kind="error",
        facts=("free disk space",),
        starts=True,
    ),
    "eval-task": Case(
        done="`dms-eval task.name=` of a task that does not exist",
        arrange=command("eval", "model.path={workspace.model}", "task.name=aime"),
        kind="error",
        facts=("task.name=aime", "aime24", "choose"),
    ),
    "eval-key": Case(
        done="`dms-eval` with a key that does not exist",
        arrange=command("eval", "model.path={workspace.model}", "sweep.width=[1,4]"),
        kind="config error",
        facts=("sweep.width", "sweep.widths"),
    ),
    "eval-no-data": Case(
        done="`dms-eval` of a data set without its file",
        arrange=_evaluate("task.name=math500"),
        kind="error",
        facts=("math500", "task.path", "MATH-500"),
    ),
    "eval-part": Case(
        done="`dms-eval` of a part of a data set",
        arrange=_evaluate("task.name=math500", "task.path={workspace.folder}/part.jsonl"),
        kind="error",
        facts=("part.jsonl", "1 rows", "500", "task.subset=true"),
    ),
    "eval-code": Case(
        done="`dms-eval task.name=livecodebench` without `--allow-code`",
        arrange=_evaluate("task.name=livecodebench", "task.fixture=true"),
        kind="error",
        facts=("livecodebench", "--allow-code"),
    ),
    "eval-report": Case(
        done="`dms-eval report` of a folder that is no run",
        arrange=command("eval", "report", "{workspace.folder}/absent"),
        kind="error",
        facts=("FOLDER/absent", "run.json", "give"),
    ),
    "import-missing": Case(
        done="`dms-import` of a folder that is not there",
        arrange=command("import", "{workspace.folder}/absent", "{workspace.out}"),
        kind="error",
        facts=("FOLDER/absent",),
    ),
    "import-exists": Case(
        done="`dms-import` into a folder that exists",
        arrange=command("import", "{workspace.model}", "{workspace.data.parent}"),
        kind="error",
        facts=("FOLDER/data", "choose"),
    ),
    "import-shape": Case(
        done="`dms-import` of weights of another size than `config.json` says",
        arrange=command(
            "import",
            "{workspace.model}",
            "{workspace.out}",
            damage=lambda workspace: edit_json(
                workspace.model / "config.json", num_hidden_layers=3
            ),
        ),
        kind="error",
        facts=("MODEL", "model.layers.2", "config.json", "copy"),
    ),
    "gqa-number": Case(
        done="`dms-gqa --kv-heads` of a number that does not divide those of the model",
        arrange=command("gqa", "{workspace.model}", "{workspace.out}", "--kv-heads=3"),
        kind="error",
        facts=("--kv-heads 3", "2 KV heads", "use 1"),
    ),
    "gqa-retrofitted": Case(
        done="`dms-gqa` of an export of a retrofit",
        arrange=command(
            "gqa", "{workspace.export}/hf", "{workspace.out}", "--kv-heads=1", finished=True
        ),
        kind="error",
        facts=("RUN/exports/final/hf", "give the original"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
