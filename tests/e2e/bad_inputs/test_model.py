"""Bad input: model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.bad_inputs.cases import Case, check, cut, damaged, edit_json, edit_weights, train
from tests.support.refusals import Workspace


def _lose_a_shard(workspace: Workspace) -> None:
    names = list(load_file(workspace.model / "model.safetensors"))
    (workspace.model / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (workspace.model / "model.safetensors.index.json").write_text(json.dumps(index))


def _only_pickle(workspace: Workspace) -> None:
    (workspace.model / "model.safetensors").rename(workspace.model / "pytorch_model.bin")


def _to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.ones(32)


def _add_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]


def _add_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.nan


CASES = {
    "no-teacher": Case(
        done="a new model with the distillation loss",
        arrange=damaged(
            lambda workspace: None,
            "model=scratch",
            "model.path=null",
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="config error",
        facts=("model.path", "loss=lm", "set"),
    ),
    "no-teacher-to-validate": Case(
        done="`validate_export` without the original",
        arrange=damaged(
            lambda workspace: None,
            "model=scratch",
            "model.path=null",
            "run.load={workspace.run}/checkpoints/step_00000004",
            "stage.run=[hold,export,validate_export]",
            "stage.hold.loss=lm",
            "stage.validate_export.samples=2",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="config error",
        facts=("model.path", "set"),
    ),
    "nothing-to-validate": Case(
        done="`validate_export` of an export that was never retrofitted",
        arrange=train("stage.run=[export,validate_export]", "stage.validate_export.samples=2"),
        kind="config error",
        facts=("stage.run", "zero_neuron", "run.load"),
    ),
    "model-missing": Case(
        done="`model.path` of a folder that is not there",
        arrange=damaged(lambda workspace: None, "model.path={workspace.folder}/absent"),
        kind="error",
        facts=("FOLDER/absent",),
    ),
    "hub-id-not-cached": Case(
        done="`model.path=nobody/nothing`, not in the local hub cache",
        arrange=train("model.path=nobody/nothing"),
        kind="error",
        facts=("nobody/nothing", "local_files_only=false", "give"),
    ),
    "config-missing": Case(
        done="`config.json` deleted",
        arrange=damaged(lambda workspace: (workspace.model / "config.json").unlink()),
        kind="error",
        facts=("MODEL/config.json",),
    ),
    "config-broken": Case(
        done="`config.json` cut off",
        arrange=damaged(lambda workspace: cut(workspace.model / "config.json")),
        kind="error",
        facts=("MODEL/config.json", "JSON"),
    ),
    "model-type": Case(
        done="a model of another family",
        arrange=damaged(
            lambda workspace: edit_json(workspace.model / "config.json", model_type="gpt2")
        ),
        kind="error",
        facts=("MODEL", "config.json", "model_type='gpt2'", "use"),
    ),
    "config-value": Case(
        done="`hidden_size` is text in `config.json`",
        arrange=damaged(
            lambda workspace: edit_json(workspace.model / "config.json", hidden_size="32")
        ),
        kind="error",
        facts=("MODEL", "config.json", "hidden_size='32'"),
    ),
    "config-key": Case(
        done="`vocab_size` is null in `config.json`",
        arrange=damaged(
            lambda workspace: edit_json(workspace.model / "config.json", vocab_size=None)
        ),
        kind="error",
        facts=("MODEL", "config.json", "vocab_size"),
    ),
    "rope": Case(
        done="a model with YaRN RoPE",
        arrange=damaged(
            lambda workspace: edit_json(
                workspace.model / "config.json",
                rope_parameters=None,
                rope_scaling={"rope_type": "yarn", "factor": 4.0},
            )
        ),
        kind="error",
        facts=("MODEL", "config.json", "rope_type='yarn'", "use"),
    ),
    "rope-llama3": Case(
        done="Llama 3 RoPE scaling with other frequencies than Llama 3's",
        arrange=damaged(
            lambda workspace: edit_json(
                workspace.model / "config.json",
                rope_parameters=None,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
            )
        ),
        kind="error",
        facts=("3", "-core", "use"),
    ),
    "weights-cut": Case(
        done="`model.safetensors` cut off",
        arrange=damaged(lambda workspace: cut(workspace.model / "model.safetensors")),
        kind="error",
        facts=("MODEL/model.safetensors", "copy"),
    ),
    "shard-missing": Case(
        done="a shard that the index names is missing",
        arrange=damaged(_lose_a_shard),
        kind="error",
        facts=("00001", "-of-00002", "copy"),
    ),
    "pickle-only": Case(
        done="`pytorch_model.bin` only",
        arrange=damaged(_only_pickle),
        kind="error",
        facts=("pytorch_model.bin", "save_pretrained", "safe_serialization=True", "convert"),
    ),
    "no-weights": Case(
        done="no weights at all",
        arrange=damaged(lambda workspace: (workspace.model / "model.safetensors").unlink()),
        kind="error",
        facts=("MODEL", "model.safetensors", "copy"),
    ),
    "weights-shape": Case(
        done="weights of another size than `config.json` says",
        arrange=damaged(
            lambda workspace: edit_json(workspace.model / "config.json", intermediate_size=64)
        ),
        kind="error",
        facts=("MODEL", "config.json"),
    ),
    "weights-missing": Case(
        done="a tensor is missing",
        arrange=damaged(
            lambda workspace: edit_weights(workspace, lambda t: t.pop("model.norm.weight"))
        ),
        kind="error",
        facts=("MODEL", "model.norm.weight", "config.json", "copy"),
    ),
    "weights-quantised": Case(
        done="FP8 weights without `quantization_config`",
        arrange=damaged(lambda workspace: edit_weights(workspace, _to_fp8)),
        kind="error",
        facts=("MODEL", "F8_E4M3", "down_proj.weight", "use the original model"),
    ),
    "quantisation-file": Case(
        done="a file beside `config.json` that states a quantisation",
        arrange=damaged(
            lambda workspace: (workspace.model / "hf_quant_config.json").write_text("{}")
        ),
        kind="error",
        facts=("MODEL/hf_quant_config.json", "use the original model"),
    ),
    "weights-unread": Case(
        done="a bias that `config.json` does not state",
        arrange=damaged(lambda workspace: edit_weights(workspace, _add_bias)),
        kind="error",
        facts=("MODEL", "1 tensors", "layers.1.self_attn.o_proj.bias", "correct config.json"),
    ),
    "head-of-its-own": Case(
        done="`tie_word_embeddings` and an output layer that differs from the embedding",
        arrange=damaged(lambda workspace: edit_weights(workspace, _add_head)),
        kind="error",
        facts=("MODEL", "lm_head.weight", "tie_word_embeddings=true", "set it to false"),
    ),
    "teacher-silent": Case(
        done="a teacher with random weights",
        arrange=train("run.check_teacher=true"),
        kind="config error",
        facts=("model.path=MODEL", "guessing has 3.91", "set run.check_teacher=false"),
        changes=("run", "run/*"),
        starts=True,
    ),
    "weights-nan": Case(
        done="a weight that is NaN",
        arrange=damaged(lambda workspace: edit_weights(workspace, _add_nan)),
        kind="error",
        facts=("MODEL/model.safetensors", "layers.1.mlp.up_proj.weight", "NaN", "use a sound copy"),
        changes=("run", "run/config.yaml", "run/state*", "run/data_cache*", "run/.*"),
        starts=True,
    ),
    "model-is-an-export": Case(
        done="`model.path` of a DMS export",
        arrange=damaged(lambda workspace: None, "model.path={workspace.export}/hf", finished=True),
        kind="config error",
        facts=("DMS", "model.path", "run.load", "give"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
