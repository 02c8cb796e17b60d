"""`dms-eval harness`: its files, and what it refuses in one line."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.utils import collect_env

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")

from jinja2 import Environment
from lm_eval import utils
from lm_eval.tasks import TaskManager

from dms_train.cli.evaluate import main
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.evaluation.harness import loading
from tests.support.harness_tasks import CHOOSE, CONTINUE, ROLL, write_tasks
from tests.unit.evaluation.conftest import SPEC, write_model


@pytest.fixture(scope="module", autouse=True)
def slow_lists_read_once():
    """The harness asks pip for all packages after each task, and reads all tasks after a typo."""
    whole_index = functools.cache(lambda *paths: TaskManager(include_path=[*paths]))

    def manager(include_path, include_defaults=True):
        if include_defaults:
            return whole_index(*include_path)
        return TaskManager(include_path=include_path, include_defaults=False)

    with pytest.MonkeyPatch.context() as patch:
        packages = functools.cache(collect_env.get_pretty_env_info)
        patch.setattr(collect_env, "get_pretty_env_info", packages)
        patch.setattr(loading, "TaskManager", manager)
        yield


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_exam_tokenizer(root / "tokenizer")
    (root / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_model(root / "model", SPEC, 0, root / "tokenizer")
    tasks = write_tasks(root / "tasks")
    (tasks / "group.yaml").write_text(
        f"group: sheets\ntask: [{CHOOSE}, {CONTINUE}]\n"
        "aggregate_metric_list:\n  - {metric: acc, weight_by_size: true}\n"
    )
    (tasks / "outer.yaml").write_text(f"group: outer\ntask: [sheets, {ROLL}]\n")
    (tasks / "absent.yaml").write_text(
        "task: absent_data\ndataset_path: openai/gsm8k\ndataset_name: main\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: question\ndoc_to_target: answer\n"
    )
    (tasks / "code.py").write_text("import no_such_package\n\n\ndef text(doc):\n    return ''\n")
    (tasks / "package.yaml").write_text(
        "task: absent_package\ndataset_path: json\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: !function code.text\ndoc_to_target: ''\n"
    )
    (tasks / "old.py").write_text("raise ValueError('sympy is too old')\n")
    (tasks / "library.yaml").write_text(
        "task: old_library\ndataset_path: json\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: !function old.text\ndoc_to_target: ''\n"
    )
    return root


def words(workspace: Path, tasks: str, output: str, *further: str) -> list[str]:
    return [
        *("harness", str(workspace / "model"), "--tasks", tasks),
        *("--include-path", str(workspace / "tasks"), "--output", str(workspace / output)),
        *further,
    ]


@pytest.fixture(scope="module")
def written(workspace) -> Path:
    given = ("--limit", "4", "--num-fewshot", "1", "--log-samples")
    assert main(words(workspace, f"sheets,{ROLL}", "first", *given)) == 0
    return workspace / "first"


def test_results_are_those_of_the_samples(written):
    results = json.loads((written / "results.json").read_text())
    assert results["n-samples"][CHOOSE] == {"original": 6, "effective": 4}
    assert results["n-shot"][CHOOSE] == 1
    samples = [json.loads(line) for line in (written / f"samples_{CHOOSE}.jsonl").open()]
    assert len(samples) == 4
    right = 0
    for sample in samples:
        values = [float(value) for ((value, _),) in sample["resps"]]
        right += values.index(max(values)) == sample["doc"]["answer"]
        context = sample["arguments"][0][0]
        assert context.count("x =") == 2, "one example, one question"
    assert results["results"][CHOOSE]["acc,none"] == right / 4
    assert results["results"]["sheets"]["acc,none"] == right / 4
    assert len((written / f"samples_{ROLL}.jsonl").read_text().splitlines()) == 4
    assert "samples" not in results
    assert not list(written.glob("*.partial"))


def test_a_template_is_compiled_once_for_all_documents_of_a_task(workspace, monkeypatch):
    compiled, compile_one = [], Environment.compile

    def counted(self, source, *further, **options):
        compiled.append(source)
        return compile_one(self, source, *further, **options)

    monkeypatch.setattr(Environment, "compile", counted)
    given = ("--limit", "4", "--num-fewshot", "2", "--log-samples")
    assert main(words(workspace, CHOOSE, "compiled", *given)) == 0
    times = Counter(source for source in compiled if "{{" in source)
    assert set(times) == {"{{question}}", "{{choices}}", "{{answer}}"}
    assert max(times.values()) == 2  # the harness also reads a document when it loads the task
    assert "from_string" not in vars(utils.env)


def test_results_have_the_cost_of_the_cache_and_the_model(workspace, written):
    dms = json.loads((written / "results.json").read_text())["dms"]
    kv = dms["kv"]
    assert kv["cr_factor"] > 1.3
    assert kv["requests"] == 4 * 4 + 4 + 4
    assert kv["kv_reads"] > 0  # of the answers that are generated
    assert kv["prefill_reads"] > kv["kv_reads"]
    digest = hashlib.sha256()
    model = workspace / "model"
    weights = sorted(path.name for path in model.glob("*.safetensors"))
    for name in [*weights, "config.json", "export.json", "tokenizer.json"]:
        if (model / name).exists():
            content = hashlib.sha256((model / name).read_bytes()).hexdigest()
            digest.update(f"{name}:{content}\n".encode())
    assert dms["model_sha256"] == digest.hexdigest()
    assert dms["versions"]["lm-eval"].startswith("0.4.")
    assert dms["engine"]["enable_prefix_caching"]


def test_peak_tokens_are_those_of_single_requests(written, workspace):
    given = ("--limit", "4", "--policy", "keep_all", "--max-num-seqs", "8", "--log-samples")
    assert main(words(workspace, CHOOSE, "peaks", *given)) == 0
    folder = workspace / "peaks"
    kv = json.loads((folder / "results.json").read_text())["dms"]["kv"]
    samples = [json.loads(line) for line in (folder / f"samples_{CHOOSE}.jsonl").open()]
    # a token is a character; the last token of a continuation is scored and never stored
    lengths = [sum(map(len, pair)) - 1 for each in samples for pair in each["arguments"]]
    assert len(lengths) == kv["requests"] == 16
    assert kv["peak_tokens"] == pytest.approx(sum(lengths) / 16)
    assert kv["peak_tokens_max"] == max(lengths)
    by_task = json.loads((written / "results.json").read_text())["dms"]["kv_by_task"]
    assert set(by_task) == {"sheets", ROLL}
    total = json.loads((written / "results.json").read_text())["dms"]["kv"]
    for name in ("requests", "tokens", "kv_reads", "prefill_reads"):
        assert sum(each[name] for each in by_task.values()) == pytest.approx(total[name])
    held = sum(each["tokens"] / each["cr_factor"] for each in by_task.values())
    assert total["tokens"] / held == pytest.approx(total["cr_factor"])


def test_a_model_is_printed_beside_its_original(workspace, capsys):
    original = workspace / "original"
    write_model(original, None, 0, workspace / "tokenizer")
    given = ("--limit", "4", "--log-samples", "--original", str(original), "--window", "8")
    assert main(words(workspace, f"{CHOOSE},{ROLL}", "pair", *given, "--policy", "window")) == 0
    printed = capsys.readouterr().out
    both = {
        name: json.loads((workspace / "pair" / part / "results.json").read_text())
        for name, part in (("model", ""), ("original", "original"))
    }
    assert both["original"]["dms"]["model"] == str(original)
    assert both["original"]["dms"]["kv"]["cr_factor"] == pytest.approx(1)
    assert both["model"]["dms"]["kv"]["cr_factor"] > 2
    for key in ("settings", "definitions", "versions"):
        assert both["original"]["dms"][key] == both["model"]["dms"][key]
    asked = [
        [(line["doc_id"], line["arguments"]) for line in map(json.loads, path.open())]
        for part in ("", "original")
        for path in [workspace / "pair" / part / f"samples_{CHOOSE}.jsonl"]
    ]
    assert asked[0] == asked[1], "the same questions with the same examples"
    compared = json.loads((workspace / "pair" / "comparison.json").read_text())
    by_metric = {(row["task"], row["metric"]): row for row in compared}
    for name in ("model", "original"):
        values = both[name]["results"]
        assert by_metric[CHOOSE, "acc"][name] == values[CHOOSE]["acc,none"]
        assert by_metric[ROLL, "bits_per_byte"][name] == values[ROLL]["bits_per_byte,none"]
    row = by_metric[CHOOSE, "acc"]
    assert row["difference"]["value"] == pytest.approx(row["model"] - row["original"])
    assert row["documents"] == 4
    assert by_metric[ROLL, "bits_per_byte"]["difference"] is None, "no mean over documents"
    assert f"| {CHOOSE} | acc | 2 | 4 | {row['original']:.4f} | {row['model']:.4f} |" in printed
    # the stored results of the original serve other models with the same settings
    again = ["--limit", "4", "--original", str(workspace / "pair" / "original")]
    assert main(words(workspace, CHOOSE, "reused", *again)) == 0
    reused = json.loads((workspace / "reused" / "comparison.json").read_text())
    assert reused[0]["original"] == row["original"]
    assert not (workspace / "reused" / "original").exists()
    for further, fact in (
        (("--seed", "1"), "its seed (settings) was 1234, here it is 1"),
        (("--limit", "3"), f"its {CHOOSE} (tasks) was {{'num_fewshot': None, 'limit': 4.0, "),
        (("--tasks", f"{CHOOSE},{CONTINUE}"), f"its results lack {CONTINUE}"),
    ):
        assert main(words(workspace, CHOOSE, "refused", *again, *further)) == 2
        assert fact in capsys.readouterr().err
    assert not (workspace / "refused").exists()


def test_a_failure_keeps_the_results_of_earlier_tasks(workspace, monkeypatch, capsys):
    given = ("--limit", "2", "--gen-kwargs", "num_beams=2")
    assert main(words(workspace, f"{CHOOSE},{CONTINUE}", "half", *given)) == 2
    assert "num_beams" in capsys.readouterr().err
    results = json.loads((workspace / "half" / "results.json").read_text())
    assert set(results["results"]) == {CHOOSE}
    assert set(results["dms"]["tasks"]) == {CHOOSE}, "finished ones only"


def test_the_policy_changes_cost_and_answers(workspace, written):
    given = ("--limit", "4", "--policy", "keep_all", "--no-enable-prefix-caching")
    assert main(words(workspace, ROLL, "kept", *given)) == 0
    kept, own = (
        json.loads((folder / "results.json").read_text())
        for folder in (workspace / "kept", written)
    )
    assert kept["dms"]["kv"]["cr_factor"] == pytest.approx(1)
    assert not kept["dms"]["engine"]["enable_prefix_caching"]
    names = ("results", ROLL, "bits_per_byte,none")
    values = []
    for found in (kept, own):
        for name in names:
            found = found[name]
        values.append(found)
    assert abs(values[0] - values[1]) > 0.001


def test_sampled_answers_are_asked_for_by_gen_kwargs(workspace):
    given = ("--gen-kwargs", "do_sample=true,temperature=1.0,max_gen_toks=8", "--log-samples")
    texts = []
    for seed in ("1", "2"):
        assert main(words(workspace, CONTINUE, f"seed{seed}", *given, "--seed", seed)) == 0
        lines = (workspace / f"seed{seed}" / f"samples_{CONTINUE}.jsonl").open()
        texts.append([json.loads(line)["resps"][0][0] for line in lines])
    assert texts[0] != texts[1]
    assert max(len(text) for text in texts[0]) <= 8


@pytest.mark.parametrize(
    ("tasks", "further", "facts"),
    [
        ("sheets_chose", (), ("task sheets_chose", "did you mean sheets_choose")),
        ("absent_data", (), ("task absent_data", "openai/gsm8k", "--download")),
        ("absent_package", (), ("task absent_package", "no_such_package; install it")),
        ("old_library", (), ("task old_library: sympy is too old",)),
        (CHOOSE, ("--published", "GPT"), ("--published GPT", "SmolLM2-135M-Instruct")),
        (CHOOSE, ("--data", "/absent"), ("--data /absent", "dms-eval data --out /absent")),
        (CHOOSE, ("--original", "/absent"), ("/absent",)),
        (CHOOSE, ("--limit", "0"), ("--limit 0",)),
        (CHOOSE, ("--limit", "2.5"), ("--limit 2.5",)),
        (f"{CHOOSE}@1:0", (), (f"--tasks {CHOOSE}@1:0", "1 or more")),
        (f"{CHOOSE}@1,{CHOOSE}@1:2", (), (f"{CHOOSE}@1 is named twice",)),
        (f"sheets:2,{CHOOSE}:4", (), (f"{CHOOSE} is also part of sheets; use {CHOOSE}@SHOTS",)),
        (f"{CHOOSE}@1,sheets@1", (), (f"{CHOOSE}@1 is also part of sheets@1; use sheets@SHOTS",)),
        (f"outer,{CONTINUE}", (), (f"{CONTINUE} is also part of outer",)),
        ("outer,sheets", (), ("sheets is also part of outer; use sheets@SHOTS",)),
        (f"{CHOOSE}@one", (), ("no such task", f"did you mean {CHOOSE}")),
        (CHOOSE, ("--num-fewshot", "-1"), ("--num-fewshot -1",)),
        (",", (), ("--tasks",)),
        (CHOOSE, ("--include-path", "/absent"), ("--include-path /absent",)),
        (CONTINUE, ("--gen-kwargs", "num_beams=2"), ("num_beams", "not an option")),
        (CHOOSE, ("--apply-chat-template",), ("chat template",)),
        (CHOOSE, ("--prefill-chunk", "0"), ("prefill_chunk=0",)),
        (CHOOSE, ("--max-num-batched-tokens", "0"), ("max_num_batched_tokens=0",)),
        (CHOOSE, ("--prompt-end", "answer"), ("--prompt-end answer", "question or examples")),
        (CONTINUE, ("--prompt-end", "examples"), (CONTINUE, "use --prompt-end question")),
        (ROLL, ("--prompt-end", "examples"), (ROLL, "use --prompt-end question")),
    ],
)
def test_refusals_are_one_line_and_offline(
    workspace, tasks, further, facts, tmp_path, monkeypatch, capsys
):
    def connect(self, address):
        raise AssertionError(f"it connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    given = [*words(workspace, tasks, "unused"), "--output", str(tmp_path / "out"), *further]
    assert main(given) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for fact in facts:
        assert fact in errors[0]
    assert ("--download" in errors[0]) == (tasks == "absent_data")
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_task_has_its_own_shots_and_limit_beside_others(workspace):
    tasks = f"{CHOOSE}@0,{CHOOSE}@1:3,sheets@2:2,{CHOOSE}"
    given = ("--limit", "4", "--log-samples", "--policy", "keep_all")
    assert main(words(workspace, tasks, "shots", *given)) == 0
    found = json.loads((workspace / "shots" / "results.json").read_text())
    names = [f"{CHOOSE}@0", f"{CHOOSE}@1", "sheets@2", CHOOSE]
    assert list(found["dms"]["kv_by_task"]) == names
    assert found["n-shot"][f"{CHOOSE}@0"] == 0
    assert found["group_subtasks"]["sheets@2"] == [f"{CHOOSE}@2", f"{CONTINUE}@2"]
    for name, shots, limit in ((f"{CHOOSE}@0", "0", "4"), (CHOOSE, "2", "4")):
        alone = ("--num-fewshot", shots, "--limit", limit, "--policy", "keep_all", "--log-samples")
        output = f"shots_{shots}"
        assert main(words(workspace, CHOOSE, output, *alone)) == 0
        other = json.loads((workspace / output / "results.json").read_text())
        score = found["results"][name]
        assert score["acc,none"] == other["results"][CHOOSE]["acc,none"]
        assert score["acc_stderr,none"] == other["results"][CHOOSE]["acc_stderr,none"]
        prompts = [
            [line["arguments"] for line in map(json.loads, (workspace / path).open())]
            for path in (f"shots/samples_{name}.jsonl", f"{output}/samples_{CHOOSE}.jsonl")
        ]
        assert prompts[0] == prompts[1]
    compared = json.loads((workspace / "shots" / "comparison.json").read_text())
    assert ("sheets@2", 2 + 2) in {(row["task"], row["documents"]) for row in compared}


def test_the_end_of_prompts_is_an_option(workspace, capsys):
    how = ("--limit", "3", "--policy", "snapkv", "--budget", "32", "--log-samples")
    scores = {}
    for place in ("question", "examples"):
        output = f"end_{place}"
        assert main(words(workspace, CHOOSE, output, *how, "--prompt-end", place)) == 0
        lines = (workspace / output / f"samples_{CHOOSE}.jsonl").read_text().splitlines()
        scores[place] = [json.loads(line)["resps"] for line in lines]
    assert scores["question"] != scores["examples"]
    other = ("--prompt-end", "examples")
    assert main(words(workspace, CHOOSE, "end_question", *how, *other)) == 2
    assert "another prompt_end (settings)" in capsys.readouterr().err


def test_finished_tasks_are_not_evaluated_again(workspace, capsys):
    given = ("--limit", "4", "--log-samples", "--prefill-chunk", "16")
    assert main(words(workspace, f"{CHOOSE}@1,{ROLL}", "whole", *given)) == 0
    assert main(words(workspace, f"{CHOOSE}@1", "parts", *given)) == 0
    results = workspace / "parts" / "results.json"
    marked = json.loads(results.read_text())
    marked["results"][f"{CHOOSE}@1"]["alias"] = "of the first call"
    results.write_text(json.dumps(marked))
    again = (*given, "--max-num-seqs", "3", "--max-num-batched-tokens", "24")
    assert main(words(workspace, f"{CHOOSE}@1,{ROLL}", "parts", *again)) == 0
    whole, parts = (
        json.loads((workspace / name / "results.json").read_text()) for name in ("whole", "parts")
    )
    assert parts["results"][f"{CHOOSE}@1"].pop("alias") == "of the first call"
    whole["results"][f"{CHOOSE}@1"].pop("alias")
    assert parts["dms"]["engine"]["max_num_batched_tokens"] == 24
    assert set(parts["results"]) == set(whole["results"])
    for name, scores in whole["results"].items():
        assert parts["results"][name] == pytest.approx(scores, nan_ok=True), name
    for name in ("requests", "tokens", "kv_reads", "cr_factor", "peak_tokens", "peak_tokens_max"):
        assert parts["dms"]["kv"][name] == pytest.approx(whole["dms"]["kv"][name]), name
    assert set(parts["dms"]["tasks"]) == {f"{CHOOSE}@1", ROLL}
    before = results.read_bytes()
    assert main(words(workspace, ROLL, "parts", *given)) == 0
    assert results.read_bytes() == before
    capsys.readouterr()
    for tasks, further, changed in (
        (f"{CHOOSE}@1:2", (), f"another {CHOOSE}@1 (tasks)"),
        (ROLL, ("--seed", "1"), "another seed (settings)"),
        (ROLL, ("--window", "8", "--policy", "window"), "another policy (engine)"),
    ):
        assert main(words(workspace, tasks, "parts", *given, *further)) == 2
        assert changed in capsys.readouterr().err
    assert results.read_bytes() == before


def test_members_of_a_finished_group_are_refused(workspace, capsys):
    assert main(words(workspace, "sheets:2", "members")) == 0
    results = workspace / "members" / "results.json"
    before = results.read_bytes()
    for tasks, name in ((CHOOSE, CHOOSE), ("outer:2", "sheets")):
        assert main(words(workspace, tasks, "members")) == 2
        refusal = f"{name} is also part of the results in {results.parent}; use "
        assert f"{refusal}{tasks.partition(':')[0]}@SHOTS" in capsys.readouterr().err
    assert results.read_bytes() == before
    # stored results of the group are not those of its member either
    assert main(words(workspace, CHOOSE, "member", "--original", str(results.parent))) == 2
    assert f"its results lack {CHOOSE}" in capsys.readouterr().err
    assert main(words(workspace, f"{CHOOSE}@2", "members")) == 0
    assert json.loads(results.read_text())["n-samples"][f"{CHOOSE}@2"]["effective"] == 6


def test_an_edited_task_is_refused(workspace, tmp_path, capsys):
    tasks = shutil.copytree(workspace / "tasks", tmp_path / "tasks")
    given = [*words(workspace, "sheets", "edited", "--limit", "2")]
    given[given.index("--include-path") + 1] = str(tasks)
    assert main(given) == 0
    assert main(given) == 0, "the same definitions"
    for file, old, new in (
        (f"{CONTINUE}.yaml", "max_gen_toks: 30", "max_gen_toks: 29"),
        ("group.yaml", "weight_by_size: true", "weight_by_size: false"),
    ):
        text = (tasks / file).read_text()
        (tasks / file).write_text(text.replace(old, new))
        assert main(given) == 2
        assert "another sheets (tasks)" in capsys.readouterr().err
        (tasks / file).write_text(text)


def test_local_data_count_by_content(workspace, tmp_path, capsys):
    """They make another task of one that read the hub's, wherever their folder is."""
    tasks = shutil.copytree(workspace / "tasks", tmp_path / "tasks")
    text = (tasks / f"{ROLL}.yaml").read_text()
    (tasks / f"{ROLL}.yaml").write_text(text.replace("dataset_path: json", "dataset_path: a/b"))
    folders = [tmp_path / name for name in ("data", "moved", "changed")]
    for folder in folders:
        (folder / "a/b").mkdir(parents=True)
        shutil.copy(tasks / f"{ROLL}_test.jsonl", folder / "a/b/test.jsonl")
    with (folders[2] / "a/b/test.jsonl").open("a") as file:
        file.write('{"text": "x = 1"}\n')
    plain = words(workspace, ROLL, "local", "--limit", "2")
    given = [*plain, "--include-path", str(tasks), "--data"]
    assert main([*given, str(folders[0])]) == 0
    assert main([*given, str(folders[1])]) == 0
    assert main([*given, str(folders[2])]) == 2
    assert f"another {ROLL} (tasks)" in capsys.readouterr().err
    assert main(plain) == 2
    assert f"another {ROLL} (tasks)" in capsys.readouterr().err


def test_only_samples_of_the_task_just_finished_are_written(workspace):
    given = ("--limit", "2", "--log-samples")
    assert main(words(workspace, CHOOSE, "samples", *given)) == 0
    first = workspace / "samples" / f"samples_{CHOOSE}.jsonl"
    before = first.stat()
    assert main(words(workspace, f"{CHOOSE},{ROLL}", "samples", *given)) == 0
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len((workspace / "samples" / f"samples_{ROLL}.jsonl").read_text().splitlines()) == 2
    assert not list(first.parent.glob("*.partial"))


def test_only_tasks_of_this_call_are_compared(workspace, capsys):
    assert main(words(workspace, f"{CHOOSE}@1:2", "named")) == 0
    capsys.readouterr()
    for tasks, names in ((ROLL, {ROLL}), ("sheets:2", {"sheets", CHOOSE, CONTINUE})):
        assert main(words(workspace, tasks, "named", "--limit", "3")) == 0
        printed = capsys.readouterr().out
        compared = json.loads((workspace / "named" / "comparison.json").read_text())
        assert {row["task"] for row in compared} == names
        assert f"{CHOOSE}@1" not in printed
    dms = json.loads((workspace / "named" / "results.json").read_text())["dms"]
    cost = dms["kv_by_task"]["sheets"]["prefill_reads"]
    assert f"of prompts {cost:,.0f} " in printed


def test_one_document_has_no_standard_error(workspace, capsys):
    given = ("--limit", "1", "--log-samples", "--original", str(workspace / "model"))
    assert main(words(workspace, f"outer,{CHOOSE}@0", "single", *given)) == 0
    results = json.loads((workspace / "single" / "results.json").read_text())["results"]
    assert results[CHOOSE]["acc_stderr,none"] == "N/A"
    assert results["sheets"]["acc_stderr,none"] == "N/A"
    assert f"| {CHOOSE} | acc | 2 | 1 |" in capsys.readouterr().out
    further = (*given[:-1], str(workspace / "single" / "original"))
    assert main(words(workspace, f"outer,{CHOOSE}@0", "single", *further)) == 0


def test_results_are_not_overwritten(workspace, written, capsys):
    before = (written / "results.json").read_bytes()
    assert main(words(workspace, ROLL, "first")) == 2
    assert "holds results already" in capsys.readouterr().err
    assert (written / "results.json").read_bytes() == before


def test_results_are_overwritten_on_demand(workspace, tmp_path, written):
    copy = tmp_path / "first"
    shutil.copytree(written, copy)
    (copy / "results.json").write_text("{}")
    given = words(workspace, ROLL, "first")
    given[given.index("--output") + 1] = str(copy)
    assert main([*given, "--overwrite"]) == 0
    assert "results" in json.loads((copy / "results.json").read_text())


def test_a_missing_harness_is_refused(workspace):
    code = (
        "import sys\nsys.modules['lm_eval'] = None\nsys.argv[0] = 'dms-eval'\n"
        "from dms_train.cli.evaluate import main\n"
        f"sys.exit(main({words(workspace, CHOOSE, 'none')!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == 'dms-eval needs lm-eval: pip install "dms-train[eval]"'
