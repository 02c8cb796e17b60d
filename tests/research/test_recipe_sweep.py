"""The sweep of a recipe: its variants, and the numbers that it reads from their runs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dms_train.cli.config_source import compose, compose_evaluation
from research.recipe import sweep as module
from research.recipe.steps import ORIGINAL
from research.recipe.sweep import VARIANTS, Sweep, overrides, rows, steps, table


def sweep(root: Path, **changes: object) -> Sweep:
    given = Sweep(
        name="smollm2_135m",
        root=root,
        model=Path("model"),
        plain=Path("books"),
        sampled=Path("answers"),
        held_out=Path("wikitext.txt"),
        haystack=Path("essays.txt"),
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
        differing = {key for key in given if given[key] != base[key]} - {"run.dir"}
        differing -= {key for key in differing if key.endswith(".lr") and key != "optim.lr"}
        named = {change.partition("=")[0] for change in changes}
        if "text" in name:
            named = {"data.paths"} | ({"data.weights"} if name == "both-texts" else set())
        assert differing == named, name


def test_every_variant_and_the_original_are_measured(tmp_path: Path) -> None:
    made = {step.name: step for step in steps(sweep(tmp_path))}
    for name in (*VARIANTS, ORIGINAL):
        needles = made[f"needles_{name}"]
        assert compose_evaluation(needles.words()[6:]).task.haystack == "essays.txt"
        assert ("train_" + name in needles.needs) == (name != ORIGINAL)
        assert "wikitext.txt" in made[f"perplexity_{name}"].words()


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
    found = {"model": {"window": measured, "continuation": measured | {"perplexity": 18.0}}}
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
        "| base | 0.0 | 0.2500 | 4.20 | 20.00 | 18.00 |"
    )


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
    ],
    ids=["no name", "no model", "no text", "no variant", "no sampled text"],
)
def test_a_missing_choice_is_named(words: str, told: str, capsys) -> None:
    assert module.main(words.split()) == 2
    assert told in capsys.readouterr().err
