"""Every number against a computation that shares nothing with it but the weights."""

from __future__ import annotations

import json
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dms_train.data.batches import Sample
from dms_train.evaluation.devices import require_memory
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.measure import agreement, run_selftest
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import ProblemSet
from dms_train.evaluation.scorers.sheet import SheetScorer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.validation import compare_accuracy, require_selftest, validate
from dms_train.hf.selftest import SelfTest
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference import engine
from dms_train.method import accounting
from dms_train.method.visibility import visible
from tests.unit.evaluation.conftest import COUNT, LENGTH, SPEC, write_model
from tests.unit.inference.conftest import WINDOW

PROMPTS = ("1: Solve 4*c + 15 = 6*c - 15 for c.\nSolution 1.", "Solve", "The final answer is 1")


@torch.no_grad()
def masked(load, target, sample):
    """Logits of export and teacher by transformers, and the export's decisions [L, H, T]."""
    student = load(target.export)
    ids = sample.tokens[None]
    teacher = AutoModelForCausalLM.from_pretrained(target.teacher, dtype=torch.float32)
    decisions = student.dms_decision_logits(ids)[:, 0] > 0
    return student(ids, use_cache=False).logits[0], teacher(ids).logits[0], decisions


def test_packed_documents_are_texts_of_their_own(target, samples):
    lengths = torch.tensor([50, 1, LENGTH - 60])
    packed = [sample._replace(document_lengths=lengths) for sample in samples]
    alone = [
        Sample(*(column[first:last] for column in sample[:3]))
        for sample in samples
        for first, last in ((0, 50), (50, 51), (51, LENGTH - 9))
    ]
    found = agreement(target, packed, COUNT)
    theirs = agreement(target, alone, 3 * COUNT)
    assert found == replace(theirs, student=found.student, dense=found.dense)
    assert found.student.cr_factor == theirs.student.cr_factor
    assert found.lengths == (50, 1, LENGTH - 60) * COUNT
    evicted = found.evicted_share(found.student, WINDOW)
    seen = sum(found.lengths)
    left = sum(max(0, n - WINDOW - 1) for n in found.lengths)
    assert evicted == pytest.approx((seen - seen / found.student.cr_factor) / left)
    assert 0.1 < evicted < 1


def test_agreement_and_cost(target, samples, load):
    found = agreement(target, samples, COUNT)
    sums = dict.fromkeys(("kl", "top1", "teacher", "student", "tokens"), 0.0)
    live, reads, ends = [], [], []
    for sample in samples:
        student, teacher, decisions = masked(load, target, sample)
        counts = sample.loss_mask
        kl = F.kl_div(
            student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
        )
        sums["kl"] += (kl.sum(-1) * counts).sum().item()
        sums["top1"] += ((student.argmax(-1) == teacher.argmax(-1)) * counts).sum().item()
        for name, logits in (("teacher", teacher), ("student", student)):
            loss = F.cross_entropy(logits, sample.labels, reduction="none")
            sums[name] += (loss * counts).sum().item()
        sums["tokens"] += counts.sum().item()
        live.append(accounting.live_slots(decisions, SPEC).double().mean((0, 1)))
        ends.append(visible(decisions, SPEC)[..., -1, :].sum(-1).double())
        reads.append(visible(decisions, SPEC).sum((2, 3)).double().mean().item())
    tokens = sums["tokens"]
    assert found.kl.value == pytest.approx(sums["kl"] / tokens, rel=1e-4)
    assert found.kl.value > 0.01
    assert found.top1.value == pytest.approx(sums["top1"] / tokens, abs=1e-9)
    assert found.teacher_loss.value == pytest.approx(sums["teacher"] / tokens, rel=1e-5)
    assert found.student_loss.value == pytest.approx(sums["student"] / tokens, rel=1e-5)
    held = torch.stack(ends).sum(0)
    assert found.student.cr_factor == pytest.approx(COUNT * LENGTH / held.mean().item())
    assert found.student.cr_factor > 1.2
    torch.testing.assert_close(found.student.cr_factors, COUNT * LENGTH / held)
    assert found.student.kv_reads == pytest.approx(sum(reads) / COUNT)
    # looked at after every chunk of 64 tokens and at the end
    assert found.student.peak_tokens == pytest.approx(max(max(x[63], x[-1]) for x in live).item())
    assert found.dense.cr_factor == 1.0
    assert found.dense.kv_reads == LENGTH * (LENGTH + 1) / 2
    assert found.dense.peak_tokens == LENGTH
    assert found.student.cache_bytes < found.dense.cache_bytes


def test_the_control_attends_within_its_window_only(target, samples):
    """Against transformers with a mask that is written out."""
    found = agreement(target, samples, COUNT, window_only=True)
    assert found.kl == agreement(target, samples, COUNT).kl
    teacher = AutoModelForCausalLM.from_pretrained(target.teacher, dtype=torch.float32)
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = ((back >= 0) & (back <= WINDOW))[None, None]
    kl, loss, tokens = 0.0, 0.0, 0.0
    for sample in samples:
        with torch.no_grad():
            dense = teacher(sample.tokens[None]).logits[0].double()
            control = teacher(sample.tokens[None], attention_mask=seen).logits[0].double()
        expected = dense.log_softmax(-1)
        differing = (expected.exp() * (expected - control.log_softmax(-1))).sum(-1)
        kl += (differing * sample.loss_mask).sum().item()
        nll = F.cross_entropy(control, sample.labels, reduction="none")
        loss += (nll * sample.loss_mask).sum().item()
        tokens += sample.loss_mask.sum().item()
    assert found.window_only.kl.value == pytest.approx(kl / tokens, rel=1e-4)
    assert found.window_only.kl.value > 0.01
    assert found.window_only.loss.value == pytest.approx(loss / tokens, rel=1e-5)
    cost = found.window_only.cost
    assert cost.kv_reads == seen.sum().item()
    assert cost.cr_factor == pytest.approx(LENGTH / (WINDOW + 1))
    assert found.evicted_share(cost, WINDOW) == pytest.approx(1.0)
    assert found.evicted_share(found.dense, WINDOW) == 0.0
    assert 0 < found.evicted_share(found.student, WINDOW) < 1


def test_a_model_agrees_with_itself(target, samples):
    found = agreement(replace(target, export=target.teacher), samples, COUNT)
    assert abs(found.kl.value) < 1e-9
    assert found.top1.value == 1.0
    assert found.teacher_loss == found.student_loss


def test_selftest(target, tokenizer, tmp_path):
    assert run_selftest(target.export, "cpu").kl < 1e-8
    recorded = SelfTest.load(target.export)
    logits = recorded.logits.clone()
    logits[:, 3] += 2
    write_model(tmp_path / "other", SPEC, 0, tokenizer, replace(recorded, logits=logits))
    found = run_selftest(tmp_path / "other", "cpu")
    assert found.kl > found.limit
    assert not found.passed
    assert not replace(found, kl=float("nan")).passed


def test_the_selftest_finds_errors_of_the_cache(target, tokenizer, tmp_path):
    """The weights are right and the window is not: a mask of the right window would not show it."""
    spec = SPEC.override(window=2)
    recorded = SelfTest.load(target.export)
    write_model(tmp_path / "other", spec, 0, tokenizer, recorded)
    assert not run_selftest(tmp_path / "other", "cpu").passed


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    """Continuation by whole masked passes."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_compare_accuracy(target, load):
    """The gold answers are greedy answers of transformers, so that one model is always right."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(target.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(target.teacher, dtype=torch.float32)
    models = {"teacher": teacher, "student": load(target.export)}
    for right, model in models.items():
        documents = []
        for prompt in PROMPTS:
            ids = greedy(model, tokens.encode(prompt), 30)
            text = tokens.decode(ids, skip_special_tokens=True)
            documents.append(Document(id=prompt, question=prompt, gold=(text, "never")))
        whole = SheetScorer(r"(?s)^(.+)$")
        problems = ProblemSet(documents=documents, scorer=whole, max_tokens=30, max_num_seqs=2)
        found = compare_accuracy(target, problems, window_only=True, note=lambda line: None)
        assert list(found) == ["teacher", "student", "window_only"]
        assert found[right].share.value == 0.5
        others = [result.share.value for name, result in found.items() if name != right]
        assert max(others) < 0.5
        assert found["window_only"].cost.peak_tokens < found["student"].cost.peak_tokens
        assert found["teacher"].cost.cr_factor == 1.0
        lengths = [len(prompt) for prompt in PROMPTS]
        cost = found["teacher"].cost  # decoding: 29 passes for 30 tokens
        assert cost.peak_tokens == pytest.approx(sum(n + 29 for n in lengths) / 3)
        decoding = sum(n + step for n in lengths for step in range(1, 30))
        assert cost.kv_reads == pytest.approx(decoding / 3)
        assert cost.prefill_reads == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / 3)


def test_a_failed_selftest_is_refused_after_measuring(target, samples, tokenizer, tmp_path):
    recorded = SelfTest.load(target.export)
    changed = replace(recorded, logits=recorded.logits.flip(0))
    write_model(tmp_path / "other", SPEC, 0, tokenizer, changed)
    here = replace(target, export=tmp_path / "other")
    found = validate(here, samples, ValidateOptions(samples=1), lambda line: None, 0.0)
    with pytest.raises(EvaluationError, match=r"self-test failed: KL .* at most 0\.02"):
        require_selftest(found)


def test_one_model_is_alive_at_a_time(target, samples, monkeypatch, tmp_path):
    """Every decoder that is loaded finds all earlier ones collected."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": PROMPTS[0], "answers": ["1"]}) + "\n")
    loaded: list[weakref.ref] = []
    alive: list[int] = []
    load_model = engine.load_model

    def counted(*arguments, **options):
        alive.append(sum(reference() is not None for reference in loaded))
        model = load_model(*arguments, **options)
        loaded.append(weakref.ref(model.decoder))
        return model

    monkeypatch.setattr(engine, "load_model", counted)
    options = ValidateOptions(samples=2, problems=str(problems), max_tokens=3, window_only=True)
    validate(target, samples, options, lambda line: None, 0.0)
    assert alive == [0] * 7  # original, export and control on texts and problems; the self-test
    assert all(reference() is None for reference in loaded)


def test_weights_that_do_not_fit_the_gpu_are_refused(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 2**30))
    with pytest.raises(EvaluationError, match=r"its weights take .* GiB, cuda has 0\.0 GiB free"):
        require_memory(target.export, "cuda")
    require_memory(target.export, "cpu")


def test_the_memory_of_weights_is_that_of_their_dtype(target, monkeypatch):
    reader = WeightReader(target.export)
    weights = sum(reader.get(name).nbytes for name in reader.names())
    for free in (weights - 1, weights):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**40))
        with pytest.raises(EvaluationError) if free < weights else nullcontext():
            require_memory(target.export, "cuda")
