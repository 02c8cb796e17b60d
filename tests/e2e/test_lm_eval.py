"""lm-evaluation-harness on an export: what it logs is what this package computes itself."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.data_prep.exam_sheets import problem
from dms_train.data_prep.exam_tokenizer import EOD_TOKEN, write_exam_tokenizer
from dms_train.export.writer import write_export
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from tests.support import launch
from tests.unit.inference.conftest import small_spec, tiny_architecture, varied_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed; pip install -c constraints.txt -e '.[eval]'",
    ),
]

TASKS = Path(__file__).parent / "lm_eval_tasks"
CONTINUE, CHOOSE = "dms_continue_sheet", "dms_choose_answer"
STOPS, MAX_TOKENS = (".", "\n\n", EOD_TOKEN), 40  # as in continue_sheet.yaml


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that evict about half of all tokens, and the exam sheets' tokenizer."""
    root = tmp_path_factory.mktemp("exports")
    write_exam_tokenizer(root / "tokenizer")
    (root / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 0}')
    architecture = replace(tiny_architecture("llama"), vocab_size=50)
    write_export(
        root / "hf",
        architecture=architecture,
        spec=small_spec("dms"),
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms",
        weights=varied_weights(architecture, 0).items(),
        source_dir=root / "tokenizer",
        selftest=None,
        provenance={},
    )
    return root / "hf"


def sheets() -> list[dict[str, Any]]:
    """Prompts of 1 to 4 questions, so that batches are padded."""
    rng, rows = random.Random(3), []
    for row in range(10):
        lines = [problem(rng, "held_out").question for _ in range(1 + row % 4)]
        rows.append({"prompt": "\n".join(lines) + "\n", "continuation": lines[0]})
    return rows


def questions() -> list[dict[str, Any]]:
    """Equations with four answers of one to three tokens."""
    rng, rows = random.Random(4), []
    for _ in range(10):
        asked = problem(rng, "held_out")
        answers = [f" {asked.answer + wrong}" for wrong in (0, 1, -7, 30)]
        rows.append({"question": f"{asked.question}\nx =", "choices": answers, "answer": 0})
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def logged(export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the harness's log of each task: the responses to each document, in order."""
    workspace = tmp_path_factory.mktemp("harness")
    write_lines(workspace / "continue_sheet.jsonl", sheets())
    write_lines(workspace / "choose_answer.jsonl", questions())
    command = [
        *("-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={export},trust_remote_code=True,dtype=float32"),
        *("--tasks", f"{CONTINUE},{CHOOSE}", "--include_path", str(TASKS)),
        *("--batch_size", "4", "--device", "cpu"),
        *("--output_path", str(workspace / "results"), "--log_samples"),
    ]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(workspace / "datasets")}
    done = subprocess.run(
        [sys.executable, *command],
        env=launch.environment(**offline),
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    launch.checked(done)
    return {task: read_responses(workspace / "results", task) for task in (CONTINUE, CHOOSE)}


def read_responses(results: Path, task: str) -> list[Any]:
    (path,) = results.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return [response[0] for sample in samples for response in sample["resps"]]


def continuations(model: Path, policy: str) -> list[str]:
    """The engine's continuations of the prompts, cut at the first stop string."""
    llm = LLM(model, policy=policy)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    texts = [o.outputs[0].text for o in llm.generate([r["prompt"] for r in sheets()], greedy)]
    for stop in STOPS:
        texts = [text.split(stop)[0] for text in texts]
    return texts


def likelihood(llm: LLM, question: str, choice: str) -> tuple[float, bool]:
    """Log-probability of a choice, and whether greedy decoding would give it."""
    assert llm.tokenizer is not None
    before, after = llm.tokenizer.encode(question), llm.tokenizer.encode(choice)
    scores = llm.logits(before + after[:-1])[-len(after) :].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(after)[:, None]).sum().item()
    return chosen, scores.argmax(-1).tolist() == after


def likelihoods(model: Path, policy: str) -> list[tuple[float, bool]]:
    llm = LLM(model, policy=policy)
    return [likelihood(llm, row["question"], c) for row in questions() for c in row["choices"]]


def test_generations_are_ours(export, logged):
    found = logged[CONTINUE]
    assert found == continuations(export, "auto")  # a token is a character here
    assert found != continuations(export, "keep_all"), "eviction changes nothing on these prompts"
    lengths = [len(text) for text in found]
    assert min(lengths) < MAX_TOKENS, "no stop string was met"
    assert max(lengths) == MAX_TOKENS, "every answer was cut"


def test_likelihoods_are_ours(export, logged):
    found = torch.tensor([float(value) for value, _ in logged[CHOOSE]])
    ours = likelihoods(export, "auto")
    torch.testing.assert_close(found, torch.tensor([v for v, _ in ours]), atol=1e-4, rtol=0)
    assert [str(greedy) for _, greedy in logged[CHOOSE]] == [str(greedy) for _, greedy in ours]
    dense = torch.tensor([value for value, _ in likelihoods(export, "keep_all")])
    assert (found - dense).abs().max() > 0.01, "eviction changes nothing on these questions"


def test_the_harness_generates_on_the_compact_cache(export):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(
        pretrained=str(export),
        trust_remote_code=True,
        dtype="float32",
        device="cpu",
        batch_size=4,
    )
    seen: list[tuple[str, bool]] = []

    def note(_module, _args, kwargs):
        padded = not bool(kwargs["attention_mask"].all())
        seen.append((type(kwargs["past_key_values"]).__name__, padded))

    attention = harness.model.model.layers[0].self_attn
    attention.register_forward_pre_hook(note, with_kwargs=True)
    how = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 5}
    asked = [
        Instance("generate_until", row, (row["prompt"], how), number)
        for number, row in enumerate(sheets()[:4])
    ]
    assert all(harness.generate_until(asked, disable_tqdm=True))
    assert set(seen) == {("DMSCache", True)}
