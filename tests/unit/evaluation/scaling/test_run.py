"""A whole run on a tiny export: budgets, resumption after a kill, shards, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dms_train.cli import evaluate as command
from dms_train.cli.config_source import compose_evaluation
from dms_train.config.build import ConfigError
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling import results, store
from dms_train.evaluation.scaling.run import evaluate, prepare
from dms_train.inference.errors import InferenceError
from dms_train.kernels import dispatch
from tests.unit.evaluation.conftest import SPEC, windowed_architecture, write_model
from tests.unit.inference.conftest import WINDOW

CPU = torch.device("cpu")
SHEETS, WIDTHS, LENGTHS = 8, (1, 3), (20 / 1024, 40 / 1024)
CLOCKS = ("session", "clock", "seconds", "peak_allocated_bytes")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> Path:
    """Prompts of different lengths; a random model soon writes the letter that ends them."""
    path = tmp_path_factory.mktemp("sheets") / "sheets.jsonl"
    rows = [
        {"prompt": f"1: Solve {n}*c = {n * n} for c.\nSolution", "answers": ["1"], "stop": "a"}
        for n in range(1, SHEETS + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(target, sheets, folder, *more: str) -> list[str]:
    return [
        f"model.path={target.export}",
        "model.device=cpu",
        f"task.path={sheets}",
        f"sweep.lengths={list(LENGTHS)}",
        f"sweep.widths={list(WIDTHS)}",
        "sampling.temperature=1.0",
        "model.max_num_seqs=6",
        f"run.dir={folder}",
        *more,
    ]


def run(target, sheets, folder, *more: str) -> results.RunResult:
    options = compose_evaluation(words(target, sheets, folder, *more))
    return evaluate(prepare(options), lambda line: None)


def rows(folder) -> list[dict]:
    found = store.read_chains(folder)
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in found]


@pytest.fixture(scope="module")
def whole(target, sheets, tmp_path_factory) -> results.RunResult:
    return run(target, sheets, tmp_path_factory.mktemp("whole") / "run")


def test_every_budget_is_counted_from_the_chains(whole):
    found = rows(whole.folders[0])
    assert len(found) == SHEETS * max(WIDTHS)
    assert whole.complete
    points = {str(point.budget): point for point in whole.points()}
    assert len(points) == 4
    reasons = {row["finish_reason"] for row in found}
    assert reasons == {"stop", "length"}
    for index, length in enumerate(LENGTHS):
        limit = round(length * 1024)
        for width in WIDTHS:
            point = points[f"{length:g}-{width}-2"]
            kept = [row for row in found if row["chain"] < width]
            cut = [r["tokens"] > limit or r["finish_reason"] != "stop" for r in kept]
            assert point.truncated == pytest.approx(sum(cut) / len(kept))
            reads = sum(row["kv_reads"][index] for row in kept) / SHEETS
            assert point.kv_reads == pytest.approx(reads)
            joint = [r["joint_peak"][index] for r in kept if r["chain"] == width - 1]
            assert point.peak_tokens == pytest.approx(sum(joint) / SHEETS)
            assert point.peak_tokens_shared <= point.peak_tokens
            right = [r["correct"][0] and not c for r, c in zip(kept, cut, strict=True)]
            assert point.chain_accuracy == pytest.approx(sum(right) / len(kept))
    summary = json.loads((whole.folders[0] / "summary.json").read_text())
    assert summary["complete"] is True
    assert [p["budget"] for p in summary["points"]] == list(points)
    assert summary["seconds"] > 0
    assert summary["peak_allocated_bytes"] > 0
    assert store.config_hash(summary["config"]) == summary["config_hash"]
    assert summary["versions"] == whole.header["versions"]


def test_the_header_names_what_decides_the_result(whole, target):
    header = whole.header
    config = header["config"]
    assert set(config) == {
        *("task", "documents", "model", "cr", "policy", "sampling", "sweep"),
    }
    assert config["documents"]["count"] == SHEETS
    assert config["policy"] == {"name": "auto", "window": WINDOW}
    assert config["cr"] == 2.0
    assert config["sampling"] == {"temperature": 1.0, "top_p": 0.95, "top_k": -1, "seed": 0}
    assert len(config["model"]["sha256"]) == 64
    assert header["versions"]["torch"]


def test_a_killed_run_is_resumed_without_repeating_or_losing_a_chain(
    whole, target, sheets, tmp_path
):
    folder = tmp_path / "run"
    # one document at a time, so that there is something left to do
    arguments = words(target, sheets, folder, "model.max_num_seqs=3")
    code = f"import sys; from dms_train.cli.evaluate import main; sys.exit(main({arguments!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    file, deadline = folder / "chains" / "00000-of-00001.jsonl", time.monotonic() + 120
    while not (file.is_file() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = file.read_bytes()
    kept = before[: store._whole_documents(file)[1]]
    assert before
    found = run(target, sheets, folder)
    assert found.complete
    assert file.read_bytes().startswith(kept)
    assert rows(folder) == rows(whole.folders[0])
    written = file.read_bytes()
    run(target, sheets, folder)
    assert file.read_bytes() == written


def test_shards_of_one_folder_and_folders_of_one_configuration_are_merged(
    whole, target, sheets, tmp_path
):
    for shard in range(3):
        folder = tmp_path / ("one" if shard < 2 else "two")
        part = run(target, sheets, folder, f"run.shard={shard}", "run.shards=3")
        assert not part.complete
    (merged,) = results.load_all([tmp_path])
    assert merged.complete
    assert len(merged.folders) == 2
    assert merged.points() == whole.points()


def test_another_configuration_in_the_folder_is_refused(whole, target, sheets):
    with pytest.raises(EvaluationError, match=r"another sampling\.seed; choose another run\.dir"):
        run(target, sheets, whole.folders[0], "sampling.seed=1")
    with pytest.raises(EvaluationError, match=r"another documents\.count, documents\.sha256, task"):
        run(target, sheets, whole.folders[0], "task.limit=3")
    other = words(replace(target, export=target.teacher), sheets, whole.folders[0])
    with pytest.raises(EvaluationError, match=r"another cr, model\.sha256, policy\.window"):
        evaluate(prepare(compose_evaluation(other)), lambda line: None)


def test_a_chain_that_outgrows_the_cache_ends_the_run(target, sheets, tmp_path):
    wide = words(target, sheets, tmp_path / "run", "sweep.lengths=[0.75]", "policy=keep_all")
    prepared = prepare(compose_evaluation([w for w in wide if w != f"sweep.lengths={LENGTHS}"]))
    small = replace(
        prepared, engine=replace(prepared.engine, cache_bytes=24_000, slab_pages=1, page_slots=4)
    )
    with pytest.raises(InferenceError, match=r"document \d+: the cache is too small"):
        evaluate(small, lambda line: None)


def test_a_download_that_is_not_asked_for_is_refused(target, sheets):
    with pytest.raises(ConfigError, match=r"task\.download=true: needs task\.hub=true"):
        compose_evaluation(words(target, sheets, "x", "task.download=true"))


def test_a_row_of_the_cache_is_for_the_longest_prompt_and_chain(target, sheets):
    prepared = prepare(compose_evaluation(words(target, sheets, "x", "model.decode_steps=4")))
    longest = max(len(each.prompt) for each in prepared.documents)  # a character is a token
    assert prepared.engine.max_model_len == longest + 40 + 4
    long = prepare(compose_evaluation(words(target, sheets, "x", "sweep.lengths=[64]")))
    stored = json.loads((target.export / "config.json").read_text())
    assert long.engine.max_model_len == stored["max_position_embeddings"]


def test_chains_do_not_share_a_prompt_that_leaves_a_layers_window(
    target, sheets, tokenizer, tmp_path
):
    """A layer with a window drops prompt tokens later than the policy does, or without one."""
    assert prepare(compose_evaluation(words(target, sheets, "x"))).window == WINDOW
    write_model(tmp_path / "export", SPEC, 0, tokenizer, a=windowed_architecture())
    windowed = replace(target, export=tmp_path / "export")
    for policy in ("auto", "keep_all"):
        given = words(windowed, sheets, "x", f"policy={policy}")
        assert prepare(compose_evaluation(given)).window is None
    given = words(windowed, sheets, "x", "policy=h2o", "policy.budget=16")
    with pytest.raises(InferenceError, match="policy=h2o: does not support"):
        prepare(compose_evaluation(given))


def test_the_window_policy_takes_its_window_from_its_ratio(target, sheets, tmp_path):
    more = ("policy.name=window", "policy.cr=4", f"sweep.lengths=[{LENGTHS[1]}]")
    prepared = prepare(
        compose_evaluation(words(replace(target, export=target.teacher), sheets, "x", *more))
    )
    longest = max(len(each.prompt) for each in prepared.documents)  # a character is a token
    assert prepared.window == int((longest + 40) / 4) - 1
    assert prepared.engine.policy_options == {"window": prepared.window}
    assert prepared.header["config"]["cr"] == 4.0
    dense = prepare(compose_evaluation(words(replace(target, export=target.teacher), sheets, "x")))
    assert (dense.header["config"]["cr"], dense.engine.policy_options) == (1.0, {})


def test_a_policy_is_chosen_by_its_name_with_options_as_keys(target, sheets):
    other = words(replace(target, export=target.teacher), sheets, "x")
    more = (
        "policy=streaming_llm",
        "policy.budget=24",
        "policy.sinks=2",
        "policy.positions='cache'",
    )
    short = prepare(compose_evaluation([*other, *more]))
    assert short.engine.policy == "streaming_llm"
    assert short.engine.policy_options == {"budget": 24, "sinks": 2, "positions": "cache"}
    listed = "policy.options=['sinks=2','positions=cache']"
    more = ("policy.name=streaming_llm", "policy.budget=24", listed)
    assert prepare(compose_evaluation([*other, *more])).header == short.header
    more = ("policy=cam", "policy.budget=9", "policy.expected=true", "policy.targets=3")
    found = prepare(compose_evaluation([*other, *more])).engine.policy_options
    assert found == {"budget": 9, "expected": True, "targets": 3}


@pytest.mark.skipif(not dispatch.is_supported(CPU), reason="needs triton's interpreter")
def test_fp8_pages_are_another_configuration_with_fewer_bytes(target, sheets, tmp_path):
    few = ("task.limit=1", "sweep.widths=[1]", "sweep.lengths=[0.002]", "model.max_num_seqs=1")
    found = {
        dtype: run(target, sheets, tmp_path / dtype, *few, f"model.cache_dtype={dtype}")
        for dtype in ("auto", "fp8")
    }
    assert "cache_dtype" not in found["auto"].header["config"]["model"]
    assert found["fp8"].header["config"]["model"]["cache_dtype"] == "fp8"
    assert found["fp8"].method == f"{found['auto'].method}, FP8 pages"
    (one,), (other,) = (found[dtype].documents["0"] for dtype in ("auto", "fp8"))
    assert other["peak_bytes"] < one["peak_bytes"] / 2  # of float32


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.name=nothing"], r"task\.name=nothing: choose one of aime24"),
        (["policy.name=window"], r"give policy\.window or policy\.cr"),
        (["policy.name=h2o", "policy.options=['cr=4']"], r"set policy\.cr"),
        (["model.cache_dtype=int4"], r"cache_dtype='int4': choose one of auto, fp8"),
        (["policy=h20"], r"policy='h20': choose one of auto, cam"),
        (["policy=h2o", "policy.bugdet=8"], r"policy=h2o: no option bugdet; did you mean budget"),
        (["policy=tova", "policy.budget=9", "policy.scope=heads"], r"choose one of layer, group"),
        (["policy=h2o", "policy.budget=9", "policy.prefill=7"], r"prefill=7: expected text"),
        (["policy.sinks=2"], "policy=auto: takes no options, got sinks"),
        (["policy.window=8"], "policy=auto: takes no options, got window"),
        (["policy.name=window", "policy.cr=2"], r"give one length a run"),
        (["task.name=niah", "task.fixture=true"], r"its answers have a fixed length"),
        (["task.name=math500", "task.fixture=true"], r"its tokenizer cannot encode"),
    ],
)
def test_what_cannot_be_run_is_refused(target, sheets, tmp_path, more, message):
    with pytest.raises((EvaluationError, InferenceError), match=message):
        prepare(compose_evaluation(words(target, sheets, tmp_path, *more)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=m", "sweep.width=[1]"], r"sweep\.width: unknown key; did you mean sweep\.wi"),
        (["model.path=m", "sweep.widths=[0]"], r"sweep\.widths=\[0\]: give chains of a document"),
        (["model.path=m", "sweep.lengths=[0.0001]"], r"sweep\.lengths=0\.0001: .*at least one"),
        (["model.path=m", "run.shard=2", "run.shards=2"], r"numbered from 0 to 1"),
        ([], r"model\.path: missing; set model\.path="),
        (["x y"], r"not an override"),
        (["model.path=m", "policy=h2o", "policy.budget=8,9"], r"policy\.budget: one value for one"),
        (["model.path=m", "task.limit=0"], r"task\.limit=0: use at least 1"),
        (["model.path=m", "model.device=gpu"], r"model\.device=gpu: use auto, cpu, cuda or cuda:1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        compose_evaluation(words)


def test_a_gpu_is_named_by_its_number(monkeypatch):
    words = ["model.path=m", "model.device=cuda:1"]
    device = compose_evaluation(words).model.device
    with pytest.raises(EvaluationError, match=r"device=cuda:99: (this machine has no|GPUs here)"):
        resolve_device("cuda:99")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device(device) == "cuda:1"
    with pytest.raises(EvaluationError, match="numbered from 0 to 1"):
        resolve_device("cuda:2")
    with pytest.raises(EvaluationError, match="device=gpu: use cpu, cuda or cuda:1"):
        resolve_device("gpu")


def test_the_command_prints_every_budget_and_lists_the_tasks(whole, target, sheets, capsys):
    assert command.main(words(target, sheets, whole.folders[0])) == 0
    printed = capsys.readouterr().out
    assert all(str(point.budget) in printed for point in whole.points())
    assert command.main(["tasks"]) == 0
    assert "gpqa_diamond" in capsys.readouterr().out
    assert command.main(["model.path=/absent"]) == 2
    assert "no such directory" in capsys.readouterr().err
