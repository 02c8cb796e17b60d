"""The commands of the lab, in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.scales import VARIANTS, Retrofit, Scale
from dms_train.cli.config_source import compose
from dms_train.evaluation.scaling.results import load
from dms_train.inference.policies.registry import check_policy, parse_options

_DATA = ("-m", "dms_train.data_prep.prepare")
_TRAIN = ("-m", "dms_train")
_EVALUATE = ("-m", "dms_train.cli.evaluate")
_HF = Path("exports") / "final" / "hf"
_LONG_SHARE = 0.7
# whatever their values
_SAME_RESULTS = ("--workers=", "model.max_num_seqs=", "data.micro_batch_size=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user chooses.

    Attributes:
        scale: Of the teacher.
        root: Where everything goes.
        seeds: Of the retrofits.
        also: Of `VARIANTS`, with the first seed.
        device: Of the evaluations.
        gpus: That commands are spread over; 0 on a CPU.
        rows: Chains in the cache at the same time.
        workers: Processes that make data.
    """

    scale: Scale
    root: Path
    seeds: tuple[int, ...]
    also: tuple[str, ...]
    device: str
    gpus: int
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
        words: Arguments of python; called when the steps that it needs have finished.
        needs: Names of those steps.
        ranks: Processes, one for each GPU that it takes; 1 shares a GPU with other commands.
    """

    name: str
    words: Callable[[], list[str]]
    needs: tuple[str, ...] = ()
    ranks: int = 1


def steps(settings: Settings) -> list[Step]:
    """All steps; each stands behind those that it needs, and the first come first."""
    trained = [step for seed in settings.seeds for step in _retrofits(settings, seed)]
    variants, fewer = _variants(settings), _compared(settings.scale)
    evaluated = [_evaluate(settings, "teacher", settings.teacher, needs="teacher")]
    evaluated += [_evaluation(settings, step, *fewer) for step in variants]
    evaluated += [_evaluation(settings, step) for step in trained]
    evaluated += _policies(settings)
    report = Step(
        name="report",
        words=lambda: _report(settings),
        needs=tuple(step.name for step in evaluated),
    )
    return [*_data(settings), _teacher(settings), *trained, *variants, *evaluated, report]


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


def _teacher(settings: Settings) -> Step:
    root, scale = settings.root, settings.scale
    words = [
        *_TRAIN,
        f"experiment={scale.experiment}",
        f"model.tokenizer={root}/data/tokenizer",
        f"data.paths=[{root}/data/train]",
        f"data.seq_length={scale.context}",
        f"run.dir={root}/teacher",
        *scale.teacher,
    ]
    ranks = max(1, settings.gpus)
    if ranks > 1:
        batch = compose(words[len(_TRAIN) :]).data.micro_batch_size
        words.append(f"data.micro_batch_size={max(1, batch // ranks)}")
    return Step(name="teacher", words=lambda: words, needs=("data",), ranks=ranks)


def _retrofits(settings: Settings, seed: int) -> list[Step]:
    """The anneals of a seed, each from the one before."""
    found: list[Step] = []
    before = None
    for retrofit in settings.scale.retrofits:
        folder = settings.run(f"cr{retrofit.cr}", seed)
        words: tuple[str, ...] = ()
        if before is not None:
            words = (f"run.load={before}", "stage.run=[retrofit,hold,export]")
            words += ("stage.export.every_integer_cr=false",)
        needs = (found[-1].name,) if found else ("teacher", "data_long")
        found.append(_retrofit(settings, "lab_retrofit", retrofit, folder, needs, *words))
        before = folder
    return found


def _variants(settings: Settings) -> list[Step]:
    """Those of the first seed."""
    found, first = [], settings.scale.retrofits[0]
    for name in settings.also:
        variant = VARIANTS[name]
        retrofit = Retrofit(
            cr=first.cr,
            steps_per_cr=max(1, round(first.steps_per_cr * variant.steps)),
            hold=max(1, round(first.hold * variant.steps)),
        )
        folder = settings.run(f"{name}_cr{first.cr}", settings.seeds[0])
        needs = ("teacher", "data_long")
        found.append(
            _retrofit(settings, variant.experiment, retrofit, folder, needs, *variant.overrides)
        )
    return found


def _retrofit(
    settings: Settings,
    experiment: str,
    retrofit: Retrofit,
    folder: Path,
    needs: tuple[str, ...],
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
    name = "_".join(folder.relative_to(root / "retrofit").parts)
    return Step(name=name, words=lambda: words, needs=needs)


def _evaluation(settings: Settings, trained: Step, *more: str) -> Step:
    """Of a retrofitted model."""
    seed, name = trained.name.split("_", 1)
    model = settings.root / "retrofit" / seed / name / _HF
    return _evaluate(settings, trained.name, model, *more, needs=trained.name)


def _compared(scale: Scale) -> tuple[str, str]:
    """What policies and variants are evaluated on, most of which decode without kernels."""
    return "sweep.widths=[1]", f"task.limit={min(scale.compared_problems, scale.problems)}"


def _evaluate(settings: Settings, name: str, model: Path, *more: str, needs: str) -> Step:
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
    return Step(name=f"evaluate_{name}", words=lambda: words, needs=("problems", needs))


def _results(settings: Settings, name: str) -> Path:
    return settings.root / "eval" / name


def _policies(settings: Settings) -> list[Step]:
    """The teacher with policies that hold or read as many tokens as the retrofitted model holds."""
    found = []
    for cr in settings.scale.budget_ratios:
        needs = f"evaluate_seed{settings.seeds[0]}_cr{cr}"
        for policy in settings.scale.policies:
            name = f"{policy}_as_cr{cr}"

            def words(name: str = name, policy: str = policy, cr: int = cr) -> list[str]:
                budget = budget_of(settings, cr)
                options = (f"policy.{word}" for word in _options(settings.scale, policy, budget))
                given = [f"policy={policy}", *options, *_compared(settings.scale)]
                return _evaluate(settings, name, settings.teacher, *given, needs="teacher").words()

            found.append(Step(name=f"evaluate_{name}", words=words, needs=(needs,)))
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
    """Of everything but variants of the same method, whose points would lie on one line."""
    root, first = settings.root, f"cr{settings.scale.retrofits[0].cr}"
    left_out = {
        _results(settings, f"seed{settings.seeds[0]}_{name}_{first}")
        for name in settings.also
        if VARIANTS[name].experiment == "lab_retrofit"
    }
    runs = sorted({path.parent for path in (root / "eval").glob("*/summary.json")} - left_out)
    output = ["--output", str(root / "report.html"), "--figures", str(root / "figures")]
    return [*_EVALUATE, "report", *map(str, runs), *output]


def lines(settings: Settings) -> list[str]:
    """Every measured budget, one line each."""
    folders = sorted(path.parent for path in (settings.root / "eval").glob("*/summary.json"))
    return [f"{path.name:28} {point}" for path in folders for point in load([path]).points()]


def as_text(words: list[str]) -> str:
    """A command as the marks store it: without what does not change its results."""
    return json.dumps([word for word in words if not word.startswith(_SAME_RESULTS)])
