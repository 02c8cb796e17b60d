"""The steps of the lab: their commands compose, in an order in which each finds what it needs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.checkpoints_tools import pool_kv_heads
from dms_train.cli.config_source import compose, compose_evaluation
from dms_train.data.index_file import read_index
from dms_train.data.packing import pack
from dms_train.export.kv_pooling import with_kv_heads
from dms_train.method.dmc.spec import DMCOptions
from dms_train.method.dms.spec import DMSOptions
from dms_train.planning.check import check
from dms_train.training.stages import Stage, build_stages
from research.data import command as data
from research.folders import CONFIG_DIR
from research.lab import run as lab
from research.lab.scales import SCALES, VARIANTS
from research.lab.step import Step, as_text
from research.lab.steps import Settings, long_steps, steps
from research.lab.tasks import TASKS

HF = Path("exports") / "final" / "hf"


def words(folder: Path, *more: str) -> list[str]:
    return ["toy", "--folder", str(folder), "--device", "cpu", "--workers", "1", *more]


def test_every_scale_names_policies_that_take_a_budget() -> None:
    for scale in SCALES.values():
        lab.check_policies(scale)


def before_evaluations(settings: Settings) -> list[Step]:
    """Steps whose command needs no result."""
    found = steps(settings)
    return [s for s in found if not any(need.startswith("evaluate_") for need in s.needs)]


def test_marks_store_what_changes_the_results(tmp_path: Path) -> None:
    settings = lab._settings(lab._parser().parse_args(words(tmp_path)))

    def stored(changed: Settings) -> list[str]:
        return [as_text(step.words()) for step in before_evaluations(changed)]

    assert stored(settings) == stored(replace(settings, rows=3, workers=9, gpus=2))
    assert stored(settings) != stored(replace(settings, device="cuda"))


@pytest.mark.parametrize(
    ("scale", "tasks"),
    [
        ("s", ("countdown", "lab_niah")),
        ("m", ("arithmetic",)),
        ("l", ("lab_variable_tracking",)),
        ("recall", SCALES["recall"].tasks),
    ],
)
def test_the_commands_of_every_scale_compose(
    scale: str, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    settings = Settings(
        scale=SCALES[scale],
        root=tmp_path,
        tasks=tasks,
        seeds=(1, 2),
        also=tuple(name for name in VARIANTS if name not in SCALES[scale].methods),
        device="cpu",
        gpus=2,
        rows=64,
        workers=1,
    )
    found = before_evaluations(settings)
    seeds = 2 * len(SCALES[scale].methods) * len(SCALES[scale].retrofits)
    trained = 2 + seeds + len(settings.also)  # 2: the teacher and gqa
    searches = sum(TASKS[task].searches for task in tasks)  # a greedy evaluation each
    # 3 of data, and 1 of shorter samples; 1: the means of KV heads
    count = (4 + trained) * len(tasks) + searches + trained + 1
    assert len({step.name for step in found}) == len(found) == count
    known: set[str] = set()
    for step in found:  # every step stands behind those that it needs
        assert known.issuperset(step.needs)
        known.add(step.name)
    teacher = None
    prefixes = []
    for step in found[: 4 * len(tasks)]:
        given = data._parser().parse_args(step.words()[3:])
        if step.name.startswith("data"):
            prefixes.append(str(given.out / "train"))
            context = SCALES[scale].context // (1 + step.name.startswith("data_half_context"))
            filled = None if SCALES[scale].packing else context
            assert given.document_tokens == filled
    for step in found[4 * len(tasks) :]:
        words = step.words()
        if words[:2] == ["-m", "dms_train"]:
            config = compose(words[3:], CONFIG_DIR)
            teacher = teacher or config.model.architecture
            check(config, world_size=step.ranks, architecture=teacher)
            shorter = 1 + ("half_context" in step.name)
            assert SCALES[scale].context == config.data.seq_length * shorter
            assert set(config.data.paths) <= set(prefixes)
            assert len(config.data.paths) == len(tasks)
        elif step.name != "gqa_means":
            compose_evaluation(words[3:])


@pytest.mark.parametrize("scale", ["s", "m", "l"])
def test_shorter_samples_have_as_many_tokens_in_a_step(scale: str, tmp_path: Path) -> None:
    given = [scale, *words(tmp_path)[1:], "--also", "half_context,steps_half"]
    made = {s.name: s for s in steps(lab._settings(lab._parser().parse_args(given)))}
    first = SCALES[scale].retrofits[0].cr
    half, same = (
        compose(made[f"seed1234_{name}_cr{first}"].words()[3:], CONFIG_DIR).data
        for name in ("half_context", "steps_half")
    )
    assert 2 * half.seq_length == same.seq_length
    assert half.global_batch_size * half.seq_length == same.global_batch_size * same.seq_length
    assert half.micro_batch_size * half.seq_length == same.micro_batch_size * same.seq_length
    assert half.paths == (f"{tmp_path}/data_half_context/train",)
    documents = [
        data._parser().parse_args(made[name].words()[3:])
        for name in ("data_half_context", "data_long")
    ]
    assert documents[0].documents == 2 * documents[1].documents
    evaluated = (f"evaluate_seed1234_{name}_cr{first}" for name in ("half_context", "steps_half"))
    lengths = [compose_evaluation(made[name].words()[3:]).sweep.lengths for name in evaluated]
    assert lengths[0] == lengths[1] == SCALES[scale].lengths


@pytest.mark.parametrize(("scale", "gpus"), [("s", 0), ("s", 1), ("s", 2), ("recall", 1)])
def test_a_teacher_can_be_trained_on_these_gpus(scale: str, gpus: int, tmp_path) -> None:
    settings = lab._settings(lab._parser().parse_args([scale, *words(tmp_path)[1:]]))
    teacher = next(s for s in steps(replace(settings, gpus=gpus)) if s.name == "teacher")
    config = compose(teacher.words()[3:], CONFIG_DIR)
    check(config, world_size=teacher.ranks, architecture=config.model.architecture)


@pytest.mark.parametrize(("scale", "heads"), [("s", 1), ("m", 1), ("l", 2), ("toy", 1)])
def test_gqa_trains_and_retrofits_the_means_of_kv_heads(scale: str, heads: int, tmp_path) -> None:
    given = [scale, *words(tmp_path, "--also", "gqa,dmc")[1:]]
    made = {step.name: step for step in steps(lab._settings(lab._parser().parse_args(given)))}
    architecture = compose(made["teacher"].words()[3:], CONFIG_DIR).model.architecture
    pooled = pool_kv_heads._parse(made["gqa_means"].words()[2:])
    assert pooled.model == str(tmp_path / "teacher" / HF)
    assert with_kv_heads(architecture, pooled.kv_heads).num_query_groups == heads
    trained = compose(made["gqa"].words()[3:], CONFIG_DIR)
    assert (trained.model.path, trained.model.architecture) == (str(pooled.out), None)
    assert trained.stage.run == ("pretrain", "export")
    assert trained.stage.pretrain.steps > trained.optim.lr_warmup_steps
    assert trained.stage.pretrain.min_lr_ratio == 0
    first = f"seed1234_{{}}_cr{SCALES[scale].retrofits[0].cr}"
    for name, base in (("gqa", trained.run.dir), ("dmc", tmp_path / "teacher")):
        step = made[first.format(name)]
        assert compose(step.words()[3:], CONFIG_DIR).model.path == str(Path(base) / HF)
        assert Path(base).name in step.needs
    evaluated = compose_evaluation(made["evaluate_gqa"].words()[3:])
    assert evaluated.model.path == str(Path(trained.run.dir) / HF)
    assert evaluated.sweep.widths == (1,)


@pytest.mark.parametrize("scale", ["m", "l"])
def test_only_the_teacher_of_five_numbers_learns_shorter_searches(scale, tmp_path: Path) -> None:
    settings = lab._settings(lab._parser().parse_args([scale, "--folder", str(tmp_path)]))
    named = {step.name: step.words() for step in before_evaluations(settings)}

    def numbers(step: str) -> str:  # the last one counts
        found = named[step]
        return found[len(found) - found[::-1].index("--numbers")]

    assert numbers("data_long") == numbers("problems") == "5"
    assert set(numbers("data").split(",")) == {"3", "4", "5"}


def test_both_methods_are_annealed_from_ratio_to_ratio(tmp_path: Path) -> None:
    settings = lab._settings(lab._parser().parse_args(["recall", *words(tmp_path)[1:]]))
    assert settings.tasks == SCALES["recall"].tasks
    made = {step.name: step for step in steps(settings)}
    for prefix, method in (("", DMSOptions), ("dmc_", DMCOptions)):
        before = None
        for cr in (2, 3, 4):
            config = compose(made[f"seed1234_{prefix}cr{cr}"].words()[3:], CONFIG_DIR)
            assert (type(config.method), config.stage.retrofit.target_cr) == (method, cr)
            assert config.run.load == before
            before = config.run.dir
    policies = {name for name in made if "_as_cr" in name}
    assert len(policies) == 3 * 3 * 3  # policies, ratios, tasks


def test_documents_that_fill_no_sample_are_not_asked_to(tmp_path: Path) -> None:
    given = ["s", *words(tmp_path)[1:], "--tasks", "lab_niah,lab_linear_1d"]
    found = steps(lab._settings(lab._parser().parse_args(given)))
    made = {step.name: step.words() for step in found if step.name.startswith("data_long")}
    assert "--long-share" in made["data_long_lab_niah"]
    assert "--long-share" not in made["data_long_lab_linear_1d"]
    seeds = [words[words.index("--seed") + 1] for words in made.values()]
    assert seeds == ["1", "1"]


def test_documents_are_kept_apart_in_all_trainings_or_fill_their_samples(tmp_path: Path) -> None:
    for scale in ("s", "recall"):
        settings = lab._settings(lab._parser().parse_args([scale, *words(tmp_path)[1:]]))
        packing = SCALES[scale].packing
        assert packing == (scale == "recall")
        every = [*before_evaluations(settings), *long_steps(settings)]
        made = {step.name: step.words() for step in every}
        trained = [
            compose(each[3:], CONFIG_DIR)
            for each in made.values()
            if each[:2] == ["-m", "dms_train"]
        ]
        assert len(trained) > len(SCALES[scale].retrofits)
        assert all(config.data.packing == packing for config in trained)
        for name in (name for name in made if name.startswith("data")):
            given = data._parser().parse_args(made[name][3:])
            assert (given.document_tokens is None) == packing
            assert not packing or given.long_share == 0


@pytest.mark.parametrize("scale", ["s", "m", "l", "recall", "toy"])
def test_long_steps_train_longer_and_retrofit_at_the_context_of_the_teacher(scale, tmp_path):
    settings = lab._settings(lab._parser().parse_args([scale, *words(tmp_path)[1:]]))
    found, sizes, own = long_steps(settings), SCALES[scale], tmp_path / "long"
    made = {step.name: step for step in found}
    assert len(made) == len(found)
    known: set[str] = set()
    for step in found:
        assert known.issuperset(step.needs)
        known.add(step.name)
    first = compose(next(s for s in steps(settings) if s.name == "teacher").words()[3:], CONFIG_DIR)
    trained = compose(made["teacher"].words()[3:], CONFIG_DIR)
    assert trained.model.path == str(settings.teacher)
    assert trained.data.seq_length == 4 * first.data.seq_length == 4 * sizes.context
    tokens = [c.data.seq_length * c.data.global_batch_size for c in (first, trained)]
    assert tokens[0] == tokens[1]
    longer = trained.model.with_context(first.model.architecture)
    assert longer.max_position_embeddings > trained.data.seq_length
    check(trained, world_size=1, architecture=longer)
    for path in trained.data.paths:
        given = data._parser().parse_args(made[Path(path).parent.name].words()[3:])
        assert (str(given.out / "train"), given.context) == (path, 4 * sizes.context)
        assert given.document_tokens == (None if sizes.packing else 4 * sizes.context)
    for cr in sizes.long_ratios:
        config = compose(made[f"seed1234_cr{cr}"].words()[3:], CONFIG_DIR)
        assert config.model.path == str(Path(trained.run.dir) / HF)
        assert config.data.seq_length == sizes.context
        check(config, world_size=1, architecture=longer)
    contexts = {sizes.context * times for times in (1, 2, 4)}
    models = {str(own / "teacher" / HF)} | {
        str(own / "retrofit" / "seed1234" / f"cr{cr}" / HF) for cr in sizes.long_ratios
    }
    seen = set()
    for name in (name for name in made if name.startswith("evaluate")):
        config = compose_evaluation(made[name].words()[3:])
        problems = next(made[need] for need in made[name].needs if need.startswith("problems"))
        assert problems.words()[3] == f"{config.task.name.replace('_', '-')}-problems"
        given = data._parser().parse_args(problems.words()[3:])
        assert str(given.out) == config.task.path
        seen.add((config.task.name, given.context, config.model.path))
    assert seen == set(itertools.product(("lab_niah", "lab_variable_tracking"), contexts, models))


# mean tokens of 20,000 documents of each task and context, without the last of each
PACKED = {
    ("lab_niah", 2048): 511,
    ("lab_variable_tracking", 2048): 454,
    ("lab_linear_1d", 2048): 198,
    ("lab_niah", 8192): 1237,
    ("lab_variable_tracking", 8192): 1170,
}


@pytest.mark.parametrize("scale", ["s", "m", "l", "recall"])
def test_no_training_takes_a_document_twice(scale: str, tmp_path: Path) -> None:
    settings = lab._settings(lab._parser().parse_args([scale, *words(tmp_path)[1:]]))
    for found in (before_evaluations(settings), long_steps(settings)):
        made = {step.name: step.words() for step in found}
        trained = [
            compose(each[3:], CONFIG_DIR)
            for each in made.values()
            if each[:2] == ["-m", "dms_train"]
        ]
        assert len(trained) > 2
        for config in trained:
            before = 1.0
            if config.run.load is not None:
                before = float(config.run.load.rpartition("cr")[2])
            stages = build_stages(config.stage, 0, before)
            steps_taken = sum(stage.steps for stage in stages if isinstance(stage, Stage))
            share = 1 / len(config.data.paths)  # the weights are equal
            taken = steps_taken * config.data.global_batch_size * share * config.data.seq_length
            for path in config.data.paths:
                name = Path(path).parent.name
                given = data._parser().parse_args(made[name][3:])
                tokens = given.document_tokens
                if tokens is None:
                    task = name.removeprefix("data_").removeprefix("long_")
                    tokens = PACKED[task, config.data.seq_length]
                assert 0.98 * given.documents * tokens >= taken


def test_the_documents_of_packed_samples_fill_them_and_few_are_left(tmp_path: Path) -> None:
    """Packed as a training packs them, they make as many samples as the scale asks for."""
    given = ["recall", *words(tmp_path)[1:]]
    settings = lab._settings(lab._parser().parse_args(given))
    wanted = 600
    settings = replace(settings, scale=replace(settings.scale, samples=wanted))
    made = {step.name: step.words() for step in before_evaluations(settings)}
    for task in SCALES["recall"].tasks:
        assert data.main(made[f"data_{task}"][3:]) == 0
        positions = read_index(str(tmp_path / f"data_{task}" / "train")).lengths - 1
        count = len(pack(positions, 2048, seed=1, count=1))  # of one epoch
        assert wanted / 3 <= count <= 1.2 * wanted / 3


def test_the_report_has_one_line_for_a_method(tmp_path: Path) -> None:
    settings = lab._settings(lab._parser().parse_args(words(tmp_path)))
    shown = ["teacher", "seed1234_cr4", "seed1234_dmc_cr4", "teacher_lab_niah", "tova_as_cr4"]
    others = ["gqa", "gqa_lab_niah", "seed1234_gqa_cr4", "seed1234_window_4_cr4_lab_niah"]
    others += ["seed1234_dmc_4x_cr4", "seed7_cr4", "seed12345_cr4", "teacher_greedy"]
    for name in (*shown, *others):
        (tmp_path / "eval" / name).mkdir(parents=True)
        (tmp_path / "eval" / name / "summary.json").touch()
    report = next(step for step in steps(settings) if step.name == "report").words()
    folders = {Path(word).name for word in report if word.startswith(str(tmp_path / "eval"))}
    assert folders == set(shown)


def test_a_mixture_has_as_many_samples_as_one_task(tmp_path: Path) -> None:
    """Samples of a task are in the ratio of its weight, on the disk and in the training."""
    given = words(tmp_path, "--tasks", "arithmetic,lab_niah,countdown")
    settings = replace(lab._settings(lab._parser().parse_args(given)), scale=SCALES["s"])
    made = {step.name: step for step in steps(settings)}
    names = ["data_arithmetic", "data_lab_niah", "data"]
    options = [data._parser().parse_args(made[name].words()[3:]) for name in names]
    teacher = compose(made["teacher"].words()[3:], CONFIG_DIR)
    assert teacher.data.paths == tuple(str(each.out / "train") for each in options)
    assert teacher.data.weights == (3, 2, 4)
    counts = [each.documents for each in options]
    assert sum(counts) == pytest.approx(SCALES["s"].samples, abs=3)
    for count, weight in zip(counts, teacher.data.weights, strict=True):
        assert count == pytest.approx(SCALES["s"].samples * weight / 9, abs=1)
    assert teacher.model.tokenizer == f"{tmp_path}/data_arithmetic/tokenizer"
