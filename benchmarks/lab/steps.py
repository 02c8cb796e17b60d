"""The commands of the lab, in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.scales import Retrofit, Scale
from dms_train.evaluation.scaling.results import load
from dms_train.inference.policies.registry import check_policy, parse_options

_DATA = ("-m", "dms_train.data_prep.prepare")
_TRAIN = ("-m", "dms_train")
_EVALUATE = ("-m", "dms_train.cli.evaluate")
_HF = Path("exports") / "final" / "hf"
_LONG_SHARE = 0.7
_MIDDLE = 0.5  # of the lengths whose peak is a budget
_SAME_RESULTS = ("--workers=", "model.max_num_seqs=")  # whatever their values
VARIANTS = ("immediate", "dmc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user chooses.

    Attributes:
        scale: Of the teacher.
        root: Where everything goes.
        seeds: Of the retrofits.
        also: Of `VARIANTS`, at the first ratio and its steps.
        device: Of the evaluations.
        rows: Chains in the cache at the same time.
        workers: Processes that make data.
    """

    scale: Scale
    root: Path
    seeds: tuple[int, ...]
    also: tuple[str, ...]
    device: str
    rows: int
    workers: int

    @property
    def teacher(self) -> Path:
        """Its model directory."""
        return self.root / "teacher" / _HF

    def run(self, name: str, seed: int) -> Path:
        """The folder of a retrofit."""
        return self.root / "retrofit" / f"seed{seed}" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of this project.

    Attributes:
        name: Of its log and its mark.
        words: Arguments of python; called when the steps before it have finished.
    """

    name: str
    words: Callable[[], list[str]]


def phases(settings: Settings) -> list[list[Step]]:
    """All steps; those of one phase need nothing of each other."""
    scale = settings.scale
    trained = [_retrofits(settings, seed) for seed in settings.seeds]
    return [
        _data(settings),
        [Step(name="teacher", words=lambda: _teacher(settings))],
        *([chain[place]] for chain in trained for place in range(len(scale.retrofits))),
        *([step] for chain in trained for step in chain[len(scale.retrofits) :]),
        [_evaluate(settings, "teacher", settings.teacher), *_evaluations(settings)],
        _policies(settings),
        [Step(name="report", words=lambda: _report(settings))],
    ]


def _data(settings: Settings) -> list[Step]:
    scale, root = settings.scale, settings.root
    numbers = ["--numbers", str(scale.numbers)]
    filled = ["--document-tokens", str(scale.context), *numbers]
    workers = [f"--workers={settings.workers}", "--overwrite"]

    def searches(name: str, documents: int, *more: str) -> list[str]:
        out = ["--out", str(root / name), "--documents", str(documents)]
        return [*_DATA, "countdown", *out, *filled, *more, *workers]

    long = ["--long-share", str(_LONG_SHARE), "--seed", "1"]
    problems = ["--out", str(_problems(settings)), "--problems", str(scale.problems)]
    return [
        Step(name="data", words=lambda: searches("data", scale.documents)),
        Step(name="data_long", words=lambda: searches("data_long", scale.long_documents, *long)),
        Step(
            name="problems",
            words=lambda: [*_DATA, "countdown-problems", *problems, *numbers, "--overwrite"],
        ),
    ]


def _problems(settings: Settings) -> Path:
    return settings.root / "problems.jsonl"


def _teacher(settings: Settings) -> list[str]:
    root, scale = settings.root, settings.scale
    return [
        *_TRAIN,
        f"experiment={scale.experiment}",
        f"model.tokenizer={root}/data/tokenizer",
        f"data.paths=[{root}/data/train]",
        f"data.seq_length={scale.context}",
        f"run.dir={root}/teacher",
        *scale.teacher,
    ]


def _retrofits(settings: Settings, seed: int) -> list[Step]:
    """The chain of anneals, then the variants."""
    found, before = [], None
    for retrofit in settings.scale.retrofits:
        folder = settings.run(f"cr{retrofit.cr}", seed)
        found.append(_retrofit(settings, "lab_retrofit", retrofit, folder, before))
        before = folder
    first = settings.scale.retrofits[0]
    for name in settings.also:
        folder = settings.run(f"{name}_cr{first.cr}", seed)
        if name == "dmc":
            found.append(_retrofit(settings, "lab_dmc", first, folder, None))
        else:
            words = ("method.eviction=immediate",)
            found.append(_retrofit(settings, "lab_retrofit", first, folder, None, *words))
    return found


def _retrofit(
    settings: Settings,
    experiment: str,
    retrofit: Retrofit,
    folder: Path,
    before: Path | None,
    *more: str,
) -> Step:
    scale, root = settings.scale, settings.root
    words = [
        *_TRAIN,
        f"experiment={experiment}",
        f"model.path={settings.teacher}",
        f"data.paths=[{root}/data_long/train]",
        f"data.seq_length={scale.context}",
        f"data.micro_batch_size={scale.micro_batch}",
        f"stage.retrofit.target_cr={retrofit.cr}",
        f"stage.retrofit.steps_per_cr={retrofit.steps_per_cr}",
        f"stage.hold.steps={retrofit.hold}",
        f"run.seed={folder.parent.name.removeprefix('seed')}",
        f"run.dir={folder}",
        *scale.retrofit,
        *more,
    ]
    if before is not None:
        words += [f"run.load={before}", "stage.run=[retrofit,hold,export]"]
        words += ["stage.export.every_integer_cr=false"]
    name = "_".join(folder.relative_to(root / "retrofit").parts)
    return Step(name=name, words=lambda: words)


def _evaluations(settings: Settings) -> list[Step]:
    names = [f"cr{retrofit.cr}" for retrofit in settings.scale.retrofits]
    names += [f"{name}_{names[0]}" for name in settings.also]
    folders = [(name, seed) for seed in settings.seeds for name in names]
    return [
        _evaluate(settings, f"seed{seed}_{name}", settings.run(name, seed) / _HF)
        for name, seed in folders
    ]


def _evaluate(settings: Settings, name: str, model: Path, *more: str) -> Step:
    scale = settings.scale
    words = [
        *_EVALUATE,
        f"model.path={model}",
        "task.name=countdown",
        f"task.path={_problems(settings)}",
        f"sweep.lengths=[{','.join(f'{length:g}' for length in scale.lengths)}]",
        f"sweep.widths=[{','.join(map(str, scale.widths))}]",
        f"model.device={settings.device}",
        f"model.max_num_seqs={settings.rows}",
        f"run.dir={_results(settings, name)}",
        *more,
    ]
    return Step(name=f"evaluate_{name}", words=lambda: words)


def _results(settings: Settings, name: str) -> Path:
    return settings.root / "eval" / name


def _policies(settings: Settings) -> list[Step]:
    """The teacher with policies that hold or read as many tokens as the retrofitted model holds."""
    found = []
    for cr in settings.scale.budget_ratios:
        for policy in settings.scale.policies:
            name = f"{policy}_as_cr{cr}"

            def words(name: str = name, policy: str = policy, cr: int = cr) -> list[str]:
                budget = budget_of(settings, cr)
                options = (f"policy.{word}" for word in _options(settings.scale, policy, budget))
                given = [f"policy={policy}", *options, "sweep.widths=[1]"]
                limit = f"task.limit={settings.scale.policy_problems}"
                return _evaluate(settings, name, settings.teacher, *given, limit).words()

            found.append(Step(name=f"evaluate_{name}", words=words))
    return found


def _options(scale: Scale, policy: str, budget: int) -> list[str]:
    if policy == "window":
        return [f"window={budget - 1}"]
    sinks = [f"sinks={scale.numbers + 3}"] if policy == "streaming_llm" else []  # the prompt
    return [f"budget={budget}", *sinks]


def check_policies(scale: Scale) -> None:
    """Refuse policies that take no budget.

    Raises:
        InferenceError: With the policy and its options.
    """
    for policy in scale.policies:
        check_policy(policy, parse_options(_options(scale, policy, budget=scale.context)))


def budget_of(settings: Settings, cr: int) -> int:
    """Peak tokens of a chain of the retrofitted model, the mean over the problems, rounded up."""
    run = load([_results(settings, f"seed{settings.seeds[0]}_cr{cr}")])
    longest = max(run.points(), key=lambda p: (p.budget.length, -p.budget.width))
    return math.ceil(longest.peak_tokens)


def _report(settings: Settings) -> list[str]:
    output = ["--output", str(settings.root / "report.html")]
    return [*_EVALUATE, "report", str(settings.root / "eval"), *output]


def lines(settings: Settings) -> list[str]:
    """Every measured budget, one line each."""
    folders = sorted(path.parent for path in (settings.root / "eval").glob("*/summary.json"))
    return [f"{path.name:28} {point}" for path in folders for point in load([path]).points()]


def as_text(words: list[str]) -> str:
    """A command as the marks store it: without what does not change its results."""
    return json.dumps([word for word in words if not word.startswith(_SAME_RESULTS)])
