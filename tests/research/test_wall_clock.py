"""Time and accuracy of models: what is counted, and what is refused."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.tasks.base import Aggregate
from dms_train.evaluation.tasks.registry import task as find_task
from dms_train.inference.llm import LLM
from research import wall_clock
from research.data import command as data
from research.folders import RESULTS
from tests.research.lab_model import write_lab_model
from tests.unit.inference import conftest as inference

PROBLEMS = 3
BUDGETS = [[1 / 64, 1], [1 / 32, 2]]
CACHE = 8 * 2**20


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random models as the original and as an export: neither solves anything."""
    root = tmp_path_factory.mktemp("lab")
    for name, spec in (("original", None), ("cr4", inference.small_spec("dms"))):
        write_lab_model(root / name, spec, target_cr=4.0)
    made = ["countdown-problems", "--out", str(root / "problems.jsonl"), "--problems"]
    assert data.main([*made, str(PROBLEMS)]) == 0
    return root


def arguments(lab: Path, *more: str, models: str = "original,cr4") -> list[str]:
    budgets = ",".join(f"{length}-{width}" for length, width in BUDGETS)
    named = ",".join(f"{name}={lab / name}" for name in models.split(","))
    return [*overrides(lab), "--models", named, "--budgets", budgets, "--repeats", "2", *more]


def overrides(lab: Path) -> list[str]:
    return [
        *("task.name=countdown", f"task.path={lab / 'problems.jsonl'}", f"task.limit={PROBLEMS}"),
        *(f"model.cache_bytes={CACHE}", "model.max_num_seqs=2", "model.device=cpu"),
    ]


def test_every_model_is_measured_at_every_budget(lab: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "results/wall_clock.json"
    assert wall_clock.main(arguments(lab, "--output", str(file))) == 0
    record = json.loads(file.read_text())
    assert record["settings"] == {
        **{"task": "countdown", "problems": PROBLEMS, "repeats": 2, "prompt_format": "plain"},
        "sampling": {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "seed": 0},
        **{"policy": {"name": "auto"}, "dtype": "auto", "cache_dtype": "auto"},
        **{"cache_bytes": CACHE, "max_num_seqs": 2},
    }
    assert {name: model["cr"] for name, model in record["models"].items()} == {
        "original": 1.0,
        "cr4": 4.0,
    }
    for model in record["models"].values():
        assert [[b["length"], b["width"]] for b in model["budgets"]] == BUDGETS
        for found in model["budgets"]:
            assert 0 < found["seconds_least"] <= found["seconds"] <= found["seconds_most"]
            most = PROBLEMS * found["width"] * 1024 * found["length"]
            assert found["tokens_s"] * found["seconds_least"] <= most * 1.01
            assert len(found["scores"]) == PROBLEMS
            assert statistics.mean(found["scores"]) == pytest.approx(found["accuracy"])
            ends = [found["accuracy_low"], found["accuracy"], found["accuracy_high"]]
            assert ends == sorted(ends)
    printed = capsys.readouterr().out
    assert printed.count("| cr4 |") == len(BUDGETS)
    figure = tmp_path / "wall_clock.svg"
    assert wall_clock.main(["--table", str(file), "--figure", str(figure)]) == 0
    again, _, measured = capsys.readouterr().out.partition("\n\nMeasured at: ")
    assert set(again.splitlines()) < set(printed.splitlines())
    assert record["date"] in measured
    assert "<svg" in figure.read_text()


def test_points_are_drawn_where_they_were_measured() -> None:
    budgets = [(1.0, 1, 2.0, 0.7), (0.5, 1, 1.0, 0.4), (0.5, 4, 8.0, 0.9)]
    names = ("length", "width", "seconds", "accuracy")
    rows = [dict(zip(names, budget, strict=True)) for budget in budgets]
    (axes,) = wall_clock.drawn({"models": {"teacher": {"budgets": rows}}}).axes
    found = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert found == [[(1.0, 0.4), (2.0, 0.7)], [(8.0, 0.9)]]


def test_models_or_a_record_are_needed(lab: Path, capsys) -> None:
    table = ["--table", "wall_clock.json"]
    for words, line in (
        ([], "give --models, or --table"),
        ([*arguments(lab), *table], "give --models, or --table"),
        ([*overrides(lab), *table], "a stored record takes no options"),
        (["--repeats", "2", *table], "--repeats: --table only shows a stored record"),
        (["--budgets", "2-1", *table], "--budgets: --table only shows a stored record"),
        (["--output", "new.json", *table], "--output: --table only shows a stored record"),
    ):
        with pytest.raises(SystemExit) as ended:
            wall_clock.main(words)
        assert ended.value.code == 2
        assert line in capsys.readouterr().err


def answered(*chains: tuple[str, str]) -> SimpleNamespace:
    """Output of the engine with texts and reasons of their ends."""
    return SimpleNamespace(
        outputs=[SimpleNamespace(text=text, finish_reason=reason) for text, reason in chains]
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(Aggregate.ANY, [1, 1, 0]), (Aggregate.VOTE, [0, 1, 0]), (Aggregate.MEAN, [0.5, 1, 0])],
)
def test_the_rule_of_the_task_counts_and_a_chain_cut_off_is_wrong(
    lab: Path, monkeypatch: pytest.MonkeyPatch, rule: Aggregate, expected: list[float]
) -> None:
    checked = wall_clock.checked_run(lab / "original", overrides(lab), [(1.0, 1)])
    monkeypatch.setattr(type(checked.task), "aggregate", rule)
    right = [f"R x ANS {document.gold[0]}" for document in checked.documents]
    outputs = [
        answered(("ANS 1 + 1", "stop"), (right[0], "stop")),
        answered((right[1], "stop"), (right[1], "stop")),
        answered(("", "stop"), (right[2], "length")),
    ]
    assert wall_clock.problem_scores(checked, outputs) == expected


def test_the_interval_is_over_problems_and_not_over_repetitions(lab: Path) -> None:
    """Two problems are solved in every repetition and one in none."""
    checked = wall_clock.checked_run(lab / "original", overrides(lab), [(1.0, 1)])
    answers = [document.gold[0] for document in checked.documents[:2]] + ["1 + 1"]
    outputs = [answered((f"R x ANS {answer}", "stop")) for answer in answers]
    for output in outputs:
        output.outputs[0].token_ids = [1]
    engine = SimpleNamespace(generate=lambda prompts, params: outputs)
    found = wall_clock.measure_budget(engine, checked, (1.0, 1), repeats=4)
    assert found["scores"] == [1, 1, 0]
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert (found["accuracy_low"], found["accuracy_high"]) == (0, 1)
    shown = wall_clock.table({"model": {"budgets": [found]}})
    assert "| 0.667 [0.000, 1.000] |" in shown


def test_programs_of_several_problems_run_at_the_same_time(lab: Path, tmp_path: Path) -> None:
    """Each program ends only if that of the other problem has begun."""
    documents = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "entry_point": f"f{n}"}
        | {"test": f"def check(f):\n    assert f() == {n}\n", "canonical_solution": ""}
        for n in range(2)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in documents))
    more = ["run.allow_code=unisolated", "run.workers=2"]
    checked = wall_clock.checked_run(lab / "original", [*overrides(lab), *more], [(1.0, 1)])
    task = find_task("humaneval")
    named = replace(checked.options.task, path=str(path), subset=True, limit=None)
    checked = checked._replace(task=task, documents=task.documents(named, lambda _: 1))
    waits = f"""    import os, time
    open({str(tmp_path)!r} + '/OWN', 'w').close()
    while not os.path.exists({str(tmp_path)!r} + '/OTHER'):
        time.sleep(0.01)
    return RESULT
"""
    outputs = [
        answered((waits.replace("OWN", a).replace("OTHER", b).replace("RESULT", result), "stop"))
        for a, b, result in (("a", "b", "0"), ("b", "a", "2"))
    ]
    assert wall_clock.problem_scores(checked, outputs) == [1, 0]


def test_cut_answers_count_where_the_task_scores_them(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = wall_clock.checked_run(lab / "original", overrides(lab), [(1.0, 1)])
    monkeypatch.setattr(type(checked.task), "scores_truncated", True)
    outputs = [answered((f"ANS {each.gold[0]}", "length")) for each in checked.documents]
    assert wall_clock.problem_scores(checked, outputs) == [1] * len(outputs)


def test_options_reach_the_chains(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["sampling.temperature=0.25", "sampling.top_p=0.5", "sampling.top_k=3"]
    checked = wall_clock.checked_run(lab / "original", [*overrides(lab), *more], [(0.5, 1)])
    monkeypatch.setattr(type(checked.task), "stop", lambda task, document: ("end",))
    first, again = (wall_clock.sampled(checked, (0.5, 4), repeat) for repeat in (0, 1))
    for params in first:
        assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 3)
        assert (params.n, params.max_tokens, params.stop) == (4, 512, ("end",))
    seeds = [params.seed for params in [*first, *again]]
    assert len(set(seeds)) == 2 * PROBLEMS
    later = ["sampling.seed=1", *overrides(lab), *more]
    checked = wall_clock.checked_run(lab / "original", later, [(0.5, 1)])
    assert [p.seed for p in wall_clock.sampled(checked, (0.5, 4), 0)] == seeds[PROBLEMS:]


def test_options_reach_the_engine_and_the_checker(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["policy=keep_all", "model.max_num_seqs=7", "model.dtype=bfloat16"]
    code = ["run.workers=3", "run.allow_code=unisolated"]
    given = [*overrides(lab), *more, *code]
    checked = wall_clock.checked_run(lab / "cr4", given, [(1 / 64, 1)])
    started: list[object] = []
    monkeypatch.setattr(wall_clock, "LLM", recorder(started, LLM))
    monkeypatch.setattr(wall_clock, "ThreadPoolExecutor", recorder(started, ThreadPoolExecutor))
    monkeypatch.setattr(wall_clock, "AnswerChecker", recorder(started, AnswerChecker))
    wall_clock.measure(checked, [(1 / 64, 1)], 1)
    llm, *checkers, problems = started
    assert isinstance(problems, ThreadPoolExecutor)
    assert (len(checkers), problems._max_workers) == (3, 3)
    assert isinstance(llm, LLM)
    options = llm.engine.options
    assert (options.policy, options.cache_bytes) == ("keep_all", CACHE)
    assert (options.max_num_seqs, options.dtype) == (7, "bfloat16")
    assert options.max_model_len == checked.longest + 16 + options.decode_steps
    for checker in checkers:
        assert isinstance(checker, AnswerChecker)
        assert (checker.workers, checker.allow_code) == (1, "unisolated")


def test_one_greedy_chain_is_measured(lab: Path) -> None:
    given = [*overrides(lab), "sampling.temperature=0"]
    checked = wall_clock.checked_run(lab / "original", given, [(1 / 1024, 1)])
    assert checked.options.sweep.lengths == (1 / 1024,)


def recorder(made: list[object], kind: Callable[..., object]) -> Callable[..., object]:
    """Return a constructor that also keeps what it makes."""

    def make(*given: object, **named: object) -> object:
        made.append(kind(*given, **named))
        return made[-1]

    return make


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["model.server=http://127.0.0.1:9/v1"], "model.server=http://127.0.0.1:9/v1: --models"),
        (["model.path=x"], "model.path=x: --models and --budgets decide it"),
        (["sweep.widths=[2]"], "sweep.widths=[2]: --models and --budgets decide it"),
        (["run.dir=x"], "run.dir=x: --models"),
        (["run={dir:x}"], "run={dir:x}: --models"),
        (["+run.shards=2"], "+run.shards=2: --models"),
        (["model.cache_bytes=null"], "model.cache_bytes: state the size"),
        (["sampling.temperature=0"], "sampling.temperature=0: all chains of a problem are alike"),
        (["task.name=humaneval"], "run.allow_code=sandbox"),
        (["--output", "/tmp"], "--output /tmp: a folder"),
    ],
)
def test_what_would_be_ignored_or_unfair_is_refused(lab: Path, capsys, more, line) -> None:
    assert wall_clock.main([*arguments(lab), *more]) == 2
    assert line in capsys.readouterr().err


def test_nothing_is_measured_where_a_model_is_not_there(lab: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "results/wall_clock.json"
    assert wall_clock.main(arguments(lab, "--output", str(file), models="original,cr9")) == 2
    assert "cr9" in capsys.readouterr().err
    assert not file.exists()


def test_a_chain_that_does_not_fit_is_refused(lab: Path, tmp_path: Path, capsys) -> None:
    """It would count as wrong, and as fast."""
    small = ["--budgets", "4-1", "--output", str(tmp_path / "out.json")]
    assert wall_clock.main(arguments(lab, *small, models="original")) == 2
    assert "4096 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--budgets", "2x4", "give LENGTH-WIDTH"),
        ("--budgets", "0-1", "give LENGTH-WIDTH"),
        ("--budgets", "1-1,1-1", "a value is repeated"),
        ("--models", "a=b,a=c", "a name is repeated"),
        ("--models", "original", "give NAME=DIRECTORY"),
        ("--models", "", "nothing is named"),
        ("--repeats", "0", "not a whole number"),
    ],
)
def test_values_are_checked(lab: Path, capsys, option: str, value: str, line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        wall_clock.main([*arguments(lab), f"{option}={value}"])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_the_stored_record_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert wall_clock.main(["--table", str(RESULTS / "nvidia_h200" / "wall_clock.json")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": {"teacher": {}}}', "\x80"])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    assert wall_clock.main(["--table", str(file)]) == 2
    refusal = capsys.readouterr().err
    assert str(file) in refusal
    assert refusal.count("\n") == 1
