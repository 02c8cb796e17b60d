"""A recipe of a real model at toy size on a CPU, and the commands of the others."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.cli.config_source import compose, compose_evaluation
from dms_train.evaluation.harness.comparison import published_scores
from dms_train.hf.formats import read_target_cr
from dms_train.inference.errors import InferenceError
from research.lab.run import UNFINISHED
from research.lab.step import as_text
from research.recipe import run as recipe
from research.recipe.evaluations import steps
from research.recipe.steps import ORIGINAL, RECIPES, Task, check_policies, exports
from tests.research.recipe_settings import REAL, settings, words
from tests.support import hub_model

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.slow
def test_a_killed_recipe_continues_and_ends_with_a_report(tmp_path: Path, capsys) -> None:
    """Killed in the branch at CR 2: two zeroing steps, three to CR 2, and one of the branch."""
    assert recipe.main(words(tmp_path, "--minutes", "0")) == UNFINISHED
    process = subprocess.Popen([sys.executable, "-m", "research", "recipe", *words(tmp_path)])
    while not (tmp_path / "train/checkpoints/step_00000006").is_dir():
        assert process.poll() is None, "the recipe ended early"
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert recipe.main(words(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sampled: started" not in lines
    assert "resuming from" in (tmp_path / "logs" / "train.log").read_text()
    report = (tmp_path / "report.md").read_text()
    for name, folder in (("cr2", "cr2"), ("cr3", "final")):
        export = tmp_path / "train" / "exports" / folder / "hf"
        assert read_target_cr(export) == float(name[2:])
        numbers = json.loads((tmp_path / "validation" / name / "metrics.json").read_text())
        assert f"| {name} | {numbers['cr_factor']:.4g} |" in report
        assert f"{numbers['kl_nats_per_token']:.4g}" in (export / "README.md").read_text()
    assert recipe.main(words(tmp_path)) == 0
    assert ": started" not in capsys.readouterr().out


@pytest.mark.parametrize("name", REAL)
def test_every_listed_ratio_has_an_export_and_every_model_every_task(
    name: str, tmp_path: Path
) -> None:
    chosen = settings(tmp_path, name)
    ratios = ["cr2", "cr3", "cr4", "cr6", "cr8"]
    assert list(exports(chosen)) == ratios
    assert exports(chosen)["cr8"] == tmp_path / "train" / "exports" / "final" / "hf"
    made = {step.name: step.words() for step in steps(chosen)}
    tasks = "hellaswag@10,arc_easy@25,arc_challenge@25,piqa@20,winogrande@5,openbookqa@5"
    tasks += ",lambada_openai@0,lambada_openai@10,mmlu@5:10"  # settings.limit is below 20
    tasks += ",gsm8k@5,gsm8k_cot"
    for model in (ORIGINAL, *ratios):
        given = made[f"evaluate_{model}"]
        assert "--log-samples" in given
        assert given[given.index("--tasks") + 1] == tasks
        if name == "smollm2_135m":
            assert given[given.index("--published") + 1] in published_scores()
    assert made["fetch"][-2:] == [chosen.recipe.source, "--download"]


def test_perplexity_and_needles_are_measured_on_own_text(tmp_path: Path) -> None:
    files = {"held_out": Path("wikitext.txt"), "haystack": Path("essays.txt")}
    made = {step.name: step.words() for step in steps(settings(tmp_path, **files))}
    for name in (ORIGINAL, "cr2", "cr8"):
        words = made[f"perplexity_{name}"]
        assert words[words.index("--text") + 1] == "wikitext.txt"
        words = made[f"needles_{name}"]
        assert words[2:6] == [
            *("recipe-needles", str(tmp_path / "needles" / name)),
            *("--contexts", "1024,2048,4096,8192"),
        ]
        assert compose_evaluation(words[6:]).task.haystack == "essays.txt"
    plain = [step.name for step in steps(settings(tmp_path))]
    assert not [name for name in plain if name.startswith(("perplexity", "needles"))]


def test_a_recipe_without_programs_refuses_to_run_them(tmp_path: Path, capsys) -> None:
    assert recipe.main(words(tmp_path, "--allow-code", "sandbox")) == 2
    assert "--allow-code: toy runs no programs; leave it out" in capsys.readouterr().err


def test_policies_run_on_the_original_at_every_ratio(tmp_path: Path, capsys) -> None:
    files = {"held_out": Path("wikitext.txt"), "haystack": Path("essays.txt")}
    chosen = settings(tmp_path, policies=("h2o", "tova:prefill=dense"), **files)
    made = {step.name: step.words() for step in steps(chosen)}
    names = ["h2o_cr4", "h2o_cr8", "tova_prefill_dense_cr4", "tova_prefill_dense_cr8"]
    for kind in ("evaluate", "perplexity", "needles"):
        assert [name for name in made if name.startswith(kind)][-4:] == [
            f"{kind}_{name}" for name in names
        ]
    given = made["evaluate_tova_prefill_dense_cr4"]
    assert str(chosen.original) in given
    start = given.index("--policy")
    assert given[start : start + 6] == [
        *("--policy", "tova", "--policy-option", "cr=4", "--policy-option", "prefill=dense")
    ]
    options = compose_evaluation(made["needles_h2o_cr8"][6:])
    assert (options.policy.name, options.policy.cr) == ("h2o", 8)
    for policy, fact in (("window", "cr"), ("h2o:sinks=2", "sinks"), ("quset", "quset")):
        assert recipe.main(words(tmp_path / "out", "--policies", policy)) == 2
        assert fact in capsys.readouterr().err


def test_dmc_trains_after_dms_on_the_same_data_with_the_same_steps(tmp_path: Path) -> None:
    chosen = settings(tmp_path, dmc=True)
    made = {step.name: step for step in steps(chosen)}
    dms, dmc = (compose(made[name].words()[2:]) for name in ("train", "train_dmc"))
    assert made["train_dmc"].needs == ("train",)
    assert set(made["evaluate_original"].needs) == {"train", "train_dmc"}
    assert (dms.method.kind, dmc.method.kind) == ("dms", "dmc")
    assert dmc.method.window == 0
    assert dmc.data == dms.data
    assert dmc.stage.zero_neuron == dms.stage.zero_neuron
    assert dmc.stage.retrofit == dms.stage.retrofit
    assert dmc.run.dir == str(tmp_path / "train_dmc")
    assert list(exports(chosen))[-2:] == ["dmc_cr4", "dmc_cr8"]
    assert exports(chosen)["dmc_cr4"] == tmp_path / "train_dmc" / "exports" / "cr4" / "hf"
    assert exports(chosen)["dmc_cr8"] == tmp_path / "train_dmc" / "exports" / "final" / "hf"
    assert {"validate_dmc_cr4", "evaluate_dmc_cr8"} <= made.keys()


def test_the_control_trains_as_long_without_eviction(tmp_path: Path) -> None:
    chosen = settings(tmp_path, control=True)
    made = {step.name: step for step in steps(chosen)}
    dms, control = (compose(made[name].words()[2:]) for name in ("train", "train_control"))
    assert dms.stage.zero_neuron.steps + 7 * 100 == control.stage.zero_neuron.steps
    assert dms.stage.retrofit.target_cr == 8
    assert (control.stage.retrofit.target_cr, control.stage.hold.branch_ratios) == (1, None)
    assert control.stage.hold.steps == dms.stage.hold.steps
    assert (control.data, control.optim) == (dms.data, dms.optim)
    assert exports(chosen)["control"] == tmp_path / "train_control" / "exports" / "final" / "hf"
    assert {"validate_control", "evaluate_control"} <= made.keys()


def test_training_runs_alone_and_evaluations_share_the_gpu(tmp_path: Path) -> None:
    files = {"held_out": Path("wikitext.txt"), "haystack": Path("essays.txt")}
    alone, shared = (steps(settings(tmp_path, cache_bytes=b, **files)) for b in (None, 10**9))
    order = [step.name for step in shared]
    before = {"fetch", "prompts", "sampled", "code", "text", "benchmarks", "train"}
    for one, other in zip(alone, shared, strict=True):
        if one.name in before or one.name.startswith("seconds"):
            assert one.words() == other.words()
            continue
        assert "train" in other.needs
        assert [word for word in other.words() if word.endswith("cache-bytes=1000000000")] or (
            "model.cache_bytes=1000000000" in other.words()
        )
        assert as_text(one.words()) == as_text(other.words()), "the marks stay valid"
    train = next(step for step in shared if step.name == "train")
    assert set(train.needs) == before - {"train"}
    assert before <= set(order)


def test_own_files_replace_the_downloads(tmp_path: Path) -> None:
    chosen = settings(
        tmp_path,
        model=Path("model"),
        prompts=Path("gsm8k.jsonl"),
        column="question",
        text=(Path("a.txt"), Path("b.txt")),
        benchmarks=Path("benchmarks"),
    )
    made = {step.name: step.words() for step in steps(chosen)}
    assert not {"fetch", "prompts", "benchmarks"} & made.keys()
    sampled = made["sampled"]
    assert sampled[sampled.index("generate") + 1 :][:3] == ["gsm8k.jsonl", "--column", "question"]
    assert sampled[sampled.index("--model") + 1] == "model"
    assert made["text"][3:5] == ["a.txt", "b.txt"]
    data = compose(made["train"][2:]).data
    assert data.paths == (f"{tmp_path}/data/sampled", f"{tmp_path}/data/text")
    assert data.weights == (0.5, 0.5)
    evaluated = made[f"evaluate_{ORIGINAL}"]
    assert evaluated[evaluated.index("--data") + 1] == "benchmarks"


@pytest.mark.parametrize("name", REAL)
def test_a_model_that_solves_problems_in_chains_is_asked_some(name: str, tmp_path: Path) -> None:
    made = {step.name: step.words() for step in steps(settings(tmp_path, name))}
    recipe, words = RECIPES[name], made["prompts"]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    asked = {"--word-problems": str(recipe.word_problems)} if recipe.chains else {}
    assert given == {"--count": str(recipe.prompts)} | asked
    assert bool(recipe.word_problems) == recipe.chains


@pytest.mark.parametrize("name", REAL)
def test_no_problem_of_a_task_with_chains_is_a_prompt(name: str, tmp_path: Path) -> None:
    made = {step.name: step for step in steps(settings(tmp_path, name))}
    words = made["sampled"].words()
    given = [words[n + 1] for n, word in enumerate(words) if word == "--evaluation-set"]
    tests = ("gsm8k/main", "MATH-500/default", "openai_humaneval")
    assert [file.removesuffix("/test.jsonl") for file in given] == [
        f"{tmp_path}/benchmarks/{owner}/{test}"
        for owner, test in zip(("openai", "HuggingFaceH4", "openai"), tests, strict=True)
    ]
    assert "benchmarks" in made["sampled"].needs


def test_benchmarks_without_problems_are_refused(tmp_path: Path, capsys) -> None:
    given = ["smollm2_135m", "--folder", str(tmp_path / "out"), "--device", "cpu"]
    assert recipe.main([*given, "--benchmarks", str(tmp_path)]) == 2
    line = f"--benchmarks {tmp_path}: no openai/gsm8k/main/test.jsonl; `dms-eval data` writes it"
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "share"), [("smollm2_135m", 0.5), ("qwen25_coder_0_5b", 0.75)])
def test_real_models_are_trained_on_code(name: str, share: float, tmp_path: Path) -> None:
    """Unless the user names text; the embedded model has none."""
    chosen = settings(tmp_path, name)
    made = {step.name: step for step in steps(chosen)}
    assert made["code"].words()[1:] == ["research", "recipe-code", f"{tmp_path}/data/code.jsonl"]
    text = made["text"].words()
    assert text[3:8] == [
        *(f"{tmp_path}/data/code.jsonl", "--source"),
        *(f"Python {platform.python_version()}'s standard library", "--license", "PSF-2.0"),
    ]
    assert set(made["text"].needs) == {"fetch", "code"}
    data = compose(made["train"].words()[2:]).data
    assert data.paths == (f"{tmp_path}/data/sampled", f"{tmp_path}/data/text")
    assert data.weights == (share, 1 - share)
    own = {step.name: step for step in steps(replace(chosen, text=(Path("a.txt"),)))}
    assert "code" not in own
    assert own["text"].words()[3:5] == ["a.txt", "--append-eod"]
    assert not {"code", "text"} & {step.name for step in steps(settings(tmp_path, "toy"))}


def test_the_trainings_are_those_of_the_first_trial(tmp_path: Path) -> None:
    """Batch, rates and steps are those of both models; the learning rate differs."""
    for name, rate in zip(REAL, (2e-4, 5e-5), strict=True):
        made = {step.name: step.words() for step in steps(settings(tmp_path, name))}
        config = compose(made["train"][2:])
        stage = config.stage
        assert config.method.window == 64
        assert config.data.seq_length * config.data.global_batch_size == 65536
        assert (config.optim.lr, config.optim.lr_warmup_steps) == (rate, 10)
        assert (stage.zero_neuron.steps, stage.retrofit.steps_per_cr) == (60, 100)
        assert stage.hold.min_lr_ratio == 0
        assert config.run.dir == str(tmp_path / "train")


def test_a_missing_file_is_named_before_anything_starts(tmp_path: Path, capsys) -> None:
    assert recipe.main(words(tmp_path / "out", "--prompts", str(tmp_path / "none.jsonl"))) == 2
    assert "none.jsonl: no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def own_model(folder: Path) -> list[str]:
    """Write a small model that can read any text, prompts, questions and a haystack for it."""
    hub_model.write_model(folder / "hub")
    config = json.loads((folder / "hub" / "config.json").read_text())
    (folder / "hub" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 2048})
    )
    texts = hub_model.texts(300, 5)
    prompts = [json.dumps({"prompt": text[:60]}) for text in texts[:12]]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (folder / "essays.txt").write_text("\n".join(texts))
    questions = folder / "benchmarks" / "allenai" / "ai2_arc" / "ARC-Easy"
    questions.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        lines = [json.dumps(question(number, text)) for number, text in enumerate(texts[:6])]
        (questions / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    given = [("model", "hub"), ("prompts", "prompts.jsonl"), ("haystack", "essays.txt")]
    given.append(("benchmarks", "benchmarks"))
    return [word for name, file in given for word in (f"--{name}", str(folder / file))]


def question(number: int, text: str) -> dict[str, object]:
    choices = {"text": ["river", "stone", "bird", "old"], "label": list("ABCD")}
    key = "ABCD"[number % 4]
    return {"id": str(number), "question": text[:40], "choices": choices, "answerKey": key}


@pytest.mark.slow
def test_policies_and_dmc_are_rows_of_the_report(tmp_path: Path, monkeypatch) -> None:
    """Numbers of the report are recomputed from samples and from records of the training."""
    tasks = (Task(name="arc_easy", shots=0, limit=3), Task(name="arc_easy", shots=2))
    toy = replace(RECIPES["toy"], tasks=tasks, contexts=(700, 800), needles=8)
    monkeypatch.setitem(RECIPES, "toy", toy)
    given = [*own_model(tmp_path), "--policies", "tova:prefill=dense,quest", "--policy-ratios", "4"]
    folder = tmp_path / "out"
    assert recipe.main(words(folder, *given, "--dmc", "--jobs", "2")) == 0
    numbers = json.loads((folder / "report.json").read_text())
    models = {model["name"]: model for model in numbers["models"]}
    names = [ORIGINAL, "cr2", "cr3", "dmc_cr3", "tova_prefill_dense_cr4", "quest_cr4"]
    assert list(models) == names
    report = (folder / "report.md").read_text()
    for name in names:
        assert f"\n| {name} |" in report
        assert models[name]["tasks"]["arc_easy@0"]["documents"] == 3
        means = []
        for task in ("arc_easy@0", "arc_easy@2"):
            own, original = (
                [
                    json.loads(line)["acc_norm"]
                    for line in (folder / "eval" / each / f"samples_{task}.jsonl").open()
                ]
                for each in (name, ORIGINAL)
            )
            assert models[name]["tasks"][task]["score"] == pytest.approx(statistics.mean(own))
            means.append(statistics.mean(own) - statistics.mean(original))
        if name != ORIGINAL:
            difference = models[name]["choices"]["difference"]
            assert difference["value"] == pytest.approx(statistics.mean(means))
            assert difference["low"] <= difference["value"] <= difference["high"]
        cells = [cell for cell in numbers["needles"] if cell["label"] == name]
        for context in (700, 800):
            parts = [cell for cell in cells if cell["length"] == context]
            found = sum(cell["accuracy"] * cell["documents"] for cell in parts)
            assert models[name]["needles"][str(context)]["value"] == pytest.approx(found / 8)
    kept = {name: models[name]["kv"]["peak_tokens"] for name in names}
    assert kept["quest_cr4"] == pytest.approx(kept[ORIGINAL])
    longest = {name: models[name]["needles"]["800"] for name in names}
    for name in ("quest_cr4", "tova_prefill_dense_cr4"):
        assert longest[name]["reads_per_token"] < 0.5 * longest[ORIGINAL]["reads_per_token"]
    assert numbers["trainings"]["train"]["tokens"] == (2 + 2 * 3 + 2) * 2 * 32
    assert numbers["trainings"]["train"]["tokens_of_held_exports"] == 2 * 2 * 32
    assert numbers["trainings"]["train_dmc"]["minutes"] > 0
    assert (folder / "needles.svg").read_text().startswith("<svg")


def test_a_ratio_is_set_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match="--policy-ratios"):
        check_policies(settings(tmp_path, policies=("h2o:cr=6",)))
