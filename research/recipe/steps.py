"""Recipes of real models: their data and their training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dms_train.cli.config_source import ASSETS_DIR, compose
from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.registry import check_policy, parse_options
from research.lab.step import Step
from research.recipe.library import LICENCE, SOURCE

ROOT = Path(__file__).parents[2]
ORIGINAL = "original"
CONTROL = "control"  # trained without eviction
_FETCH = (str(ROOT / "scripts" / "fetch_models.py"),)
_DATA = ("-m", "dms_train.data_prep.prepare")
TRAIN = ("-m", "dms_train")
EVALUATE = ("-m", "research", "eval")
NEEDLES = ("-m", "research", "recipe-needles")
FILES = {  # test files of the tasks that are answered in chains
    "gsm8k": "openai/gsm8k/main/test.jsonl",
    "math500": "HuggingFaceH4/MATH-500/default/test.jsonl",
    "humaneval": "openai/openai_humaneval/test.jsonl",
}
_DMC = (  # the defaults of the method in place of the experiment's, and fewer exports
    *("method=dmc", "method.window=0", "stage.export.format=dmc"),
    "stage.hold.branch_ratios=[4]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of lm-evaluation-harness.

    Attributes:
        name: Name of the task.
        shots: Examples before each question; None takes the task's own.
        limit: Most documents of the task, or of each part of a group; None sets no limit.
    """

    name: str
    shots: int | None = None
    limit: int | None = None

    @property
    def key(self) -> str:
        """Name in the results of `dms-eval harness`."""
        return self.name if self.shots is None else f"{self.name}@{self.shots}"


_TASKS = (
    Task(name="hellaswag", shots=10),
    Task(name="arc_easy", shots=25),
    Task(name="arc_challenge", shots=25),
    Task(name="piqa", shots=20),
    Task(name="winogrande", shots=5),
    Task(name="openbookqa", shots=5),
    Task(name="lambada_openai", shots=0),
    Task(name="lambada_openai", shots=10),
    Task(name="mmlu", shots=5, limit=20),  # of each of 57 parts
    Task(name="gsm8k", shots=5),
    Task(name="gsm8k_cot"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model, its training data and its evaluation.

    Attributes:
        experiment: Name in `dms_train/conf/experiment`.
        source: Name of the model for `scripts/fetch_models.py`; None for the embedded model.
        prompts: Number of instructions that the model answers.
        word_problems: Number of word problems that it answers too, in the prompt of GSM8K.
        continuations: Answers to each prompt.
        new_tokens: Limit of an answer.
        sampled: Share of these answers in the training text. The rest is the user's text or,
            without any, Python's standard library; the embedded model trains on answers alone.
        tasks: Tasks of the evaluation.
        published: Name of the model's published scores; None without.
        chains: Also sample several chains of reasoning.
        timed: Tasks whose accuracy is measured against seconds.
        contexts: Lengths of prompts with needles, in tokens.
        needles: Number of prompts of each length.
        train: Overrides of the experiment.
        samples: Validation sequences of each export.
    """

    experiment: str
    source: str | None
    prompts: int
    word_problems: int = 0
    continuations: int = 2
    new_tokens: int = 1800
    sampled: float = 0.5
    tasks: tuple[Task, ...] = _TASKS
    published: str | None = None
    chains: bool = False
    timed: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (1024, 2048, 4096)
    needles: int = 100
    train: tuple[str, ...] = ()
    samples: int = 64


RECIPES = {
    "smollm2_135m": Recipe(
        experiment="smollm2_135m",
        source="smollm2-135m-instruct",
        prompts=10_000,
        published="SmolLM2-135M-Instruct",
        timed=("gsm8k",),
        contexts=(1024, 2048, 4096, 8192),
    ),
    "qwen25_coder_0_5b": Recipe(
        experiment="qwen25_coder_0_5b",
        source="qwen25-coder-0.5b-instruct",
        prompts=9_000,
        word_problems=1_000,
        sampled=0.75,
        chains=True,
        timed=("gsm8k", "math500", "humaneval"),
        contexts=(1024, 4096, 8192, 16384),
    ),
    "toy": Recipe(
        experiment="smollm2_135m",
        source=None,
        prompts=12,
        continuations=1,
        new_tokens=120,
        tasks=(),
        train=(
            "method.window=16",
            "data.seq_length=32",
            "data.global_batch_size=2",
            "data.micro_batch_size=2",
            "data.split='50,50,0'",
            "parallel.params_dtype=fp32",
            "stage.zero_neuron.steps=2",
            "stage.retrofit.target_cr=3",
            "stage.retrofit.steps_per_cr=3",
            "stage.hold.steps=2",
            "run.save_interval=1",
            "run.eval_samples=2",
            "run.check_teacher=false",  # tests take random weights
            "stage.validate_export.samples=2",
        ),
        samples=2,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Choices of the user.

    Attributes:
        recipe: The recipe.
        root: Folder of all files.
        model: Directory of the original; None fetches it.
        prompts: File of prompts that the model answers; None writes instructions.
        column: Column of the prompts in that file.
        text: Files of text to train on; if empty, every recipe but `toy` takes Python's standard
            library.
        device: Device of the commands.
        rows: Sequences in the cache at the same time.
        limit: Documents of each task.
        benchmarks: Folder of `dms-eval data`; None writes it.
        held_out: Text for the perplexity; None leaves it out.
        haystack: Text that hides the needles; None leaves them out.
        cache_bytes: Most bytes of the cache of each evaluation; None takes what the GPU has.
        policies: Cache policies for the original, as `NAME` or `NAME:OPTION=VALUE`.
        ratios: Compression ratios of these policies.
        dmc: Also train with Dynamic Memory Compression, on the same data.
        control: Also train without eviction, on the same data.
        allow_code: How HumanEval runs the programs of the models, as `run.allow_code` of
            `dms-eval`; None leaves it out.
    """

    recipe: Recipe
    root: Path
    model: Path | None
    prompts: Path | None
    column: str
    text: tuple[Path, ...]
    device: str
    rows: int
    limit: int
    benchmarks: Path | None
    held_out: Path | None
    haystack: Path | None
    cache_bytes: int | None
    policies: tuple[str, ...]
    ratios: tuple[int, ...]
    dmc: bool
    control: bool
    allow_code: str | None

    @property
    def original(self) -> Path:
        """Directory of the original model."""
        if self.model is not None:
            return self.model
        if self.recipe.source is None:
            return ASSETS_DIR / "exam_teacher"
        return Path("models") / self.recipe.source


class Model(NamedTuple):
    """Model with a cache policy; a row of the report.

    Attributes:
        name: Name of its folders and steps.
        path: Directory.
        policy: Name of the policy; `auto` is what the model was trained for.
        options: Options of the policy, `KEY=VALUE`.
    """

    name: str
    path: Path
    policy: str = "auto"
    options: tuple[str, ...] = ()


def training_steps(settings: Settings) -> list[Step]:
    """Return the steps up to the exports; the training follows all others and has the GPU alone."""
    data = [*_fetched(settings), *_data(settings), *_benchmarks(settings)]
    needs = tuple(step.name for step in data)
    trained = []
    for name, given in trainings(settings).items():
        trained.append(_training(name, given, needs))
        needs = (name,)  # one training at a time
    return [*data, *trained]


def _training(name: str, given: list[str], needs: tuple[str, ...]) -> Step:
    return Step(name=name, words=lambda: [*TRAIN, *given], needs=needs)


def trainings(settings: Settings) -> dict[str, list[str]]:
    """Return the overrides of `dms-train` by the name of the step: DMS, and what was asked for."""
    made = {"train": _overrides(settings, "train")}
    if settings.dmc:
        made["train_dmc"] = [*_overrides(settings, "train_dmc"), *_DMC]
    if settings.control:
        name = f"train_{CONTROL}"
        made[name] = _without_eviction(_overrides(settings, name))
    return made


def _without_eviction(given: list[str]) -> list[str]:
    """Return overrides of a training with as many steps, all of them before any eviction."""
    stage = compose(given).stage
    annealing = round((stage.retrofit.target_cr - 1) * stage.retrofit.steps_per_cr)
    steps = f"stage.zero_neuron.steps={stage.zero_neuron.steps + annealing}"
    return [*given, steps, "stage.retrofit.target_cr=1", "stage.hold.branch_ratios=null"]


def _overrides(settings: Settings, folder: str) -> list[str]:
    shards = _shards(settings)
    return [
        f"experiment={settings.recipe.experiment}",
        f"model.path={settings.original}",
        f"data.paths=[{','.join(str(settings.root / 'data' / name) for name in shards)}]",
        f"data.weights=[{','.join(str(weight) for weight in shards.values())}]",
        f"run.dir={settings.root / folder}",
        *settings.recipe.train,
    ]


def exports(settings: Settings) -> dict[str, Path]:
    """Return the directory of each export by its name: `cr2`, `dmc_cr4` or `control`."""
    found = {}
    for training, given in trainings(settings).items():
        config = compose(given)
        target = config.stage.retrofit.target_cr
        prefix = training.removeprefix("train").removeprefix("_")
        folders = {
            f"cr{ratio}": f"cr{ratio}"
            for ratio in config.stage.hold.branch_ratios or ()
            if ratio < target
        }
        last = f"cr{target:g}" if target > 1 else ""  # the control
        for name, folder in (folders | {last: "final"}).items():
            export = Path(config.run.dir) / "exports" / folder / "hf"
            found["_".join(filter(None, (prefix, name)))] = export
    return found


def models(settings: Settings) -> list[Model]:
    """Return the original, the exports, and the original with each policy at each ratio."""
    trained = [Model(ORIGINAL, settings.original)]
    trained += [Model(name, path) for name, path in exports(settings).items()]
    return [*trained, *_with_policies(settings)]


def _with_policies(settings: Settings) -> list[Model]:
    rows = []
    for given in settings.policies:
        policy, *options = given.split(":")
        name = re.sub(r"\W+", "_", given)
        for ratio in settings.ratios:
            words = (f"cr={ratio}", *options)
            rows.append(Model(f"{name}_cr{ratio}", settings.original, policy, words))
    return rows


def check_policies(settings: Settings) -> None:
    """Refuse policies that do not exist, or take no compression ratio.

    Raises:
        InferenceError: The line names the policy and its options.
    """
    for given in settings.policies:
        for option in given.split(":")[1:]:
            if option.partition("=")[0] in ("cr", "budget"):
                raise InferenceError(f"--policies {given}: --policy-ratios sets the ratio")
    for model in _with_policies(settings):
        check_policy(model.policy, parse_options(model.options))


def _fetched(settings: Settings) -> list[Step]:
    """Return the step that downloads the model, unless it is there."""
    source = settings.recipe.source
    if settings.model is not None or source is None:
        return []
    return [Step(name="fetch", words=lambda: [*_FETCH, source, "--download"])]


def _shards(settings: Settings) -> dict[str, float]:
    """Return the shards of the training data with their weights."""
    share = settings.recipe.sampled
    return {"sampled": share, "text": 1 - share} if _has_text(settings) else {"sampled": 1.0}


def _has_text(settings: Settings) -> bool:
    """Return whether other text than the answers is trained on."""
    return bool(settings.text) or settings.recipe.source is not None


def _data(settings: Settings) -> list[Step]:
    """Return the steps that sample text from the model and tokenize other text."""
    fetched = tuple(step.name for step in _fetched(settings))
    answers = [
        *(*_DATA, "generate", str(_prompts(settings)), "--column", settings.column),
        *("--model", str(settings.original), "--device", settings.device),
        *("--max-num-seqs", str(settings.rows)),
        *("--max-new-tokens", str(settings.recipe.new_tokens)),
        *("--continuations", str(settings.recipe.continuations)),
        *("--output", str(settings.root / "data" / "sampled")),
    ]
    if settings.recipe.source is not None:
        answers.append("--chat")
    if settings.prompts is None:
        answers += ["--source", "prompts of dms-train", "--license", "Apache-2.0"]
    steps = [] if settings.prompts else [_written_prompts(settings)]
    for file in FILES.values() if settings.recipe.timed else ():
        answers += ["--evaluation-set", str(documents(settings) / file)]
    needs = (*fetched, *(step.name for step in (*_benchmarks(settings), *steps)))
    steps.append(Step(name="sampled", words=lambda: answers, needs=needs))
    return [*steps, *_text(settings, fetched)]


def _text(settings: Settings, fetched: tuple[str, ...]) -> list[Step]:
    """Return the steps that tokenize the user's text or, without any, Python's library."""
    if not _has_text(settings):
        return []
    files, steps, source = settings.text, list[Step](), list[str]()
    if not files:
        files = (settings.root / "data" / "code.jsonl",)
        words = ["-m", "research", "recipe-code", str(files[0])]
        steps.append(Step(name="code", words=lambda: words))
        source = ["--source", SOURCE, "--license", LICENCE]
    text = [
        *(*_DATA, "tokenize", *map(str, files), *source, "--append-eod"),
        *("--tokenizer", str(settings.original)),
        *("--output", str(settings.root / "data" / "text")),
    ]
    needs = (*fetched, *(step.name for step in steps))
    return [*steps, Step(name="text", words=lambda: text, needs=needs)]


def _prompts(settings: Settings) -> Path:
    return settings.prompts or settings.root / "data" / "prompts.jsonl"


def _written_prompts(settings: Settings) -> Step:
    """Return the step that writes prompts; those of the embedded model are exam sheets."""
    file, number = str(_prompts(settings)), str(settings.recipe.prompts)
    words = [*_DATA, "exam-problems", "--out", file, "--sheets", number, "--overwrite"]
    if settings.recipe.source is not None:
        words = ["-m", "research", "recipe-prompts", file, "--count", number]
        if settings.recipe.word_problems:
            words += ["--word-problems", str(settings.recipe.word_problems)]
    return Step(name="prompts", words=lambda: words)


def _benchmarks(settings: Settings) -> list[Step]:
    """Return the step that downloads the documents of the tasks, unless they are there."""
    if settings.benchmarks is not None or not settings.recipe.tasks:
        return []
    words = [*EVALUATE, "data", "--out", str(documents(settings))]
    return [Step(name="benchmarks", words=lambda: words)]


def documents(settings: Settings) -> Path:
    """Return the folder with the documents of the tasks."""
    return settings.benchmarks or settings.root / "benchmarks"
