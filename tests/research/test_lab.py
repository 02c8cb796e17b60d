"""The lab at toy size on a CPU: every step is a command that runs, and none runs twice."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.cli.config_source import compose, compose_evaluation
from dms_train.evaluation.scaling.results import load
from dms_train.evaluation.scaling.run import evaluate, prepare
from dms_train.hf.formats import read_spec, read_target_cr
from dms_train.inference.tokenizer import read_stop_ids
from dms_train.observe.processes import has_ended, mark
from dms_train.planning.check import check
from research.folders import CONFIG_DIR
from research.lab import run as lab
from research.lab.scales import SCALES
from research.lab.step import Step
from research.lab.steps import steps

pytestmark = pytest.mark.timeout(1200)
HF = Path("exports") / "final" / "hf"
MIXED = ("--tasks", "countdown,lab_niah")


def words(folder: Path, *more: str) -> list[str]:
    return ["toy", "--folder", str(folder), "--device", "cpu", "--workers", "1", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished lab."""
    root = tmp_path_factory.mktemp("lab")
    assert lab.main(words(root, *MIXED)) == 0
    return root


@pytest.mark.slow
def test_a_teacher_is_pretrained_retrofitted_exported_and_evaluated(folder: Path) -> None:
    teacher, retrofitted = folder / "teacher" / HF, folder / "retrofit" / "seed1234" / "cr2" / HF
    for export in (teacher, retrofitted):
        assert read_stop_ids(export) == {0}  # <eod>
    assert read_spec(teacher) is None
    spec = read_spec(retrofitted)
    assert spec is not None
    assert (spec.window, read_target_cr(retrofitted)) == (16, 2.0)
    report = (folder / "report.md").read_text()
    assert "Countdown" in report
    assert "NIAH (lab)" in report
    assert "| Countdown | 32 |" in (folder / "teacher" / "README.md").read_text()
    scale = SCALES["toy"]
    for name in ("teacher", "seed1234_cr2"):
        run = load([folder / "eval" / name])
        assert run.complete
        assert len(run.documents) == scale.problems
        assert len(run.points()) == len(scale.lengths) * len(scale.widths)
        (point,) = load([folder / "eval" / f"{name}_lab_niah"]).points()
        assert (point.budget.length, point.budget.width) == (1 / 32, 1)


@pytest.mark.slow
def test_generation_of_an_export_ends_at_the_end_of_a_document(folder: Path) -> None:
    """A model of four steps draws nearly uniformly, so that some chains meet <eod>."""
    options = compose_evaluation(
        [
            f"model.path={folder / 'teacher' / HF}",
            "task.name=countdown",
            f"task.path={folder / 'problems.jsonl'}",
            "task.limit=1",
            "sweep.lengths=[1]",
            "sweep.widths=[8]",
            "sampling.temperature=1.0",
            "model.device=cpu",
            f"run.dir={folder / 'ends'}",
        ]
    )
    run = evaluate(prepare(options), lambda line: None)
    rows = [row for found in run.documents.values() for row in found]
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    assert ended
    for row in ended:
        assert row["tokens"] < 1024
        assert "<eod>" not in row["text"]


@pytest.mark.slow
def test_a_policy_gets_the_tokens_of_the_retrofitted_model(folder: Path) -> None:
    run = load([folder / "eval" / "seed1234_cr2"])
    longest = [p for p in run.points() if p.budget.width == 1][-1]
    policy = json.loads((folder / "eval" / "streaming_llm_as_cr2" / "run.json").read_text())
    given = policy["config"]["policy"]
    assert given["budget"] == math.ceil(longest.peak_tokens)
    assert given["sinks"] == 7
    (point,) = load([folder / "eval" / "seed1234_cr2_lab_niah"]).points()
    policy = json.loads((folder / "eval/streaming_llm_as_cr2_lab_niah/run.json").read_text())
    given = policy["config"]["policy"]
    assert (given["budget"], given["sinks"]) == (math.ceil(point.peak_tokens), 4)


@pytest.mark.slow
def test_finished_steps_are_skipped_and_other_settings_refused(folder, capsys) -> None:
    assert lab.main(words(folder, *MIXED, "--rows", "7", "--workers", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(": started")] == [
        "card: started",
        "report: started",
    ]
    assert lab.main(words(folder, *MIXED, "--problems", "3")) == 2
    error = capsys.readouterr().err
    assert "problems was finished with other settings; take another --folder" in error
    assert error.count("\n") == 1


WAITS = """
import os, pathlib, sys, time
mine, *needed = map(pathlib.Path, sys.argv[1:])
assert all(path.exists() for path in needed)
time.sleep(0.3)
mine.write_text(" ".join(map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))))
"""


def test_a_step_waits_for_those_that_it_needs_and_gets_a_gpu(tmp_path: Path, monkeypatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    first, second, last = (tmp_path / name for name in ("first", "second", "last"))

    def step(path: Path, *needed: Path) -> Step:
        words = ["-c", WAITS, str(path), *map(str, needed)]
        return Step(name=path.name, words=lambda: words, needs=tuple(n.name for n in needed))

    found = [step(last, first, second), step(first), step(second)]
    assert lab.Lab(tmp_path / "root", 2, ("4", "7")).run(found)
    assert {first.read_text(), second.read_text()} == {"4 1", "7 1"}
    assert last.exists()


def test_the_time_can_be_over(tmp_path: Path, capsys) -> None:
    assert lab.main(words(tmp_path, "--seconds", "0")) == lab.UNFINISHED
    assert "the same command continues" in capsys.readouterr().out
    assert not list((tmp_path / "state").iterdir())


def test_a_command_that_fails_ends_the_lab_with_its_last_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "problems.jsonl").mkdir()
    assert lab.main(words(tmp_path, "--jobs", "3")) == 2
    error = capsys.readouterr().err
    assert "problems: exit code 2; " in error
    assert "problems.log" in error


STOPPED = """
import pathlib, signal, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
def leave(*_):
    mine.with_suffix(".told").touch()
    while not other.with_suffix(".told").exists():
        time.sleep(0.01)
    mine.with_suffix(".saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
mine.with_suffix(".ready").touch()
while True:
    time.sleep(1)
"""


def wait_until(holds, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        assert process is None or process.poll() is None
        time.sleep(0.05)


def test_commands_are_told_to_stop_together(tmp_path: Path) -> None:
    """Each saves only when the other has been told too."""
    names = [(tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")]
    log = tmp_path / "log"
    running = [lab._Running(["-c", STOPPED, *map(str, pair)], log) for pair in names]
    wait_until(lambda: all(mine.with_suffix(".ready").exists() for mine, _ in names))
    lab._stop(running)
    assert [each.code for each in running] == [0, 0]
    assert all(mine.with_suffix(".saved").exists() for mine, _ in names)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_command_outlives_the_lab(tmp_path: Path, number: signal.Signals, code: int) -> None:
    given = ["s", *words(tmp_path, "--jobs", "2")[1:]]  # its data takes much longer than this test
    command = [sys.executable, "-m", "research", "lab", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "data: started\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 2, process)
    marks = [mark(int(pid)) for pid in children.read_text().split()]
    assert all(marks)
    process.send_signal(number)
    assert process.wait(120) == code
    wait_until(lambda: all(map(has_ended, marks)))


TOLD_AT_FORK = """
import os, signal, sys
from research.lab.run import main
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_while_a_command_starts_is_not_lost(tmp_path: Path) -> None:
    """Python ignores what a handler raises there."""
    given = ["s", *words(tmp_path, "--jobs", "2")[1:]]
    process = subprocess.Popen([sys.executable, "-c", TOLD_AT_FORK, *given])
    try:
        assert process.wait(60) == 143
    finally:
        process.kill()


RANK = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_rank_outlives_the_lab(tmp_path: Path) -> None:
    """torchrun starts the ranks of a step in sessions of their own."""
    (tmp_path / "rank.py").write_text(RANK)
    program = (
        "import pathlib, sys; from research.lab import run as lab;"
        "lab._Running(sys.argv[1:3], pathlib.Path(sys.argv[2], 'log'), '0', ranks=2)"
        "._process.wait()"
    )
    words = [str(tmp_path / "rank.py"), str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", program, *words])
    files = [tmp_path / number for number in "01"]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files), process)
    marks = [mark(int(file.read_text())) for file in files]
    process.kill()
    process.wait()
    wait_until(lambda: all(map(has_ended, marks)))


def test_a_step_that_repeats_runs_with_other_words(tmp_path: Path) -> None:
    for text in ("one", "two"):
        words = ["-c", f"import pathlib; pathlib.Path({str(tmp_path / text)!r}).touch()"]
        step = Step(name="report", words=lambda words=words: words, repeats=True)
        assert lab.Lab(tmp_path / "root", 1).run([step])
        assert (tmp_path / text).exists()


@pytest.mark.parametrize("gpus", [2, 3, 7, 8, 12])
def test_the_teacher_takes_as_many_gpus_as_divide_its_batch(tmp_path: Path, gpus: int) -> None:
    settings = lab._settings(lab._parser().parse_args(["s", "--folder", str(tmp_path)]))
    teacher = next(s for s in steps(replace(settings, gpus=gpus)) if s.name == "teacher")
    assert teacher.ranks == {2: 2, 3: 2, 7: 4, 8: 8, 12: 8}[gpus]
    config = compose(teacher.words()[3:], CONFIG_DIR)
    check(config, world_size=teacher.ranks, architecture=config.model.architecture)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--seconds nan", "'nan' is not a number of seconds"),
        ("--jobs -1", "'-1' is not a whole number of at least 1"),
        ("--rows 0", "'0' is not a whole number of at least 1"),
        ("--workers 0", "'0' is not a whole number of at least 1"),
        ("--problems 0", "'0' is not a whole number of at least 1"),
        ("--widths 1,0", "'0' is not a whole number of at least 1"),
        ("--widths 2,2", "2,2: a value is repeated"),
        ("--seeds 1,1", "1,1: a value is repeated"),
        ("--seeds x", "'x' is not a whole number of at least 0"),
        ("--policies nonsense", "'nonsense': choose from "),
        ("--policies tova,tova", "tova,tova: a value is repeated"),
        ("--policies ,", "nothing is named"),
        ("--tasks countdown,niah", "'niah': choose from countdown, arithmetic, lab_niah, lab_var"),
        ("--also dmd", "'dmd': choose from immediate, dmc"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(tmp_path, capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        lab.main(words(tmp_path, *given.split()))
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_policy_without_a_budget_is_refused_before_anything_runs(tmp_path, capsys) -> None:
    assert lab.main(words(tmp_path, "--policies", "tova,keep_all")) == 2
    assert "policy=keep_all: no option budget" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_method_is_not_retrofitted_twice(tmp_path: Path, capsys) -> None:
    assert lab.main(["recall", *words(tmp_path, "--also", "dmc,window_4")[1:]]) == 2
    assert "--also dmc: recall retrofits with it anyway" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
