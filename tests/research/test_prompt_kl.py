"""Divergence of exports from their original on the prompts of a task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dms_train.inference.llm import LLM
from research import prompt_kl
from research.data import command as data
from tests.research.lab_model import write_lab_model
from tests.unit.inference import conftest as inference

PROBLEMS, NEW_TOKENS = 3, 12


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model, an export of it that evicts, and problems."""
    root = tmp_path_factory.mktemp("lab")
    dms = inference.small_spec("dms")
    for name, spec in (("original", None), ("copy", None), ("cr4", dms)):
        write_lab_model(root / name, spec, target_cr=4.0)
    made = ["countdown-problems", "--out", str(root / "problems.jsonl"), "--problems"]
    assert data.main([*made, str(PROBLEMS)]) == 0
    return root


def arguments(lab: Path, *more: str, models: str = "original,copy,cr4") -> list[str]:
    named = ",".join(f"{name}={lab / name}" for name in models.split(","))
    task = ["task.name=countdown", f"task.path={lab / 'problems.jsonl'}", "model.device=cpu"]
    return [*task, "--models", named, "--new-tokens", str(NEW_TOKENS), *more]


def test_divergences_are_those_of_the_logits(
    lab: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers have different lengths, so that each token counts once."""
    whole = prompt_kl.answers

    def cut(*given: object) -> list[list[int]]:
        return [text[: NEW_TOKENS - 4 * n] for n, text in enumerate(whole(*given))]

    monkeypatch.setattr(prompt_kl, "answers", cut)
    file = tmp_path / "results" / "kl.json"
    assert prompt_kl.main(arguments(lab, "--output", str(file))) == 0
    record = json.loads(file.read_text())
    assert (record["task"], record["problems"]) == ("countdown", PROBLEMS)
    for name in ("original", "copy"):
        same = record["models"][name]
        assert (same["first"]["value"], same["later"]["value"]) == (0, 0)
    original, export = (LLM(lab / name) for name in ("original", "cr4"))
    run = prompt_kl.checked_run(lab / "original", arguments(lab)[:2])
    texts = prompt_kl.answers(original, run, NEW_TOKENS)  # the ones that were cut
    assert [len(text) for text in texts] == [12, 8, 4]
    kl, known = [], []
    for prompt, text in zip(run.prompts, texts, strict=True):
        both = [
            llm.engine.logits([*prompt, *text])[len(prompt) - 1 : -1].double()
            for llm in (original, export)
        ]
        p, q = (logits.softmax(-1) for logits in both)
        kl.append((p * (p / q).log()).sum(-1))
        known.append(q[0, text[0]])
    found = record["models"]["cr4"]
    first = torch.stack([values[0] for values in kl])
    later = torch.cat([values[1:] for values in kl])
    assert first.min() > 1e-6
    assert found["first"]["value"] == pytest.approx(first.mean().item(), rel=1e-3)
    assert found["later"]["value"] == pytest.approx(later.mean().item(), rel=1e-3)
    assert found["probability"]["value"] == pytest.approx(torch.stack(known).mean().item(), 1e-3)
    assert found["first"]["low"] < found["first"]["value"] < found["first"]["high"]
    shown = capsys.readouterr().out
    assert prompt_kl.main(["--table", str(file)]) == 0
    assert shown.strip() in capsys.readouterr().out


def test_an_answer_of_one_token_has_no_later_ones(lab: Path, capsys) -> None:
    assert prompt_kl.main([*arguments(lab), "--new-tokens=1"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| cr4")]
    assert row.split("|")[3].strip() == "-"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["sampling.temperature=1"], "sampling.temperature=1: has no effect here; leave it out"),
        (["model.server=http://x"], "model.server=http://x: has no effect here"),
        (["+model.path=x"], "+model.path=x: has no effect here"),
        (["policy=h2o"], "policy=h2o: has no effect here"),
        (["policy.window=3"], "policy.window=3: has no effect here"),
        (["run={dir:x}"], "run={dir:x}: has no effect here"),
        (["sweep.widths=[2]"], "sweep.widths=[2]: has no effect here"),
        (["--output", "/tmp"], "--output /tmp: a folder; name a file"),
        (["model.prompt_format=chat"], "model.prompt_format=chat: choose one of"),
    ],
)
def test_what_would_be_ignored_is_refused(lab: Path, capsys, more, line) -> None:
    assert prompt_kl.main([*arguments(lab), *more]) == 2
    assert line in capsys.readouterr().err


def test_models_with_other_tokens_are_refused(lab: Path, tmp_path: Path, capsys) -> None:
    """Their divergence would be one of other texts."""
    write_lab_model(tmp_path / "other", None)
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = len(vocabulary) - 1
    tokenizer["model"]["vocab"] = {word: last - number for word, number in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = last - token["id"]
    file.write_text(json.dumps(tokenizer))
    named = f"original={lab / 'original'},other={tmp_path / 'other'}"
    assert prompt_kl.main([*arguments(lab), f"--models={named}"]) == 2
    assert "--models other: its prompts have other tokens than the first" in capsys.readouterr().err


def test_models_or_a_record_are_needed(lab: Path, capsys) -> None:
    table = ["--table", "record.json"]
    for words, line in (
        ([], "give --models, or --table"),
        ([*arguments(lab), *table], "give --models, or --table"),
        (["task.name=gsm8k", *table], "a stored record takes no options"),
        ([*table, "--output", "x.json"], "--output: --table only shows a stored record"),
    ):
        with pytest.raises(SystemExit):
            prompt_kl.main(words)
        assert line in capsys.readouterr().err


def test_options_reach_the_answers_and_the_engine(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["task.name=countdown", f"task.path={lab / 'problems.jsonl'}", "model.device=cpu"]
    run = prompt_kl.checked_run(lab / "cr4", [*more, "model.max_num_seqs=2", "task.limit=2"])
    llm = prompt_kl.loaded(run, NEW_TOKENS)
    assert len(run.prompts) == 2
    assert llm.options.max_num_seqs == 2
    assert llm.options.max_model_len == run.longest + NEW_TOKENS + llm.options.decode_steps
    (whole, _) = prompt_kl.answers(llm, run, NEW_TOKENS)
    assert llm.tokenizer is not None
    end = llm.tokenizer.decode(whole[:3]).split()[-1]
    monkeypatch.setattr(type(run.task), "stop", lambda task, document: (end,))
    (stopped, _) = prompt_kl.answers(llm, run, NEW_TOKENS)
    assert len(stopped) <= 3
