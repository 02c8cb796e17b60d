"""Commands of the lab, in order: of every task, and of a longer context."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from dms_train.cli.config_source import compose
from dms_train.evaluation.scaling.results import load
from dms_train.inference.policies.registry import check_policy, parse_options
from research.folders import CONFIG_DIR
from research.lab.card import GREEDY, TEACHER
from research.lab.scales import DMS, VARIANTS, Retrofit, Scale, Variant
from research.lab.step import Step
from research.lab.tasks import TASKS, named

_DATA = ("-m", "research", "data")
_TRAIN = ("-m", "dms_train", f"--config-dir={CONFIG_DIR}")
_POOL = ("-m", "dms_train.checkpoints_tools.pool_kv_heads")
_EVALUATE = ("-m", "research", "eval")
_CARD = ("-m", "research", "lab-card")
HF = Path("exports") / "final" / "hf"
_OTHERS = ("--seed", "1")  # other documents than the teacher's
_LONG = ("--long-share", "0.7", *_OTHERS)
_HAYSTACKS = ("lab_niah", "lab_variable_tracking")
_CONTEXTS = (1, 2, 4)  # multiples of the teacher's context
_VALIDATION = 200  # samples beyond those of the training, for its validation split


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Choices of the user.

    Attributes:
        scale: Size of the teacher.
        root: Folder of all files.
        tasks: Names in `TASKS` that the teacher learns and all models are evaluated on.
        seeds: Seeds of the retrofits.
        also: Names in `VARIANTS`, retrofitted with the first seed.
        device: Device of the evaluations.
        gpus: Number of GPUs for the commands; 0 on a CPU.
        rows: Chains in the cache at the same time.
        workers: Processes that make data.
    """

    scale: Scale
    root: Path
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    also: tuple[str, ...]
    device: str
    gpus: int
    rows: int
    workers: int

    @property
    def teacher(self) -> Path:
        """Model directory of the teacher."""
        return self.pretrained("teacher")

    def pretrained(self, name: str) -> Path:
        """Return the model directory of the teacher, or of its `gqa` version."""
        return self.root / name / HF

    def run(self, name: str, seed: int) -> Path:
        """Return the folder of a retrofit."""
        return self.root / "retrofit" / f"seed{seed}" / name


def steps(settings: Settings) -> list[Step]:
    """Return all steps; each follows those that it needs.

    Policies are evaluated before the further seeds, so that a lab that ends early has one of each.
    """
    trained = [step for seed in settings.seeds for step in _seed(settings, seed)]
    teacher, pooled, variants = _teacher(settings), _gqa(settings), _variants(settings)
    fewer, one_seed = _compared(settings.scale), len(trained) // len(settings.seeds)
    evaluated: list[Step] = []
    for task in settings.tasks:
        evaluated += _of_the_teacher(settings, task, teacher)
        evaluated += [_evaluation(settings, task, step, *fewer) for step in pooled[1:] + variants]
        evaluated += [_evaluation(settings, task, step) for step in trained[:one_seed]]
        evaluated += _policies(settings, task)
        evaluated += [_evaluation(settings, task, step) for step in trained[one_seed:]]
    card = Step(
        name="card",
        words=lambda: [*_CARD, str(settings.root), "--experiment", settings.scale.experiment],
        needs=tuple(step.name for step in evaluated if step.name.startswith(f"evaluate_{TEACHER}")),
        repeats=True,
    )
    report = Step(
        name="report",
        words=lambda: _report(settings),
        needs=tuple(step.name for step in evaluated),
        repeats=True,
    )
    made = [step for task in settings.tasks for step in _data(settings, task)]
    made += _shorter_data(settings)
    return [*made, teacher, *trained, *pooled, *variants, *evaluated, card, report]


def _data(settings: Settings, name: str) -> list[Step]:
    """Return the steps that make documents and problems of a task."""
    scale = settings.scale
    return [
        _documents(settings, name, "data", scale.samples, *TASKS[name].learned(scale)),
        _long_data(settings, name),
        _made_problems(settings, name),
    ]


def _long_data(settings: Settings, name: str, base: str = "data_long") -> Step:
    """Return the step that makes documents of the retrofits."""
    more = _LONG if TASKS[name].long and not settings.scale.packing else _OTHERS
    return _documents(settings, name, base, settings.scale.long_samples, *more)


def _documents(settings: Settings, name: str, base: str, samples: int, *more: str) -> Step:
    """Return the step that makes a task's share of the documents of all tasks."""
    scale, task, folder = settings.scale, TASKS[name], named(base, name)
    each = task.documents_of_a_sample(scale) if scale.packing else 1
    count = math.ceil(samples * _share(settings, name) * each)
    out = ["--out", str(settings.root / folder), "--documents", str(count)]
    filled = [] if scale.packing else ["--document-tokens", str(scale.context)]
    options = [*filled, *task.options(scale), *task.documents, *more]
    workers = [f"--workers={settings.workers}", "--overwrite"]
    words = [*_DATA, task.command, *out, *options, *workers]
    return Step(name=folder, words=lambda: words)


def _made_problems(settings: Settings, name: str, base: str = "problems") -> Step:
    scale, task = settings.scale, TASKS[name]
    out = ["--out", str(_problems(settings, name, base)), "--problems", str(scale.problems)]
    options = [*task.options(scale), *task.problems(scale), "--overwrite"]
    words = [*_DATA, f"{task.command}-problems", *out, *options]
    return Step(name=named(base, name), words=lambda: words)


def _share(settings: Settings, name: str) -> float:
    """Return the share of a task in all samples."""
    return TASKS[name].weight / sum(TASKS[each].weight for each in settings.tasks)


def _problems(settings: Settings, task: str, base: str = "problems") -> Path:
    return settings.root / f"{named(base, task)}.jsonl"


def _blend(settings: Settings, base: str) -> list[str]:
    """Return the overrides that blend the data of all tasks."""
    paths = ",".join(f"{settings.root}/{named(base, task)}/train" for task in settings.tasks)
    overrides = [f"data.paths=[{paths}]"]
    if len(settings.tasks) > 1:
        weights = ",".join(str(TASKS[task].weight) for task in settings.tasks)
        overrides.append(f"data.weights=[{weights}]")
    return [*overrides, "data.packing=true"] if settings.scale.packing else overrides


def _needed(settings: Settings, base: str) -> tuple[str, ...]:
    return tuple(named(base, task) for task in settings.tasks)


def _pretraining(settings: Settings, name: str) -> list[str]:
    """Return the teacher's command, with a folder for its run."""
    root, scale = settings.root, settings.scale
    return [
        *_TRAIN,
        f"experiment={scale.experiment}",
        f"model.tokenizer={root}/{named('data', settings.tasks[0])}/tokenizer",
        *_blend(settings, "data"),
        f"data.seq_length={scale.context}",
        f"run.dir={root}/{name}",
        *scale.teacher,
    ]


def _teacher(settings: Settings) -> Step:
    words = _pretraining(settings, "teacher")
    ranks = 1
    if settings.gpus > 1:
        data = compose(words[len(_TRAIN) :], CONFIG_DIR).data
        ranks = _largest_divisor(data.global_batch_size, settings.gpus)
        own = data.global_batch_size // ranks
        words.append(f"data.micro_batch_size={_largest_divisor(own, data.micro_batch_size)}")
    needs = _needed(settings, "data")
    return Step(name="teacher", words=lambda: words, needs=needs, ranks=ranks)


def _largest_divisor(number: int, most: int) -> int:
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def _gqa(settings: Settings) -> list[Step]:
    """Return the steps that halve the teacher's KV heads and continue its training."""
    if "gqa" not in settings.also:
        return []
    teacher = compose(
        _pretraining(settings, "teacher")[len(_TRAIN) :], CONFIG_DIR
    ).model.architecture
    assert teacher is not None
    out, heads = settings.root / "gqa_means", str(teacher.num_query_groups // 2)
    pool = [*_POOL, str(settings.teacher), str(out), "--kv-heads", heads]
    words = _trained_on(settings, "gqa", out, settings.scale.gqa_steps)
    return [
        Step(name="gqa_means", words=lambda: pool, needs=("teacher",)),
        Step(name="gqa", words=lambda: words, needs=("gqa_means", *_needed(settings, "data"))),
    ]


def _trained_on(settings: Settings, name: str, model: Path, count: int) -> list[str]:
    """Return the teacher's command from the weights of a model, with a schedule of its own."""
    return [
        *_pretraining(settings, name),
        "model.architecture=null",
        f"model.path={model}",
        f"stage.pretrain.steps={count}",
        "stage.pretrain.min_lr_ratio=0",
        f"optim.lr_warmup_steps={count // 10}",
    ]


def long_steps(settings: Settings) -> list[Step]:
    """Return the steps of the folder `long`: a teacher with four times its context and retrofits.

    They are retrofitted with the context that the teacher had, and evaluated up to the longer one.
    The teacher of `settings` must have been trained.
    """
    chosen = [r for r in settings.scale.retrofits if r.cr in settings.scale.long_ratios]
    scale = replace(settings.scale, retrofits=tuple(chosen))
    own = replace(settings, root=settings.root / "long", tasks=_HAYSTACKS, scale=scale)
    longest = replace(own, scale=replace(scale, context=_CONTEXTS[-1] * scale.context))
    batch, words = _with_longer_samples(longest, settings.teacher)
    samples = batch * scale.long_steps + _VALIDATION * len(_HAYSTACKS)
    teacher = Step(name="teacher", words=lambda: words, needs=_needed(own, "data"))
    trained = [teacher, *_retrofits(own, settings.seeds[0])]
    more = _OTHERS if scale.packing else _LONG
    return [
        *(_documents(longest, task, "data", samples, *more) for task in _HAYSTACKS),
        *(_long_data(own, task) for task in _HAYSTACKS),
        *trained,
        *(step for task in _HAYSTACKS for step in _at_each_context(own, task, trained)),
    ]


def _with_longer_samples(settings: Settings, teacher: Path) -> tuple[int, list[str]]:
    """Return the samples of a step with as many tokens as the teacher's, and the command."""
    data = compose(_pretraining(settings, "teacher")[len(_TRAIN) :], CONFIG_DIR).data
    batch = max(1, data.global_batch_size // _CONTEXTS[-1])
    together = _largest_divisor(batch, max(1, data.micro_batch_size // _CONTEXTS[-1]))
    words = [
        *_trained_on(settings, "teacher", teacher, settings.scale.long_steps),
        f"model.max_position_embeddings={2 * settings.scale.context}",  # of prompts and answers
        f"data.global_batch_size={batch}",
        f"data.micro_batch_size={together}",
    ]
    return batch, words


def _at_each_context(settings: Settings, task: str, trained: list[Step]) -> list[Step]:
    """Return the steps that make problems of each context and evaluate all models."""
    steps: list[Step] = []
    for context in (times * settings.scale.context for times in _CONTEXTS):
        problems = f"problems_{context}"
        sized = replace(settings, scale=replace(settings.scale, context=context))
        steps.append(_made_problems(sized, task, problems))
        for step in trained:
            name, model = f"{step.name}_{context}", _exported(settings, step.name)
            steps.append(_evaluate(settings, task, name, model, needs=step.name, problems=problems))
    return steps


def _seed(settings: Settings, seed: int) -> list[Step]:
    """Return the retrofits of a seed, with every method."""
    return [step for name in settings.scale.methods for step in _retrofits(settings, seed, name)]


def _retrofits(settings: Settings, seed: int, method: str = DMS) -> list[Step]:
    """Return the anneals of a method with a seed, each from the one before."""
    variant, prefix = Variant(title="DMS"), ""
    if method != DMS:
        variant, prefix = VARIANTS[method], f"{method}_"
    steps: list[Step] = []
    before = None
    for retrofit in settings.scale.retrofits:
        folder = settings.run(f"{prefix}cr{retrofit.cr}", seed)
        words: tuple[str, ...] = ()
        if before is not None:
            words = (f"run.load={before}", "stage.run=[retrofit,hold,export]")
            words += ("stage.export.every_integer_cr=false",)
        needs = (steps[-1].name,) if steps else ("teacher", *_needed(settings, "data_long"))
        steps.append(_retrofit(settings, variant, retrofit, folder, needs, *words))
        before = folder
    return steps


def _variants(settings: Settings) -> list[Step]:
    """Return the retrofits of `--also`, with the first seed."""
    steps, first = [], settings.scale.retrofits[0]
    for name in settings.also:
        variant = VARIANTS[name]
        retrofit = Retrofit(
            cr=first.cr,
            steps_per_cr=max(1, round(first.steps_per_cr * variant.steps)),
            hold=max(1, round(first.hold * variant.steps)),
        )
        folder = settings.run(f"{name}_cr{first.cr}", settings.seeds[0])
        base, own = "data_long", settings
        if variant.shorter > 1:
            base, own = f"data_{name}", _with_shorter_samples(settings, variant)
        needs = (variant.model, *_needed(settings, base))
        steps.append(
            _retrofit(own, variant, retrofit, folder, needs, *variant.overrides, data=base)
        )
    return steps


def _shorter_data(settings: Settings) -> list[Step]:
    """Return the steps that make documents of the variants with shorter samples."""
    return [
        _long_data(_with_shorter_samples(settings, VARIANTS[name]), task, f"data_{name}")
        for name in settings.also
        if VARIANTS[name].shorter > 1
        for task in settings.tasks
    ]


def _with_shorter_samples(settings: Settings, variant: Variant) -> Settings:
    """Return settings with as many tokens in a step, in shorter samples."""
    scale, factor = settings.scale, variant.shorter
    batch = compose(
        [f"experiment={variant.experiment}", *scale.retrofit], CONFIG_DIR
    ).data.global_batch_size
    shorter = replace(
        scale,
        context=scale.context // factor,
        micro_batch=scale.micro_batch * factor,
        long_samples=scale.long_samples * factor,
        retrofit=(*scale.retrofit, f"data.global_batch_size={batch * factor}"),
    )
    return replace(settings, scale=shorter)


def _retrofit(
    settings: Settings,
    variant: Variant,
    retrofit: Retrofit,
    folder: Path,
    needs: tuple[str, ...],
    *more: str,
    data: str = "data_long",
) -> Step:
    scale, root = settings.scale, settings.root
    words = [
        *_TRAIN,
        f"experiment={variant.experiment}",
        f"model.path={settings.pretrained(variant.model)}",
        *_blend(settings, data),
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


def _evaluation(settings: Settings, task: str, trained: Step, *more: str) -> Step:
    model = _exported(settings, trained.name)
    return _evaluate(settings, task, trained.name, model, *more, needs=trained.name)


def _of_the_teacher(settings: Settings, task: str, teacher: Step) -> list[Step]:
    """Evaluate all budgets; for searches, which are sampled, also one greedy chain."""
    steps = [_evaluation(settings, task, teacher)]
    if TASKS[task].searches:
        more = ("sampling.temperature=0", "sweep.widths=[1]")
        model = _exported(settings, teacher.name)
        steps.append(_evaluate(settings, task, GREEDY, model, *more, needs=teacher.name))
    return steps


def _exported(settings: Settings, step: str) -> Path:
    """Return the model directory of a training."""
    seed, _, name = step.partition("_")
    return settings.root / "retrofit" / seed / name / HF if name else settings.pretrained(step)


def _compared(scale: Scale) -> tuple[str, str]:
    """Return the smaller evaluation for policies and variants; most of them lack kernels."""
    return "sweep.widths=[1]", f"task.limit={min(scale.compared_problems, scale.problems)}"


def _evaluate(
    settings: Settings,
    task: str,
    name: str,
    model: Path,
    *more: str,
    needs: str,
    problems: str = "problems",
) -> Step:
    words = [
        *_EVALUATE,
        f"model.path={model}",
        f"task.name={task}",
        f"task.path={_problems(settings, task, problems)}",
        *_budgets(settings.scale, task),
        f"model.device={settings.device}",
        f"model.max_num_seqs={settings.rows}",
        f"run.dir={_results(settings, task, name)}",
        *more,
    ]
    made = (named(problems, task), needs)
    return Step(name=named(f"evaluate_{name}", task), words=lambda: words, needs=made)


def _budgets(scale: Scale, task: str) -> list[str]:
    if not TASKS[task].searches:
        return []
    return [
        f"sweep.lengths=[{','.join(f'{length:g}' for length in scale.lengths)}]",
        f"sweep.widths=[{','.join(map(str, scale.widths))}]",
    ]


def _results(settings: Settings, task: str, name: str) -> Path:
    return settings.root / "eval" / named(name, task)


def _policies(settings: Settings, task: str) -> list[Step]:
    """Evaluate the teacher with policies that have the token budget of the retrofitted model."""
    scale, steps = settings.scale, []
    for cr in scale.budget_ratios:
        needs = named(f"evaluate_seed{settings.seeds[0]}_cr{cr}", task)
        for policy in scale.policies:
            name = f"{policy}_as_cr{cr}"

            def words(name: str = name, policy: str = policy, cr: int = cr) -> list[str]:
                given = _options(scale, task, policy, budget_of(settings, task, cr))
                more = [f"policy={policy}", *(f"policy.{word}" for word in given)]
                more += _compared(scale)
                teacher = settings.teacher
                return _evaluate(settings, task, name, teacher, *more, needs="teacher").words()

            step = named(f"evaluate_{name}", task)
            steps.append(Step(name=step, words=words, needs=(needs,)))
    return steps


def _options(scale: Scale, task: str, policy: str, budget: int) -> list[str]:
    if policy == "window":
        return [f"window={budget - 1}"]
    sinks = [f"sinks={TASKS[task].sinks(scale)}"] if policy == "streaming_llm" else []
    return [f"budget={budget}", *sinks]


def check_policies(scale: Scale) -> None:
    """Refuse policies that take no budget.

    Raises:
        InferenceError: A policy takes no budget; the message names it and its options.
    """
    for policy in scale.policies:
        options = _options(scale, "countdown", policy, budget=scale.context)
        check_policy(policy, parse_options(options))


def budget_of(settings: Settings, task: str, cr: int) -> int:
    """Return the mean peak tokens of a chain of the retrofitted model, rounded up."""
    run = load([_results(settings, task, f"seed{settings.seeds[0]}_cr{cr}")])
    longest = max(run.points(), key=lambda p: (p.budget.length, -p.budget.width))
    return math.ceil(longest.peak_tokens)


def _report(settings: Settings) -> list[str]:
    """Return the report of the teacher, policies, DMS and DMC with the first seed."""
    root, first = settings.root, f"seed{settings.seeds[0]}_"
    others = ["gqa", GREEDY, *(f"{first}{name}_cr" for name in VARIANTS if name != "dmc")]
    evaluated = sorted(path.parent for path in (root / "eval").glob("*/summary.json"))
    runs = [
        path
        for path in evaluated
        if path.name.startswith(first) or not path.name.startswith("seed")
        if not path.name.startswith(tuple(others))
    ]
    output = ["--output", str(root / "report.html"), "--figures", str(root / "figures")]
    return [*_EVALUATE, "report", *map(str, runs), *output]


def lines(root: Path) -> list[str]:
    """Return one line for every measured budget in a folder of a lab."""
    folders = sorted(path.parent for path in (root / "eval").glob("*/summary.json"))
    return [f"{path.name:40} {point}" for path in folders for point in load([path]).points()]
