"""Every option of `dms-eval`, `run_tasks` and `validate_export`, read where it acts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dms_train.app import task_evaluation
from dms_train.cli import validate as validate_command
from dms_train.config.build import build, build_dataclass
from dms_train.config.schema import StageBlock
from dms_train.data.batches import Sample
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.export_comparison import evaluation_target
from dms_train.evaluation.measure import EvaluationTarget
from dms_train.evaluation.options import EvaluationOptions, ValidateOptions
from dms_train.evaluation.scaling import run as scaling
from dms_train.evaluation.scaling import store
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.tasks.prompts import plain_text
from dms_train.evaluation.tasks.registry import task as find_task
from dms_train.evaluation.validation import ValidationResult, validate
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from tests.support import configs
from tests.support.wiring import Assets, Built, Wire, leaves, option, uncovered
from tests.unit.evaluation import conftest as evaluation

target, tokenizer, samples, load = (
    getattr(evaluation, name) for name in ("target", "tokenizer", "samples", "load")
)
SHEETS = 4
LINEAR = {"task.name": "linear_1d"}


class Prepared(NamedTuple):
    """A run of `dms-eval`, by the command's options or those of the stage."""

    options: EvaluationOptions
    assets: Assets
    folder: Path

    @property
    def run(self) -> scaling.PreparedRun:
        return scaling.prepare(self.options)


def sheets_file(folder: Path) -> Path:
    rows = [
        {"prompt": f"1: Solve {n}*c = {n * n} for c.\nSolution", "answers": ["1"], "stop": "a"}
        for n in range(1, SHEETS + 1)
    ]
    path = folder / "sheets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def engine(name: str) -> Callable[[Prepared], Any]:
    return lambda p: getattr(p.run.engine, name)


def params(name: str) -> Callable[[Prepared], Any]:
    return lambda p: getattr(p.run.documents[0].params, name)


def policy(name: str) -> Callable[[Prepared], Any]:
    return lambda p: p.run.engine.policy_options.get(name)


def documents(p: Prepared) -> list[Any]:
    """Documents of a task, with one token for a word."""
    return find_task(p.options.task.name).documents(
        p.options.task, lambda messages: len(plain_text(messages).split())
    )


def refusal(p: Prepared) -> str:
    """Return the refusal of the documents; empty if nothing is refused."""
    try:
        documents(p)
    except EvaluationError as error:
        return str(error)
    return ""


def run_refusal(p: Prepared) -> str:
    try:
        _ = p.run
    except EvaluationError as error:
        return str(error)
    return ""


def longest(p: Prepared) -> int:
    return max(len(d.question.split()) for d in documents(p)) // 100


def evaluated(p: Prepared) -> list[dict[str, Any]]:
    scaling.evaluate(p.run, lambda line: None)
    return list(store.read_chains(Path(p.options.run.dir)))


def asked_server(p: Prepared) -> str:
    """Return the address that does not answer; empty if none is asked."""
    try:
        evaluated(p)
    except EvaluationError as error:
        return str(error).partition("/models")[0]
    return ""


def checker(name: str) -> Callable[[Prepared], Any]:
    """Return an attribute of the object that compares answers in a run."""

    def read(p: Prepared) -> Any:
        made: list[AnswerChecker] = []

        class Recorded(AnswerChecker):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                made.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scaling, "AnswerChecker", Recorded)
            scaling.evaluate(p.run, lambda line: None)
        return getattr(made[0], name)

    return read


def first_seed(p: Prepared) -> int:
    """From the seed of the run and the name of the document."""
    document = p.run.documents[0].document.id
    digest = hashlib.sha256(f"{p.options.sampling.seed}:{document}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


WINDOW = {"policy.name": "window"}
WIRES: dict[str, Wire] = {
    "task.path": Wire(
        lambda a: str(sheets_file(a.model.parent)),
        lambda p: len(documents(p)),
        SHEETS,
        {"task.fixture": False, "task.path": lambda a: str(one_sheet(a.model.parent))},
    ),
    "task.hub": Wire(True, lambda p: "not on the hub" in refusal(p), True, {"task.path": None}),
    "task.download": Wire(
        True,
        lambda p: "task.download" in refusal(p),
        False,
        {"task.name": "gsm8k", "task.hub": True, "task.path": None},
    ),
    "task.sha256": Wire("0" * 64, lambda p: f"not {'0' * 64}" in refusal(p), True),
    "task.subset": Wire(
        True,
        refusal,
        "",
        {"task.name": "math500", "task.path": lambda a: str(math_file(a.model.parent))},
    ),
    "task.fixture": Wire(True, lambda p: len(documents(p)), 5),
    "task.limit": Wire(2, lambda p: len(p.run.documents)),
    "task.seed": Wire(
        7,
        lambda p: documents(p)[0].question,
        lambda p: next(iter(find_task("linear_1d").generate(p.options.task, len)))["problem"],
        {**LINEAR, "task.path": None, "task.count": 1},
    ),
    "task.count": Wire(3, lambda p: len(documents(p)), others={**LINEAR, "task.path": None}),
    "task.context_length": Wire(
        600,
        longest,
        4,  # hundreds of words; the answer and the question take the rest
        {
            "task.name": "niah",
            "task.path": None,
            "task.count": 1,
            "task.haystack": lambda a: str(haystack(a.model.parent, "word")),
            "task.context_length": 300,
        },
    ),
    "task.haystack": Wire(
        lambda a: str(haystack(a.model.parent, "other")),
        lambda p: "other other" in documents(p)[0].question,
        True,
        {
            "task.name": "niah",
            "task.path": None,
            "task.count": 1,
            "task.context_length": 300,
            "task.haystack": lambda a: str(haystack(a.model.parent, "word")),
        },
    ),
    "task.name": Wire(
        "gsm8k",
        lambda p: "task gsm8k: needs task.path" in run_refusal(p),
        True,
        {"task.path": None},
    ),
    "model.path": Wire(lambda a: str(a.other), lambda p: str(p.run.directory)),
    "model.server": Wire("http://127.0.0.1:9/v1", asked_server),
    "model.cr": Wire(3.0, lambda p: p.run.header["config"]["cr"]),
    "model.prompt_format": Wire(
        "chatml", lambda p: p.run.header["config"]["model"]["prompt_format"]
    ),
    "model.dtype": Wire("bfloat16", engine("dtype")),
    "model.device": Wire("cuda:7", lambda p: "cuda:7" in run_refusal(p), True),
    "model.max_num_seqs": Wire(5, engine("max_num_seqs")),
    "model.cache_bytes": Wire(2**20, engine("cache_bytes")),
    "model.gpu_memory_utilization": Wire(0.4, engine("gpu_memory_utilization")),
    "model.prefill_chunk": Wire(7, engine("prefill_chunk")),
    "model.decode_steps": Wire(3, engine("decode_steps")),
    "model.cache_dtype": Wire("fp8", engine("cache_dtype")),
    "policy.name": Wire("keep_all", engine("policy")),
    "policy.window": Wire(9, policy("window"), others={**WINDOW, "policy.window": 4}),
    "policy.budget": Wire(32, policy("budget"), others={"policy.name": "h2o", "policy.budget": 16}),
    "policy.cr": Wire(2.0, policy("cr"), others={"policy.name": "h2o", "policy.cr": 4.0}),
    "policy.options": Wire(
        ["sinks=2"], policy("sinks"), 2, {"policy.name": "streaming_llm", "policy.budget": 16}
    ),
    "sampling.temperature": Wire(0.25, params("temperature")),
    "sampling.top_p": Wire(0.5, params("top_p")),
    "sampling.top_k": Wire(3, params("top_k")),
    "sampling.seed": Wire(5, params("seed"), first_seed),
    "sweep.lengths": Wire([0.0078125], params("max_tokens"), 8),
    "sweep.widths": Wire([1, 3], params("n"), 3),
    "run.dir": Wire(
        lambda a: str(a.model.parent / "elsewhere"),
        lambda p: (evaluated(p), (p.assets.model.parent / "elsewhere" / "run.json").is_file())[1],
        True,
    ),
    "run.shards": Wire(2, lambda p: len({row["document"] for row in evaluated(p)}), SHEETS // 2),
    "run.shard": Wire(
        1,
        lambda p: sorted({row["document"] for row in evaluated(p)}),
        lambda p: sorted(each.document.id for each in p.run.documents[1::2]),
        {"run.shards": 2},
    ),
    "run.workers": Wire(3, checker("workers")),
    "run.allow_code": Wire("unisolated", checker("allow_code")),
}
# a process of its own takes a part of the documents; the stage has no such options
ONLY_COMMAND = ("task.name", "model.path", "model.server", "run.dir", "run.shard", "run.shards")


def one_sheet(folder: Path) -> Path:
    path = folder / "one.jsonl"
    path.write_text(sheets_file(folder).read_text().splitlines()[0] + "\n")
    return path


def math_file(folder: Path) -> Path:
    path = folder / "math.jsonl"
    rows = [{"problem": "What is 1 + 1?", "answer": "2", "unique_id": "one"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def haystack(folder: Path, word: str) -> Path:
    path = folder / f"{word}.txt"
    path.write_text(f"{word} " * 3000)
    return path


def mapping(folder: Path, assets: Assets, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {
        "task": {"path": str(sheets_file(folder))},
        "model": {"path": str(assets.model), "device": "cpu"},
        "policy": {},
        "sampling": {"temperature": 1.0},
        "sweep": {"lengths": [4 / 1024]},
        "run": {"dir": str(folder / "run")},
    }
    for key, value in changes.items():
        block, _, name = key.partition(".")
        values[block][name] = value
    return values


def by_command(values: dict[str, dict[str, Any]]) -> EvaluationOptions:
    return build_dataclass(EvaluationOptions, values)


def by_stage(values: dict[str, dict[str, Any]]) -> EvaluationOptions:
    """As the stage `run_tasks` of a run runs the task."""
    own = {name: dict(block) for name, block in values.items()}
    name, model = own["task"].pop("name", "exam_sheets"), own["model"].pop("path")
    folder = own.pop("run")
    folder.pop("dir")
    config = build(configs.mapping(stage__run_tasks={"tasks": [name], **own, **folder}))
    (found,) = task_evaluation._runs(
        config.stage.run_tasks, Path(model), Path(values["run"]["dir"])
    )
    return found


@pytest.mark.parametrize("way", [by_command, by_stage])
@pytest.mark.parametrize("key", WIRES)
def test_an_option_acts(
    assets: Assets, tmp_path: Path, key: str, way: Callable[..., EvaluationOptions]
) -> None:
    if way is by_stage and key in ONLY_COMMAND:
        assert key.partition(".")[2] in ("name", "path", "server", "dir", "shard", "shards")
        return
    wire = WIRES[key]
    found = []
    for number, own in enumerate((None, option(key))):
        folder = tmp_path / str(number)
        folder.mkdir()
        values = mapping(folder, assets, wire.given(assets, own))
        prepared = Prepared(way(values), assets, folder)
        found.append(wire.read(prepared))
    assert found[1] == wire.expectation(prepared)
    assert found[0] != found[1], "the value is the default, or another option decides"


PROMPT = "1: Solve 4*c = 16 for c.\nSolution"


class Validated(NamedTuple):
    """A validation by the options that the stage of a run has."""

    options: ValidateOptions
    target: EvaluationTarget
    samples: list[Sample]
    assets: Place

    @property
    def found(self) -> ValidationResult:
        return validate(self.target, self.samples, self.options, lambda line: None, 0.0)


class Place(NamedTuple):
    """Folder of a test's files, and the models that read them."""

    folder: Path
    target: EvaluationTarget


def problems_file(place: Place, answer: str = "1") -> str:
    path = place.folder / "problems.jsonl"
    rows = [{"prompt": PROMPT, "answers": [answer]} for _ in range(SHEETS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def known_problems(place: Place) -> str:
    """Problems whose answer is the first letter that the original writes."""
    llm = LLM(place.target.teacher, cache="dense", max_num_seqs=1)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
    return problems_file(place, output.outputs[0].text.strip()[0])


def on_device(v: Validated) -> str:
    try:
        return evaluation_target(v.target.export, v.target.teacher, v.options).device
    except EvaluationError as error:
        return str(error).partition("device=")[2].partition(": ")[0]


def generated(v: Validated) -> float:
    """Tokens that the original held behind the last token of the longest answer."""
    return v.found.accuracies["teacher"].cost.peak_tokens - len(PROMPT)


def compact(name: str) -> Callable[[Validated], list[Any]]:
    """Return an option of every engine of a validation that has a compact cache."""

    def read(v: Validated) -> list[Any]:
        engines: list[EngineOptions] = []
        start = InferenceEngine.__init__

        def started(self: InferenceEngine, model: Path, options: EngineOptions, **how: Any) -> None:
            engines.append(options)
            start(self, model, options, **how)

        target = evaluation_target(v.target.export, v.target.teacher, v.options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InferenceEngine, "__init__", started)
            options = replace(v.options, max_tokens=1)
            validate(target, v.samples, options, lambda line: None, 0.0)
        return [getattr(each, name) for each in engines if each.cache == "compact"]

    return read


VALIDATE: dict[str, Wire] = {
    "samples": Wire(2, lambda v: len(v.found.agreement.lengths)),
    "problems": Wire(problems_file, lambda v: v.found.num_sheets, SHEETS, {"max_tokens": 2}),
    "max_problems": Wire(
        2, lambda v: v.found.num_sheets, others={"problems": problems_file, "max_tokens": 2}
    ),
    "max_tokens": Wire(9, generated, 9 - 1, {"problems": problems_file, "max_tokens": 3}),
    "answer_pattern": Wire(
        r"(?s)^\s*(\S)",
        lambda v: v.found.accuracies["teacher"].share.value,
        1.0,
        {"problems": known_problems, "max_tokens": 4},
    ),
    "window_only": Wire(
        True,
        lambda v: (v.found.agreement.window_only is not None, "window_only" in v.found.accuracies),
        (True, True),
        {"problems": problems_file, "max_tokens": 2},
    ),
    "max_num_seqs": Wire(
        3,
        compact("max_num_seqs"),
        [1, 1, 1, 3, 3],
        {"problems": problems_file, "window_only": True},
    ),
    "cache_bytes": Wire(
        2**26, compact("cache_bytes"), [2**26] * 5, {"problems": problems_file, "window_only": True}
    ),
    "gpu_memory_utilization": Wire(
        0.4,
        compact("gpu_memory_utilization"),
        [0.4] * 5,
        {"problems": problems_file, "window_only": True},
    ),
    "device": Wire("cuda:7", on_device),
}


@pytest.mark.parametrize("key", VALIDATE)
def test_an_option_of_a_validation_acts(
    target: EvaluationTarget, samples: list[Sample], tmp_path: Path, key: str
) -> None:
    wire, place = VALIDATE[key], Place(tmp_path, target)
    found = []
    for own in (None, key):
        stage = build(
            configs.mapping(
                stage__validate_export={"device": "cpu", "samples": 1, **wire.given(place, own)}
            )
        )
        validated = Validated(stage.stage.validate_export, target, samples, place)
        found.append(wire.read(validated))
    assert found[1] == wire.expectation(validated)
    assert found[0] != found[1], "the value is the default, or another option decides"


def test_a_run_validates_with_the_options_of_its_stage(built: Callable[..., Built]) -> None:
    values = {"samples": 2, "max_problems": 3, "max_tokens": 4, "window_only": True}
    run = built(**{f"stage.validate_export.{name}": value for name, value in values.items()})
    given = run.components.validator.options
    assert {name: getattr(given, name) for name in values} == values


def test_flags_of_dms_validate_are_its_options() -> None:
    words = "e --teacher t --output o --samples 3 --problems p --max-problems 4 --max-tokens 5 "
    words += "--answer-pattern (.) --window-only --max-num-seqs 6 --device cpu "
    words += "--cache-bytes 7 --gpu-memory-utilization 0.5"
    found = validate_command._options(validate_command._parse(words.split()))
    assert found == ValidateOptions(
        samples=3,
        problems="p",
        max_problems=4,
        max_tokens=5,
        answer_pattern="(.)",
        window_only=True,
        max_num_seqs=6,
        cache_bytes=7,
        gpu_memory_utilization=0.5,
        device="cpu",
    )
    default = ValidateOptions()
    same = [f.name for f in fields(found) if getattr(found, f.name) == getattr(default, f.name)]
    assert same == []


def test_every_option_has_a_test() -> None:
    assert uncovered(leaves(EvaluationOptions), WIRES, {}) == []
    assert uncovered(leaves(ValidateOptions), VALIDATE, {}) == []
    stage = {key.partition(".")[2] for key in leaves(StageBlock) if key.startswith("run_tasks.")}
    of_command = {key for key in WIRES if key not in ONLY_COMMAND}
    # the stage runs several tasks, and has no block for the folder that it chooses
    assert stage - {"tasks"} == {key.removeprefix("run.") for key in of_command}
