"""Chains and seconds of a recipe: the commands, and what the record has of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.cli.config_source import compose_evaluation
from dms_train.inference.policies.registry import parse_options
from research import wall_clock
from research.recipe.chains import chains_text, measured_chains
from research.recipe.evaluations import steps
from research.recipe.measured import measured
from research.recipe.seconds import seconds_margins, seconds_text
from research.recipe.steps import ORIGINAL
from tests.research.recipe_settings import REAL, settings
from tests.research.stored_runs import stored


def test_chains_are_sampled_from_the_original_and_its_exports(tmp_path: Path) -> None:
    for code in (None, "sandbox"):
        made = {
            step.name: step
            for step in steps(settings(tmp_path, "qwen25_coder_0_5b", allow_code=code, limit=7))
            if step.name.startswith("chains")
        }
        tasks = ["gsm8k", "math500", *(["humaneval"] if code else [])]
        names = [f"chains_{task}_{m}" for m in (ORIGINAL, "cr2", "cr4", "cr8") for task in tasks]
        assert list(made) == [*names, "chains_report"]
        assert list(made["chains_report"].needs) == names
    options = compose_evaluation(made["chains_humaneval_cr4"].words()[3:])
    assert options.model.prompt_format == "template"
    assert options.run.allow_code == "sandbox"
    assert options.task.limit == 7
    assert options.run.workers == 4
    assert options.sweep.widths == (1, 2, 4, 8, 16)
    assert not [step for step in steps(settings(tmp_path)) if step.name.startswith("chains")]


@pytest.mark.parametrize("name", REAL)
def test_seconds_are_measured_one_at_a_time_after_all_other_steps(
    name: str, tmp_path: Path, capsys
) -> None:
    files = {"held_out": Path("wikitext.txt"), "haystack": Path("essays.txt")}
    made = steps(settings(tmp_path, name, policies=("h2o",), limit=7, **files))
    timed = [step for step in made if step.name.startswith("seconds")]
    tasks = {"smollm2_135m": ["gsm8k"], "qwen25_coder_0_5b": ["gsm8k", "math500"]}[name]
    models = (ORIGINAL, "cr2", "cr3", "cr4", "cr6", "cr8")
    assert [step.name for step in timed] == [f"seconds_{t}_{m}" for t in tasks for m in models]
    before = [step.name for step in made if step not in timed]
    assert list(timed[0].needs) == before
    for step, earlier in zip(timed[1:], timed, strict=False):
        assert step.needs == (earlier.name,)
    given = timed[3].words()
    assert given[given.index("--models") + 1] == f"cr4={tmp_path}/train/exports/cr4/hf"
    options = compose_evaluation(["model.path=m", *given[given.index("--output") + 2 :]])
    assert options.task.path == str(tmp_path / "benchmarks" / "openai/gsm8k/main/test.jsonl")
    assert (options.task.limit, options.model.cache_bytes) == (7, 256_000_000)
    assert options.model.prompt_format == "template"
    assert (options.model.device, options.model.max_num_seqs) == ("cpu", 512)
    assert (options.sampling.temperature, options.sampling.top_p) == (0.7, 0.95)
    assert options.run.workers == 8
    assert given[given.index("--budgets") + 1] == ("0.5-1,0.5-4,0.5-16,1-1,1-4,1-16,2-1,2-4,2-16")
    assert wall_clock.main(given[3:]) == 2  # its parser takes the words
    assert f"{tmp_path}/train/exports/cr4/hf" in capsys.readouterr().err


def test_seconds_of_programs_need_permission(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "qwen25_coder_0_5b", allow_code="sandbox")
    made = {step.name: step.words() for step in steps(chosen)}
    assert "run.allow_code=sandbox" in made["seconds_humaneval_cr8"]
    assert "task.limit=10" in made["seconds_humaneval_cr8"]
    more = {step.name: step.words() for step in steps(replace(chosen, limit=1000))}
    assert "task.limit=100" in more["seconds_humaneval_cr8"]


SETTINGS = {"task": "gsm8k", "problems": 4, "cache_bytes": 256_000_000, "repeats": 3}


def timed(points: dict[float, list[float]], *, scored: bool = True) -> dict[str, list[dict]]:
    """Budgets of a model: the scores of problems by seconds."""
    budgets = [
        {
            **{"length": 1, "width": width, "accuracy": sum(scores) / len(scores)},
            **{"seconds": seconds, "seconds_least": seconds, "seconds_most": seconds},
            "tokens_s": 1,
        }
        | ({"scores": scores} if scored else {})
        for width, (seconds, scores) in enumerate(points.items(), 1)
    ]
    return {"budgets": budgets}


def test_margins_at_equal_seconds_are_areas_between_frontiers() -> None:
    """From 2 to 4 seconds the original rises from 0.25 to 0.75, and `cr4` from 0.75 to 0.83."""
    original = {1.0: [0, 0, 0, 0], 2.0: [1, 0, 0, 0], 4.0: [1, 1, 1, 0]}
    export = {2.0: [1, 1, 1, 0], 3.0: [1, 1, 0, 0], 8.0: [1, 1, 1, 1]}
    models = {
        ORIGINAL: timed(original),
        "cr4": timed(export),
        "cr8": timed({5.0: [1, 1, 1, 1], 6.0: [1, 1, 1, 1]}),  # no times of the original
        "dmc_cr4": timed(export),  # no export of DMS
    }
    (margin,) = seconds_margins({"settings": SETTINGS, "models": models})
    assert (margin.first, margin.second) == ("cr4", ORIGINAL)
    assert margin.value == pytest.approx(100 * (0.5 + 0.25 * 2 / 6) / 2)
    assert margin.interval is not None
    assert margin.interval[0] < margin.value <= margin.interval[1]
    printed = seconds_text({"gsm8k": {"settings": SETTINGS, "models": models}})
    ends = "[{:+.1f}, {:+.1f}]".format(*margin.interval)
    assert printed.endswith(f"over problems at the median times: cr4 +29.2 {ends}.")


def test_margins_of_older_records_have_no_intervals() -> None:
    original, export = {1.0: [0, 0], 3.0: [1, 0]}, {1.0: [1, 0], 3.0: [1, 0], 4.0: [1, 1]}
    for scored in ({ORIGINAL}, {"cr4"}, set()):
        models = {
            ORIGINAL: timed(original, scored=ORIGINAL in scored),
            "cr4": timed(export, scored="cr4" in scored),
        }
        (margin,) = seconds_margins({"settings": SETTINGS, "models": models})
        assert margin.interval is None
        printed = seconds_text({"gsm8k": {"settings": SETTINGS, "models": models}})
        assert printed.endswith(f"frontiers, linear in seconds: cr4 {margin.value:+.1f}.")
    alone = {"settings": SETTINGS, "models": {"cr4": models["cr4"]}}
    assert seconds_margins(alone) == []
    assert "frontiers" not in seconds_text({"gsm8k": alone})


def test_the_record_has_the_seconds_that_are_measured(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "qwen25_coder_0_5b")
    metrics = tmp_path / "train" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "tokens": 1, "train/tokens_per_second": 1.0}\n')
    for task, name in (("gsm8k", ORIGINAL), ("gsm8k", "cr4"), ("humaneval", "cr8")):
        path = tmp_path / "seconds" / task / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        given = {"settings": {"task": task}, "models": {name: {"budgets": [name]}}}
        path.write_text(json.dumps(given))
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state" / f"seconds_{task}_{name}.done").touch()
    (tmp_path / "seconds" / "gsm8k" / "cr8.json").write_text('{"settings": ')  # not finished
    assert measured(chosen)["seconds"] == {
        "gsm8k": {
            "settings": {"task": "gsm8k"},
            "models": {ORIGINAL: {"budgets": [ORIGINAL]}, "cr4": {"budgets": ["cr4"]}},
        },
        "humaneval": {"settings": {"task": "humaneval"}, "models": {"cr8": {"budgets": ["cr8"]}}},
    }


def test_chains_are_sampled_with_policies_at_the_longest_length(tmp_path: Path) -> None:
    given = {"policies": ("tova:prefill=dense",), "ratios": (4,), "allow_code": "sandbox"}
    made = {s.name: s for s in steps(settings(tmp_path, "qwen25_coder_0_5b", **given))}
    names = [f"chains_{task}_tova_prefill_dense_cr4" for task in ("gsm8k", "math500", "humaneval")]
    assert set(names) < set(made["chains_report"].needs)
    of_policy, of_export = (
        compose_evaluation(made[name].words()[3:]) for name in (names[0], "chains_gsm8k_cr4")
    )
    assert of_policy.sweep.lengths == (2,)
    assert of_policy.sweep.widths == of_export.sweep.widths
    assert of_export.sweep.lengths == (0.5, 1, 2)
    assert (of_policy.policy.name, of_policy.policy.cr) == ("tova", 4)
    assert parse_options(of_policy.policy.options) == {"prefill": "dense"}
    assert of_policy.model.path == "models/qwen25-coder-0.5b-instruct"
    assert of_export.policy.name == "auto"


def test_the_report_has_the_chains_that_have_finished(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "qwen25_coder_0_5b")
    right = {document: [(100 * document, document < 3)] for document in range(1, 5)}
    for name in (ORIGINAL, "cr4", "cr8"):
        folder = tmp_path / "chains" / "gsm8k" / name
        stored(folder, right, task="gsm8k")
        if name != "cr8":
            (folder / "summary.json").write_text("{}")
    found = measured_chains(chosen)
    assert {point["model"] for point in found["points"]} == {ORIGINAL, "cr4"}
    assert {point["accuracy"]["value"] for point in found["points"]} == {0.5}
    assert found["margins"] == []  # of one method
    assert "| gsm8k | cr4 | 1 | 50.0 [" in chains_text(json.loads(json.dumps(found)))
    chosen = settings(tmp_path, "qwen25_coder_0_5b", policies=("h2o",))
    folder = tmp_path / "chains" / "gsm8k" / "h2o_cr8"
    stored(folder, right, task="gsm8k", method="h2o")
    (folder / "summary.json").write_text("{}")
    found = measured_chains(chosen)
    assert {point["model"] for point in found["points"]} == {ORIGINAL, "cr4", "h2o_cr8"}
    assert found["margins"] == []  # policies have points only
