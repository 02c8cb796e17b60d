"""The sweep of a recipe: its variants, and the numbers that it reads from their runs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from dms_train import limits
from dms_train.cli.config_source import compose, compose_evaluation
from research.recipe import sweep as module
from research.recipe.steps import ORIGINAL, RECIPES
from research.recipe.sweep import VARIANTS, Sweep, overrides, rows, steps, table
from tests.research.stored_runs import SCORED, write_scores


def sweep(root: Path, **changes: object) -> Sweep:
    given = Sweep(
        name="smollm2_135m",
        root=root,
        model=Path("model"),
        plain=Path("books"),
        sampled=Path("answers"),
        held_out=Path("wikitext.txt"),
        haystack=Path("essays.txt"),
        benchmarks=Path("benchmarks"),
        limit=10,
        contexts=(1024, 4096),
        variants=tuple(VARIANTS),
        device="cpu",
    )
    return replace(given, **changes)


def test_every_variant_differs_from_the_base_in_its_settings_only(tmp_path: Path) -> None:
    def config(name: str) -> dict[str, object]:
        return asdict(compose(overrides(sweep(tmp_path), name)))

    def flat(values: object, before: str = "") -> dict[str, object]:
        if not isinstance(values, dict):
            return {before[:-1]: values}
        found: dict[str, object] = {}
        for key, value in values.items():
            found |= flat(value, f"{before}{key}.")
        return found

    base = flat(config("base"))
    assert base["stage.retrofit.target_cr"] == 4
    for name, changes in VARIANTS.items():
        given = flat(config(name))
        differing = {key for key in given if given[key] != base.get(key)} - {"run.dir"}
        differing -= {key for key in differing if key.endswith(".lr") and key != "optim.lr"}
        named = {change.partition("=")[0] for change in changes}
        if name.startswith(("kvzap", "trim-kv", "fastdms")):  # another method has other constants
            differing = {"method" if key.startswith("method.") else key for key in differing}
            named = {"method" if key.startswith("method.") else key for key in named}
        if "offset" in name or name in ("sinks", "trim-kv-cr-8"):
            named.add("run.load")
        if name == "stored-teacher":
            named.add("teacher.logits")
        if "text" in name:
            named = {"data.paths"} | ({"data.weights"} if name == "both-texts" else set())
        assert differing == named, name


@pytest.mark.parametrize("recipe", [name for name, each in RECIPES.items() if each.source])
def test_every_variant_of_a_recipe_can_run(recipe: str, tmp_path: Path) -> None:
    for name in VARIANTS:
        config = compose(overrides(sweep(tmp_path, name=recipe), name))
        assert not list(limits.problems(config)), name


def test_an_export_alone_has_no_training_numbers(tmp_path: Path) -> None:
    name = "kvzap-offset-4"
    chosen = sweep(tmp_path, variants=(name,), contexts=())
    measured = {"perplexity": 20.0, "nats": 3.0, "cr_factor": 4.2}
    (tmp_path / name).mkdir()
    found = {"model": {"window": measured, "continuation": measured}}
    (tmp_path / name / "perplexity.json").write_text(json.dumps(found))
    (tmp_path / "state").mkdir()
    for kind in ("perplexity", "needles"):
        (tmp_path / "state" / f"{kind}_{name}.done").touch()
    (tmp_path / "state" / f"train_{name}.done").write_text(json.dumps(["-m", "dms_train"]))
    (row,) = rows(chosen)
    assert not {"tokens", "kl", "cr"} & row.keys()


def test_every_variant_and_the_original_are_measured(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    for name in (*VARIANTS, ORIGINAL):
        needles = made[f"needles_{name}"]
        assert compose_evaluation(needles.words()[6:]).task.haystack == "essays.txt"
        assert ("train_" + name in needles.needs) == (name != ORIGINAL)
        assert "wikitext.txt" in made[f"perplexity_{name}"].words()


def test_tasks_are_those_of_the_recipe(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    words = made["tasks_trim-kv-cr-8"].words()
    given = dict(pairwise(words))
    assert given["--tasks"].split(",")[:2] == ["hellaswag@10", "arc_easy@25"]
    assert "mmlu@5:10" in given["--tasks"].split(",")  # the limit is below its own
    assert (given["--data"], given["--limit"]) == ("benchmarks", "10")
    assert given["--output"] == f"{tmp_path}/trim-kv-cr-8/tasks"
    assert words[-1] == "--log-samples"  # which paired differences need
    for name in ("tasks", "perplexity"):
        given = dict(pairwise(made[f"{name}_base"].words()))
        assert (given["--device"], given["--cache-bytes"]) == ("cpu", "8000000000")
    assert made["tasks_trim-kv-cr-8"].needs == ("train_trim-kv-cr-8",)
    assert made["train_trim-kv-cr-8"].needs == ("train_trim-kv",)
    without = steps(sweep(tmp_path, benchmarks=None))
    assert not [step for step in without if step.name.startswith("tasks_")]


def test_the_command_line_reaches_the_sweep(tmp_path: Path) -> None:
    words = "smollm2_135m --model . --held-out . --haystack . --plain x --device cpu"
    parser = module._parser()
    chosen = module._sweep(parser.parse_args([*words.split(), "--benchmarks", str(tmp_path)]))
    assert (chosen.benchmarks, chosen.limit) == (tmp_path, 1000)
    assert module._sweep(parser.parse_args([*words.split(), "--limit", "7"])).limit == 7


def test_gates_train_as_long_as_the_base(tmp_path: Path) -> None:
    def steps_of(name: str) -> float:
        stage = compose(overrides(sweep(tmp_path), name)).stage
        annealing = (stage.retrofit.target_cr - 1) * stage.retrofit.steps_per_cr
        return stage.zero_neuron.steps + annealing + stage.hold.steps

    assert steps_of("trim-kv") == steps_of("kvzap") == steps_of("base") == 270


def test_third_parties_constants_have_the_window_of_the_base(tmp_path: Path) -> None:
    base, theirs, last = (
        compose(overrides(sweep(tmp_path), name)).method
        for name in ("base", "fastdms", "last-channel")
    )
    assert theirs.window == base.window == 64
    assert (theirs.channel, theirs.decision_shift, theirs.preset) == (-1, 0, "dms_fastdms")
    assert (last.channel, last.decision_shift, last.preset) == (-1, 1, "dms")


def test_the_gates_at_cr_8_are_those_at_cr_4(tmp_path: Path) -> None:
    four, eight = (set(overrides(sweep(tmp_path), name)) for name in ("trim-kv", "trim-kv-cr-8"))
    changed = {word.partition("=")[0] for word in four ^ eight}
    assert changed == {"run.dir", "run.load", "stage.run"}


def test_a_threshold_exports_the_trained_scorer(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    trained, exported = made["train_kvzap"], made["train_kvzap-offset-3.5"]
    config = compose(exported.words()[2:])
    assert exported.needs == ("train_kvzap",)
    assert config.run.load == str(Path(compose(trained.words()[2:]).run.dir) / "exports/final/hf")
    assert (config.method.alpha_offset, list(config.stage.run)) == (3.5, ["export"])


def test_a_stored_teacher_has_the_samples_of_the_training(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    store, train = made["store_stored-teacher"], made["train_stored-teacher"]
    stored, trained = (compose(step.words()[2:]) for step in (store, train))
    assert train.needs == (store.name,)
    assert trained.teacher.logits == stored.run.dir
    assert list(stored.stage.run) == ["teacher_logits"]
    assert stored.stage.teacher_logits.samples == 270 * trained.data.global_batch_size == 8640


def test_only_some_variants_have_options_of_a_policy(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    for name in (*VARIANTS, ORIGINAL):
        policy = compose_evaluation(made[f"needles_{name}"].words()[6:]).policy
        words = made[f"perplexity_{name}"].words()
        options = [words[at + 1] for at, word in enumerate(words) if word.startswith("--policy")]
        tasks = made[f"tasks_{name}"].words()
        at = tasks.index("--policy") if "--policy" in tasks else len(tasks)
        assert tasks[at : at + 4][1::2] == options
        if name.startswith("trim-kv"):
            ratio = {"trim-kv": 4, "trim-kv-cr-8": 8}[name]
            assert (policy.name, policy.cr) == ("trim_kv", ratio)
            assert options == ["trim_kv", f"cr={ratio}"]
        elif name == "sinks":
            assert (policy.name, policy.options) == ("dms", ("sinks=4",))
            assert options == ["dms", "sinks=4"]
        else:
            # as before the gates, so that older folders continue
            assert (policy.name, policy.cr, options) == ("auto", None, [])


def test_rows_come_from_the_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants, one of which is unfinished; the last evaluation counts."""
    chosen = sweep(tmp_path, variants=("base", "channel-0"), contexts=())
    logged = [
        {"tokens": 200, "eval/kl": 0.5},
        {"tokens": 500, "train/kl": 0.3},
        {"tokens": 500, "eval/kl": 0.25, "eval/cr": 4.5},
    ]
    measured = {"perplexity": 20.0, "nats": 3.0, "cr_factor": 4.2}
    train = tmp_path / "base" / "train"
    train.mkdir(parents=True)
    (train / "metrics.jsonl").write_text("\n".join(map(json.dumps, logged)))
    found = {
        "model": {
            "window": measured,
            "continuation": measured | {"perplexity": 18.0, "cr_factor": 4.1},
        }
    }
    (tmp_path / "base" / "perplexity.json").write_text(json.dumps(found))
    (tmp_path / "state").mkdir()
    for kind in ("perplexity", "needles"):
        (tmp_path / "state" / f"{kind}_base.done").touch()
    words = json.dumps(["-m", "dms_train", "optim.lr=1e-4"])
    (tmp_path / "state" / "train_base.done").write_text(words)
    (row,) = rows(chosen)
    assert row["overrides"] == ["optim.lr=1e-4"]
    assert (row["tokens"], row["kl"], row["cr"]) == (500, 0.25, 4.5)
    assert table({"rows": [row]}).splitlines()[-1] == (
        "| base | 0.0 | 0.2500 | 4.10 | 20.00 | 18.00 |"
    )
    (tmp_path / "state" / "perplexity_base.done").unlink()
    (row,) = rows(chosen)
    assert table({"rows": [row]}).splitlines()[-1] == "| base | 0.0 | 0.2500 |  |  |  |"


def test_scores_are_paired_with_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPES["smollm2_135m"], tasks=SCORED)
    monkeypatch.setitem(RECIPES, "smollm2_135m", recipe)
    chosen = sweep(tmp_path, variants=("trim-kv",), contexts=())
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "train_trim-kv.done").write_text(json.dumps(["-m", "dms_train"]))
    (tmp_path / "trim-kv" / "train").mkdir(parents=True)
    logged = {"tokens": 2_000_000, "eval/kl": 0.5}
    (tmp_path / "trim-kv" / "train" / "metrics.jsonl").write_text(json.dumps(logged))
    write_scores(tmp_path / "trim-kv" / "tasks", right=4)
    (tmp_path / "state" / "tasks_trim-kv.done").touch()
    assert table({"rows": rows(chosen)}).endswith(
        "| trim-kv | 2.0 | 0.5000 |  |  |  | 0.4000 | - |"
    )
    write_scores(tmp_path / ORIGINAL / "tasks", right=5)
    (tmp_path / "state" / f"tasks_{ORIGINAL}.done").touch()
    original, found = rows(chosen)
    assert "difference" not in original["choices"]
    assert found["choices"]["difference"]["value"] == pytest.approx(-0.1)
    assert "| 0.4000 | -0.100 [" in table({"rows": [original, found]}).splitlines()[-1]
    write_scores(tmp_path / "trim-kv" / "tasks", right=4, version="2")
    original, found = rows(chosen)  # other versions do not compare
    assert "| 0.4000 | - |" in table({"rows": [original, found]}).splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "NAME: choose from"),
        ("toy", "--model None"),
        ("toy --model . --held-out . --haystack .", "--plain"),
        ("toy --model . --held-out . --haystack . --plain x --variants mine", "choose from base"),
        (
            "toy --model . --held-out . --haystack . --plain x --variants base,both-texts",
            "--sampled",
        ),
        (
            "toy --model . --held-out . --haystack . --plain x --variants kvzap-offset-4",
            "needs kvzap",
        ),
        ("toy --model . --held-out . --haystack . --plain x --benchmarks .", "toy has no tasks"),
        ("toy --model . --held-out . --haystack . --plain x --benchmarks no", "--benchmarks no:"),
    ],
    ids=[
        "no name",
        "no model",
        "no text",
        "no variant",
        "no sampled text",
        "no scorer",
        "no tasks",
        "no benchmarks",
    ],
)
def test_a_missing_choice_is_named(words: str, told: str, capsys) -> None:
    assert module.main(words.split()) == 2
    assert told in capsys.readouterr().err
