"""The benchmark of the vLLM plugin with a stand-in for the engine: order, resuming, tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import EntryPoints
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.serve import vllm_engine, vllm_plugin, vllm_server
from benchmarks.serve.case import Case
from benchmarks.serve.peer import Mark, marked, pure_decode_steps
from benchmarks.serve.random_export import random_folders
from benchmarks.serve.traffic import Lengths
from benchmarks.serve.vllm_plugin import ON_CPU, PARTS

ENGINE = """\
import json, os, sys
part, folder, *words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as file:
    print(*sys.argv[1:], file=file)
row = {"engine": "vLLM 0", "step_ms": 2.0, "step_ms_spread": [1.0, 3.0], "prefill_tok_s": 5}
if part in ("capacity", "grown"):
    row = {"engine": "vLLM 0", "together": 2, "step_ms": 2.0, "tokens_s": 1000}
if part == "trace":
    row = {"engine": "vLLM 0", "requests_s": 2.0, "in_flight": 6, "wait_s": 0.5, "preemptions": 0}
    row["itl_ms"] = {"p50": 9.0, "p99": 29.0}
if part == "server":
    row = {"engine": "vLLM 0", "rate": 4, "requests_s": 3.0, "tokens_s": 90}
    row["itl_ms"] = row["ttft_ms"] = {"p50": 9.0, "p99": 29.0}
for word in words:
    if "x" in word:
        row["sequences"], row["context"] = map(int, word.split("x"))
        if part == "storm" and "SKIP" in os.environ:
            row["skipped"] = "the cache is too small"
        elif part == "storm":
            blocks = int(words[words.index("--blocks") + 1])
            row |= {"tokens": [[1, 2], [3, 4 + blocks]], "most_blocks": 40, "blocks": blocks}
            row |= {"preemptions": 7, "missing_blocks": 0, "missing_pages": 0}
        print(json.dumps(row), flush=True)
        if part == "steps" and "FAIL" in os.environ:
            sys.exit(3)
"""


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the benchmark with the stand-in; (exit code, cases, calls of the engine)."""
    program, calls = tmp_path / "engine.py", tmp_path / "calls"
    program.write_text(ENGINE)
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("DMS_COMMIT", "0123456789")
    words = ["serve", "vllm_plugin", "--device", "cpu", "--models", str(tmp_path / "models")]
    words += ["--output", str(tmp_path), "--engine", f"{sys.executable} {program}"]

    def _run(*more: str) -> tuple[int, list[dict[str, Any]], list[str]]:
        calls.write_text("")
        code = main([*words, *more])
        (file,) = tmp_path.glob("*/vllm_plugin.json")
        return code, json.loads(file.read_text())["cases"], calls.read_text().splitlines()

    return _run


def test_only_what_is_missing_is_measured_again(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "1")
    code, cases, calls = benchmark("--modes", "default")
    assert code == 1
    assert [call.split()[0] for call in calls] == [*PARTS, "storm"]
    (failed,) = [case for case in cases if "failed" in case]
    assert "exit code 3" in failed["failed"]
    assert (failed["part"], Case(failed["sequences"], failed["context"])) == (
        "steps",
        ON_CPU.steps[1],
    )
    monkeypatch.delenv("FAIL")
    code, cases, calls = benchmark("--modes", "default")
    assert code == 0
    (call,) = calls
    assert call.split()[0] == "steps"
    assert f" {ON_CPU.steps[1].word} " in call
    assert ON_CPU.steps[0].word not in call
    assert len(cases) == len(ON_CPU.steps) + len(PARTS) - 1
    monkeypatch.setenv("DMS_COMMIT", "9876543210")
    _, cases, calls = benchmark("--modes", "default", "--parts", "capacity")
    assert [call.split()[0] for call in calls] == ["capacity"]
    assert len(cases) == len(ON_CPU.steps) + len(PARTS) - 1


def test_the_cache_holds_as_many_dense_sequences_of_every_shape(benchmark: Any) -> None:
    _, _, (call,) = benchmark("--parts", "capacity", "--modes", "default")
    # 2 layers of 2 heads of 32 channels, keys and values of 2 bytes
    expected = 4.5 * ON_CPU.capacity.cases[0].context * 2 * 2 * 32 * 2 * 2
    assert call.split()[call.split().index("--cache-bytes") + 1] == f"{expected:.0f}"
    assert vllm_plugin._cache_bytes("Llama-3.1-8B", 32768) == 18 * 2**30


def test_the_storm_runs_again_in_a_quarter_of_the_blocks(benchmark: Any) -> None:
    _, (storm,), calls = benchmark("--parts", "storm")
    assert [call.partition("--blocks ")[2] for call in calls] == ["0 --eager", "10"]
    assert storm["blocks"] == 10
    assert storm["blocks_unlimited"] == 40
    assert (storm["equal"], storm["tokens"]) == (1, 4)


def test_a_storm_that_does_not_start_has_the_reason(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIP", "1")
    _, (storm,), calls = benchmark("--parts", "storm")
    assert storm["skipped"] == "the cache is too small"
    assert len(calls) == 1
    assert "the cache is too small" in vllm_plugin.tables({"cases": [storm], "cache_sequences": 1})


def test_another_number_of_steps_is_another_result(benchmark: Any) -> None:
    words = ("--parts", "steps", "--modes", "default", "--new-tokens")
    benchmark(*words, "64")
    _, cases, (call,) = benchmark(*words, "128")
    assert "--new-tokens 128" in call
    assert sorted(case["new_tokens"] for case in cases) == [64, 64, 128, 128]


def test_a_model_of_the_user_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "Llama-3.1-8B" / "model.safetensors"
    own.parent.mkdir()
    own.write_bytes(b"mine")
    words = ["--device", "cpu", "--engine", "python", "--models", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "vllm_plugin", *words])
    assert f"{own.parent}: is not of this benchmark" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not of this benchmark"):
        random_folders("Llama-3.1-8B", tmp_path, torch.device("cpu"))
    assert own.read_bytes() == b"mine"


def test_weights_of_other_settings_are_drawn_again(tmp_path: Path) -> None:
    device = torch.device("cpu")
    first = random_folders("small", tmp_path, device)
    times = [(first.dms / "config.json").stat().st_mtime_ns]
    for settings in (None, '{"kept": 0.5, "window": 3}'):
        if settings is not None:
            (tmp_path / "small" / "random_weights.json").write_text(settings)
        assert random_folders("small", tmp_path, device) == first
        times.append((first.dms / "config.json").stat().st_mtime_ns)
    assert times[0] == times[1] != times[2]


def test_both_models_have_the_same_weights(benchmark: Any, tmp_path: Path) -> None:
    benchmark("--ways", "dms,dense-fp8", "--parts", "steps", "--modes", "decode-graphs")
    calls = (tmp_path / "calls").read_text().splitlines()
    dms, dense = (Path(call.split()[1]) for call in calls)
    assert calls[0].endswith("--kv-cache-dtype auto --eager-prefill")
    assert calls[1].endswith("--kv-cache-dtype fp8 --eager-prefill")
    files = [folder / "model.safetensors" for folder in (dms, dense)]
    assert files[0].samefile(files[1])
    assert (dense / "tokenizer.json").samefile(dms / "tokenizer.json")
    names = [json.loads((f / "config.json").read_text())["architectures"][0] for f in (dms, dense)]
    assert names == ["LlamaForCausalLMDMS", "LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "3", "--engine", "python"], "--new-tokens 3: at least 16"),
        ([], "vllm is not installed; --engine names a Python that has it"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vllm_plugin.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "vllm_plugin", "--device", "cpu", *words])
    assert message in capsys.readouterr().err


def row(way: str, step_ms: float, mode: str = "default", **more: Any) -> dict[str, Any]:
    case = {"part": "steps", "shape": "small", "sequences": 8, "context": 8192}
    spread = {"step_ms_spread": [step_ms, step_ms], "prefill_tok_s": 1000 / step_ms}
    return {"way": way, "mode": mode, "step_ms": step_ms, **spread, **case, **more}


def test_the_faster_mode_of_each_way_is_compared() -> None:
    rows = [
        row("dms", 2.0),
        row("dense", 5.0),
        row("dense", 4.0, mode="decode-graphs"),
        row("dense-fp8", 3.0),
    ]
    text = vllm_plugin.tables({"cases": rows, "cache_sequences": 4.5})
    _, _, steps = text.split("\n\n")[1].splitlines()
    cells = [cell.strip() for cell in steps.split("|")[3:-1]]
    assert cells == ["2.00", "", "4.00", "3.00", "2.00", "1.50"]
    _, _, prefill = text.split("\n\n")[3].splitlines()
    assert [cell.strip() for cell in prefill.split("|")[-3:-1]] == ["2.00", "1.50"]


def test_traces_are_compared_by_their_rates_and_have_their_limits() -> None:
    case = {"part": "trace", "shape": "small", "sequences": 384, "context": 1024}
    case |= {"mode": "default", "new_tokens": 2048}
    itl = {"p50": 12.34, "p99": 29.96}
    rows = [
        {**case, "way": "dms", "requests_s": 6.0, "in_flight": 300, "itl_ms": itl},
        {**case, "way": "dense", "requests_s": 2.4, "in_flight": 90, "itl_ms": itl},
        {**case, "way": "dense-fp8", "skipped": "too slow"},
    ]
    text = vllm_plugin.tables({"cases": rows, "cache_sequences": 4.5})
    tables = dict(zip(*[iter(text.split("\n\n"))] * 2, strict=True))
    _, _, compared = tables["Requests/s that are sustained:"].splitlines()
    cells = [cell.strip() for cell in compared.split("|")[3:-1]]
    assert cells == ["6.00", "", "2.40", "", "2.50", ""]
    listed = tables["Traces:"].splitlines()[2:]
    assert ["12.3 / 30.0" in line for line in listed] == [True, True, False]
    assert "too slow" in listed[2]


SERVER = """\
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
if "--broken" in sys.argv:
    sys.exit(3)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
CLIENT = """\
import json, pathlib, sys, urllib.request
urllib.request.urlopen(sys.argv[sys.argv.index("--base-url") + 1] + "/health")
folder = pathlib.Path(sys.argv[sys.argv.index("--result-dir") + 1])
found = {"completed": 7, "request_throughput": 2.0, "output_throughput": 30.4}
found |= {f"p{n}_{name}_ms": n for n in (50, 99) for name in ("ttft", "itl")}
(folder / "result.json").write_text(json.dumps(found))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for `vllm serve` and `vllm bench serve`."""
    for name, code in (("SERVE", SERVER), ("BENCH", CLIENT)):
        (tmp_path / name).write_text(code)
        monkeypatch.setattr(vllm_server, name, [sys.executable, str(tmp_path / name)])


@pytest.mark.usefixtures("programs")
def test_the_result_of_the_client_becomes_a_row(tmp_path: Path) -> None:
    load = vllm_server.Load(7, Lengths(10, 5), 2.5)
    row = vllm_server.measure_server(tmp_path, {"dtype": "float32"}, os.environ, load)
    itl = {"p50": 50, "p99": 99}
    expected = {"rate": 2.5, "requests_s": 2.0, "tokens_s": 30, "itl_ms": itl, "ttft_ms": itl}
    assert row == expected
    with pytest.raises(vllm_server.ServerError, match="7 of 8 requests were answered"):
        vllm_server.measure_server(tmp_path, {}, os.environ, load._replace(requests=8))


@pytest.mark.usefixtures("programs")
def test_a_server_that_ends_is_an_error(tmp_path: Path) -> None:
    load = vllm_server.Load(7, Lengths(10, 5), 2.5)
    with pytest.raises(vllm_server.ServerError, match="vllm serve ended with exit code 3"):
        vllm_server.measure_server(tmp_path, {"broken": True}, os.environ, load)


def test_arguments_of_the_engine_become_options() -> None:
    options = {"max_num_seqs": 4, "enable_prefix_caching": False, "ignore_eos": True}
    words = vllm_server.words({**options, "compilation_config": {"mode": 0}})
    expected = ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--ignore-eos"]
    assert words == [*expected, "--compilation-config", '{"mode": 0}']


def test_dms_is_not_served_where_vllm_does_not_find_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "entry_points", lambda group: EntryPoints())
    (row,) = vllm_engine.rows(None, arguments(part="server", cases=[Case(2, 8)]))
    assert "pip install --no-deps -e ." in row["skipped"]


class InProcessEngine:
    """Stand-in for vLLM's engine: every step gives two tokens to each request."""

    def __init__(self) -> None:
        self.added: dict[str, tuple[list[int], Any]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.added[name] = (prompt["prompt_token_ids"], params)

    def step(self) -> list[Any]:
        output = [SimpleNamespace(token_ids=[1, 2])]
        return [SimpleNamespace(request_id=name, outputs=output) for name in self.added]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.added[name]


def test_requests_of_a_trace_are_greedy_and_return_new_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = ModuleType("vllm.sampling_params")
    kinds.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    engine = InProcessEngine()
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    server = vllm_engine.InProcess(vllm, SimpleNamespace(llm_engine=engine))
    names = [server.add([5, 6], 9), server.add([7], 3)]
    prompt, params = engine.added[names[0]]
    assert (prompt, params.max_tokens, params.temperature) == ([5, 6], 9, 0.0)
    assert (params.ignore_eos, params.output_kind) == (True, "delta")
    assert server.step() == [(name, 2) for name in names]
    server.abort(names[:1])
    assert list(engine.added) == names[1:]


def test_steps_with_a_prompt_or_a_change_of_the_batch_do_not_count() -> None:
    counts = [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4, 0], [6, 5, 1], [7, 6, 2], [7, 3]]
    marks = [Mark(float(at**2), each, 0) for at, each in enumerate(counts)]
    assert pure_decode_steps(marks) == {2: [3.0, 5.0], 3: [11.0]}


def test_steps_are_recorded_with_the_blocks_in_use() -> None:
    requests = [SimpleNamespace(num_output_tokens=2), SimpleNamespace(num_output_tokens=0)]
    pool = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: 4)
    scheduler = SimpleNamespace(running=requests, kv_cache_manager=SimpleNamespace(block_pool=pool))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    engine = SimpleNamespace(engine_core=core, step=lambda: "outputs")
    plain = engine.step
    with marked(SimpleNamespace(llm_engine=engine)) as marks:
        assert engine.step() == "outputs"
    assert engine.step is plain
    assert [(mark.counts, mark.blocks) for mark in marks] == [([2, 0], 5)]


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"part": "steps", "folder": Path("export"), "cases": [Case(2, 8), Case(1, 8)]}
    given |= {"kv_cache_dtype": "auto", "eager_prefill": True, "gpus": 2, "dms": True, "vocab": 9}
    return argparse.Namespace(**{**given, **changes})


def test_plain_vllm_gets_its_attention_and_the_plugin_chooses_its_own() -> None:
    given: list[dict[str, Any]] = []
    vllm = SimpleNamespace(LLM=lambda **words: given.append(words))
    for dms in (True, False):
        vllm_engine.start(vllm, arguments(dms=dms), 2)
    plugin, plain = given
    assert plugin["tensor_parallel_size"] == 2
    assert plain == {**plugin, "attention_backend": "FLASH_ATTN", "enable_prefix_caching": False}


def test_an_engine_that_does_not_start_gives_rows_with_the_reason() -> None:
    def refuse(**_: object) -> None:
        raise ValueError("the cache holds no sequence\nadvice")

    rows = list(vllm_engine.rows(SimpleNamespace(LLM=refuse), arguments()))
    assert [row["sequences"] for row in rows] == [2, 1]
    assert {row["skipped"] for row in rows} == {"the cache holds no sequence"}
