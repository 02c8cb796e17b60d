"""The output of `dms-plan`."""

from __future__ import annotations

import json

import pytest

from dms_train.app.model import read_architecture
from dms_train.app.plan import describe
from dms_train.cli import plan
from dms_train.config.build import ConfigError
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.options import ModelOptions
from tests.support import configs


def run_plan(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["dms-plan", *arguments])
    with pytest.raises(SystemExit) as exit_:
        plan.main()
    return exit_.value.code


def test_layout_memory_and_five_steps_of_each_stage():
    config = configs.config(parallel__tensor_model_parallel_size=2, stage__retrofit__target_cr=2)
    text = describe(config, configs.architecture(), 8)
    assert "layout  8 processes = TP 2 x PP 1 x DP 4, fp32" in text
    assert "512 tokens a step), 2 microbatch(es) of 1" in text
    assert "window 16" in text
    assert "2 layers a stage" not in text
    assert "6N student, 2N teacher" in text
    assert "s a step on H100 SXM 80 GB: matmul" in text
    rows = [line.split() for line in text.split("stage zero_neuron")[1].splitlines()]
    rows = [row for row in rows if row and row[0].isdigit()]
    assert len(rows) == 10
    assert rows[0] == ["1", "0.900", "none", "1.000", "0.000"]
    assert rows[4] == ["10", "0.000", "none", "1.000", "0.000"]
    assert rows[9] == ["20", "0.000", "soft", "2.000", "0.500"]


def test_memory_of_every_pipeline_stage_adds_up():
    config = configs.config(parallel__pipeline_model_parallel_size=2, data__seq_length=64)
    text = describe(config, configs.architecture(), 8)
    assert "2 layers a stage" in text
    table = text.partition("memory  ")[2].splitlines()[1:4]
    names, *stages = (line.split() for line in table)
    assert names[:3] == ["stage", "ranks", "weights"]
    assert [stage[:2] for stage in stages] == [["1", "0-3"], ["2", "4-7"]]
    for stage in stages:
        counted = sum(float(size) for size in stage[2:-1])
        assert counted <= float(stage[-1])


def test_layouts_are_ranked(monkeypatch, capsys):
    words = ["experiment=tiny_pretrain", "--world-size", "4", "--gpu", "h100", "--list-layouts"]
    assert run_plan(monkeypatch, *words, "3") == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "layouts of 4 processes fit H100 SXM 80 GB" in head
    assert len(rows) == 3
    times = [float(row.split()[0]) for row in rows]
    assert times == sorted(times)


def test_a_gpu_that_is_too_small_is_refused(monkeypatch, capsys, tmp_path):
    model = to_hf_config(configs.KNOWN["qwen_r1_7b"])
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ["experiment=qwen_r1_7b", f"model.path={tmp_path}", "data.paths=[x]"]
    layout = ["parallel=tp1_bf16", "--world-size", "8"]
    assert run_plan(monkeypatch, *words, *layout, "--gpu", "a100_40gb") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "(ranks 0 to 7) needs" in message
    assert "parallel.tensor_model_parallel_size=" in message
    assert run_plan(monkeypatch, *words, *layout, "--gpu", "h300") == 2
    assert "choose one of a100_40gb" in capsys.readouterr().err
    assert run_plan(monkeypatch, *words, *layout, "cluster.gpu=h300") == 2
    assert "cluster.gpu=h300: choose one of" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-2", "two"])
def test_counts_start_at_one(monkeypatch, capsys, count):
    for flag in ("--world-size", "--list-layouts"):
        assert run_plan(monkeypatch, f"{flag}={count}", "model.path=x", "data.paths=[x]") == 2
        assert f"{count}: give a number from 1" in capsys.readouterr().err


def test_what_does_not_divide_is_answered_with_what_does(monkeypatch, capsys, tmp_path):
    model = to_hf_config(configs.KNOWN["qwen_r1_7b"])
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ["experiment=qwen_r1_7b", f"model.path={tmp_path}", "data.paths=[x]"]
    layout = ["parallel.tensor_model_parallel_size=3", "--world-size=8"]
    assert run_plan(monkeypatch, *words, *layout) == 2
    message = capsys.readouterr().err
    assert "does not divide the model's num_attention_heads=28" in message
    assert "the fastest layout that divides and fits H100 SXM 80 GB: parallel." in message


def plan_of_32b(monkeypatch, capsys, folder, *words: str) -> dict[str, str]:
    """First lines of the plan of the 32B experiment, by their first word; no data is named."""
    (folder / "config.json").write_text(json.dumps(to_hf_config(configs.KNOWN["qwen_r1_32b"])))
    given = ["experiment=qwen_r1_32b", f"model.path={folder}", "--world-size=256", "--gpu=h100"]
    assert run_plan(monkeypatch, *given, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition(" ")[0]: line for line in lines[::-1] if line[:1].isalpha()}


def test_a_plan_without_data_states_duration_and_disk(monkeypatch, capsys, tmp_path):
    lines = plan_of_32b(monkeypatch, capsys, tmp_path, "parallel=tp8_pp2")
    step = float(lines["time"].split()[1])
    count, hours, gpu_hours = (float(lines["run"].split()[i].replace(",", "")) for i in (1, 4, 6))
    assert count == 2000 + 700
    assert hours == pytest.approx(2700 * step / 3600, rel=0.02)
    assert gpu_hours == pytest.approx(256 * hours, rel=0.02)
    # 14 bytes a parameter in three checkpoints, 2 after zero_neuron, 2 x 2 in CR 2 to 8
    bytes_each = 3 * 14 + 2 + 7 * 4
    disk = float(lines["disk"].split()[1].replace(",", ""))
    assert disk == pytest.approx(bytes_each * 32763876352 / 2**30, rel=1e-3)


def test_a_much_faster_layout_is_named(monkeypatch, capsys, tmp_path):
    slow = plan_of_32b(monkeypatch, capsys, tmp_path, "parallel=tp8_pp2")
    hint = slow["hint"]
    assert "parallel.tensor_model_parallel_size=4" in hint
    overrides = [word for word in hint.split() if "=" in word]
    better = plan_of_32b(
        monkeypatch, capsys, tmp_path, "parallel=tp8_pp2", *(word.rstrip(";") for word in overrides)
    )
    assert float(better["time"].split()[1]) == pytest.approx(float(hint.split()[1]))
    assert "hint" not in better
    assert "hint" not in plan_of_32b(monkeypatch, capsys, tmp_path)  # the experiment's own layout


def test_a_plan_for_an_assumed_gpu_says_that_it_does_not_fit(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(configs.KNOWN["qwen_r1_32b"])))
    words = ["experiment=qwen_r1_32b", f"model.path={tmp_path}"]
    assert run_plan(monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert ", so it does not fit; this GPU is assumed, name another one with --gpu" in text
    (hint,) = (line for line in text.splitlines() if line.startswith("hint"))
    overrides = [word.rstrip(";") for word in hint.split() if "=" in word]
    assert run_plan(monkeypatch, *words, "--world-size=16", "--gpu=h100", *overrides) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_ratios_of_layers_and_memory_of_the_host_are_named(monkeypatch, capsys):
    words = ["stage.retrofit.layer_ratios={0:2,1:3}", "teacher.offload=true"]
    words.append("optim.offload=true")
    assert run_plan(monkeypatch, "experiment=demo", *words) == 0
    shown = capsys.readouterr().out
    # of 4 layers with 3/4 on the mean, the others evict (3 - 1/2 - 2/3) / 2
    assert shown.count("CR by layer: 0: 2, 1: 3, 2: 12, 3: 12") == 2
    assert "of the host: 0.00 pinned by a process for the teacher's layers" in shown
    assert "of a process for fp32 weights and moments" in shown


def test_stages_shorter_than_five_steps():
    config = configs.config(stage__run=["zero_neuron"], stage__zero_neuron__steps=2)
    rows = describe(config, configs.architecture(), 1).splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["1", "2"]


def test_command(monkeypatch, capsys):
    assert run_plan(monkeypatch, "experiment=tiny_pretrain", "--world-size", "4") == 0
    assert "4 processes = TP 2 x PP 1 x DP 2" in capsys.readouterr().out
    assert run_plan(monkeypatch, "experiment=tiny_pretrain", "--world-size", "3") == 2
    line = capsys.readouterr().err
    assert line.startswith("config error: parallel: tensor x pipeline x context size is 2")


def test_paths_of_the_users_own_group_file_are_kept(monkeypatch, capsys, tmp_path):
    (tmp_path / "data").mkdir()
    mine = "defaults: [tokens]\npaths: [a, b]\nweights: [0.7, 0.3]\n"
    (tmp_path / "data" / "mine.yaml").write_text(mine)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(to_hf_config(configs.architecture())))
    words = ["data=mine", f"model.path={model}", f"--config-dir={tmp_path}"]
    words += ["stage=retrofit", "method.window=16", "data.seq_length=128"]
    assert run_plan(monkeypatch, *words) == 0
    assert "layout  1 processes" in capsys.readouterr().out


def test_a_wrong_layout_is_refused_rather_than_divided_by(monkeypatch, capsys):
    override = "parallel.tensor_model_parallel_size=0"
    assert run_plan(monkeypatch, "experiment=tiny_pretrain", override) == 2
    assert "use at least 1" in capsys.readouterr().err


def test_architecture_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(configs.architecture())))
    assert read_architecture(ModelOptions(path=str(tmp_path))) == configs.architecture()


def test_architecture_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="set exactly one"):
        read_architecture(ModelOptions())
    with pytest.raises(ConfigError, match=r"model\.path=\./nowhere"):
        read_architecture(ModelOptions(path="./nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="use one of gemma3_text, glm4"):
        read_architecture(ModelOptions(path=str(tmp_path)))


def test_inference_is_planned_for_every_batch_length_and_ratio(monkeypatch, capsys, tmp_path):
    """Llama 3.1 8B of the paper's appendix G."""
    shape = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    config = to_hf_config(configs.architecture()) | shape | {"head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [f"model.path={tmp_path}", "--inference", "--batch", "1,256", "--cr", "1,4"]
    assert run_plan(monkeypatch, *words) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "H100 SXM" in head
    cells = [row.split() for row in rows]
    assert [row[:3] for row in cells] == [
        ["1", "8,192", "1"],
        ["1", "8,192", "4"],
        ["256", "8,192", "1"],
        ["256", "8,192", "4"],
    ]
    assert (cells[0][5], cells[2][5], cells[2][6]) == ("4.8009", "86.5335", "94.82%")


@pytest.mark.parametrize("words", [("--cr", "0.5"), ("--batch", "1,x"), ("--length", "0")])
def test_inference_values_that_cannot_be_are_refused(monkeypatch, capsys, words):
    assert run_plan(monkeypatch, "--inference", *words) == 2
    assert words[1].split(",")[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"method__channel": "auto"}, "channel auto (ranked at the start)"),
        ({"method__channel": "auto", "stage__run": ["pretrain"]}, "channel auto"),
        ({"method__channel": 3}, "channel 3"),
    ],
)
def test_the_plan_names_the_channel_or_says_that_it_is_ranked(changes, shown):
    text = describe(
        configs.config(**{"model__path": "model", **changes}), configs.architecture(), 1
    )
    assert f"dms: kind dms, {shown}," in text
