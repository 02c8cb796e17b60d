"""Our class for lm-evaluation-harness gives what its class for transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.model import EngineLM
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from tests.support import served_model
from tests.support.harness_tasks import CHOOSE, CONTINUE, MAX_TOKENS, ROLL, STOPS, write_tasks
from tests.unit.evaluation.conftest import SPEC, architecture, write_model
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import folder, varied_weights

folder = folder
LONGEST = 100  # few enough that contexts are cut and texts take several windows
OPTIONS = {"max_model_len": LONGEST, "page_slots": 4, "prefill_chunk": 32}
TASKS = (CONTINUE, CHOOSE, ROLL)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A DMS export that evicts about half of its tokens, and a dense model."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = root / "tokenizer"
    write_exam_tokenizer(tokenizer)
    # without it, transformers goes on behind an end of text until all rows of a batch have ended
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_model(root / "dms", SPEC, 0, tokenizer)
    write_model(root / "dense", None, 1, tokenizer)
    return {"dms": root / "dms", "dense": root / "dense"}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Callable[[Any], dict[str, Any]]:
    """A model of the harness -> its results with samples."""
    tasks = write_tasks(tmp_path_factory.mktemp("harness") / "tasks")

    def _evaluated(lm: Any) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)

    return _evaluated


@pytest.fixture(scope="module")
def ours(models, evaluated) -> dict[str, tuple[EngineLM, dict[str, Any]]]:
    """Our class and its results for each model."""
    options = EngineOptions(enable_prefix_caching=True, max_num_seqs=8, **OPTIONS)
    found = {}
    for name, path in models.items():
        lm = EngineLM(path, options)
        found[name] = (lm, evaluated(lm))
    return found


def responses(results: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response[0] for sample in samples for response in sample["resps"]]


@pytest.mark.parametrize("name", ["dms", "dense"])
def test_results_are_those_of_transformers(models, ours, evaluated, name):
    lm = HFLM(
        pretrained=str(models[name]),
        trust_remote_code=name == "dms",
        dtype="float32",
        device="cpu",
        batch_size=4,
        max_length=LONGEST,
    )
    theirs, (engine_lm, mine) = evaluated(lm), ours[name]
    assert responses(mine, CONTINUE) == responses(theirs, CONTINUE)
    lengths = [len(text) for text in responses(mine, CONTINUE)]
    assert min(lengths) < MAX_TOKENS, "no stop text was met"
    values, greedy = zip(*responses(mine, CHOOSE), strict=True)
    other_values, other_greedy = zip(*responses(theirs, CHOOSE), strict=True)
    assert values == pytest.approx(other_values, abs=1e-4)
    assert greedy == other_greedy
    assert responses(mine, ROLL) == pytest.approx(responses(theirs, ROLL), abs=1e-4, rel=1e-6)
    for task in TASKS:
        numbers = {k: v for k, v in theirs["results"][task].items() if isinstance(v, float)}
        assert numbers
        for metric, value in numbers.items():
            assert mine["results"][task][metric] == pytest.approx(value, rel=1e-5)
    factor = engine_lm.engine.kv.cr_factor
    assert factor > 1.3 if name == "dms" else factor == pytest.approx(1)


def test_contexts_are_cut_and_texts_have_windows(ours):
    lm, results = ours["dms"]
    contexts = [sample["arguments"][0][0] for sample in results["samples"][CHOOSE]]
    texts = [sample["doc"]["text"] for sample in results["samples"][ROLL]]
    prompts = [sample["doc"]["prompt"] for sample in results["samples"][CONTINUE]]
    assert max(map(len, texts)) > 2 * LONGEST
    assert max(map(len, contexts)) > LONGEST
    assert max(map(len, prompts)) > LONGEST - MAX_TOKENS
    assert lm.engine.free_batch_slots == 8
    assert not lm.engine.has_unfinished_requests()


def test_likelihoods_are_those_of_a_loop_in_float64(ours):
    lm, results = ours["dms"]
    a = architecture()
    weights = varied_weights(a, 0)
    compared = 0
    for sample in results["samples"][CHOOSE]:
        for number, ((value, greedy),) in enumerate(sample["resps"]):
            context, choice = map(lm.tok_encode, sample["arguments"][number])
            ids = (context + choice)[-(LONGEST + 1) :]
            logits, _ = hf._forward(weights, a, SPEC, torch.tensor(ids[:-1]))
            shares = logits.log_softmax(-1)[-len(choice) :]
            exact = sum(shares[i, token].item() for i, token in enumerate(choice))
            assert value == pytest.approx(exact, abs=1e-4)
            assert greedy == (shares.argmax(-1).tolist() == choice)
            compared += 1
    assert compared == 24


def test_eviction_changes_what_is_compared(models, ours, evaluated):
    dense = evaluated(EngineLM(models["dms"], EngineOptions(policy="keep_all", **OPTIONS)))
    _, mine = ours["dms"]
    assert responses(dense, CONTINUE) != responses(mine, CONTINUE)
    for task in (CHOOSE, ROLL):
        pairs = zip(responses(dense, task), responses(mine, task), strict=True)
        assert max(abs(torch.tensor(a).sum() - torch.tensor(b).sum()) for a, b in pairs) > 0.01


@pytest.mark.parametrize(
    ("policy", "given", "in_prompt"),
    [
        ("streaming_llm", {"budget": 32}, True),
        ("h2o", {"budget": 32}, True),
        ("window", {"window": 32}, True),
        ("snapkv", {"budget": 32}, False),
        ("keydiff", {"budget": 32}, False),
    ],
)
def test_policies_evict_prompts_before_choices_are_scored(models, policy, given, in_prompt):
    context = "".join(f"{n}x + {n + 3} = {5 * n}\n" for n in range(1, 8)) + "x ="
    assert 64 < len(context) < LONGEST
    asked = requests("loglikelihood", *((context, choice) for choice in (" 2", " 31")))

    def scored(**options: Any) -> tuple[EngineLM, list[float]]:
        lm = EngineLM(models["dense"], EngineOptions(**OPTIONS, **options))
        return lm, [value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)]

    _, kept = scored()
    lm, values = scored(policy=policy, policy_options=given)
    assert lm.engine.kv.cr_factor > 2
    assert all(abs(a - b) > 0.01 for a, b in zip(kept, values, strict=True))
    # some policies evict while they read the prompt, others when they have read it
    assert (lm.peaks.most < 40) == in_prompt


def test_policies_may_evict_before_the_question(models):
    """Answers of one token show no eviction at the end of a prompt, unless it ends earlier."""
    examples = "".join(f"{n}x + {n + 3} = {5 * n}\n\n" for n in range(1, 7))
    asked = [(f"{examples}7x + 3 = 17\nx =", choice) for choice in ("2", "3")]
    asked.append(("".join(f"{n}x + 2 = 5\n" for n in range(1, 6)) + "x =", "31"))  # no examples

    def scored(policy: str, examples_only: bool, **given: Any) -> tuple[EngineLM, list[float]]:
        options = EngineOptions(policy=policy, policy_options=given, **OPTIONS)
        lm = EngineLM(models["dense"], options, examples_only=examples_only)
        values = lm.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
        return lm, [value for value, _ in values]

    _, kept = scored("keep_all", False)
    for name, given in {"keep_all": {}, "streaming_llm": {"budget": 32}}.items():
        whole, parts = scored(name, False, **given)[1], scored(name, True, **given)[1]
        assert parts == pytest.approx(whole, abs=1e-4)
    _, late = scored("snapkv", False, budget=32)
    lm, early = scored("snapkv", True, budget=32)
    assert late[:2] == pytest.approx(kept[:2], abs=1e-4)
    assert all(abs(a - b) > 0.01 for a, b in zip(early[:2], kept[:2], strict=True))
    assert early[2] == pytest.approx(late[2], abs=1e-4)
    assert abs(late[2] - kept[2]) > 0.001  # the second token of its answer
    assert lm.engine.kv.cr_factor > 1.5


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def test_one_context_is_computed_once(ours):
    lm, _ = ours["dense"]
    before = lm.engine.kv.prefill_reads
    context, choices = "12x + 7 = 31\nx =", [" 2", " 3", " 41"]
    lm.loglikelihood(requests("loglikelihood", *((context, c) for c in choices)), disable_tqdm=True)
    reads = lm.engine.kv.prefill_reads - before
    prompt = len(context) - 1  # without its last token, from which each choice starts
    each = [sum(range(prompt + 1, prompt + len(choice) + 1)) for choice in choices]
    assert reads == sum(range(1, prompt + 1)) + sum(each)


def test_sampled_answers_depend_on_the_seed_and_the_request(models):
    how = {"until": ["\n"], "do_sample": True, "temperature": 0.9, "top_k": 20, "max_gen_toks": 12}
    asked = requests("generate_until", *[("5x = 15\n", how)] * 4)

    def answers(seed: int) -> list[str]:
        lm = EngineLM(models["dms"], EngineOptions(**OPTIONS), seed=seed)
        return lm.generate_until(asked, disable_tqdm=True)

    first = answers(1)
    assert len(set(first)) > 1
    assert answers(1) == first
    assert answers(100) != first


def test_answers_are_those_of_the_engine(models):
    lm = EngineLM(models["dms"], EngineOptions(**OPTIONS))
    how = {"until": list(STOPS), "max_gen_toks": MAX_TOKENS}
    prompt = "7x - 3 = 11\n"
    (text,) = lm.generate_until(requests("generate_until", (prompt, how)), disable_tqdm=True)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=STOPS)
    lm.engine.add_request(lm.tok_encode(prompt), params, final_only=True)
    output = []
    while not output:
        output = lm.engine.step()
    assert text == output[0].outputs[0].text


def test_chat_templates_are_rendered(tmp_path):
    lm = EngineLM(served_model.write_model(tmp_path), EngineOptions())
    said = [{"role": "user", "content": "the river"}]
    asked = "<|im_start|>user\nthe river<|im_end|>\n"
    assert lm.apply_chat_template(said) == f"{asked}<|im_start|>assistant\n"
    assert lm.apply_chat_template(said, add_generation_prompt=False).startswith(asked[:-11])
    assert lm.chat_template(True) == served_model.TEMPLATE
    with pytest.raises(EvaluationError, match="the user speaks first"):
        lm.apply_chat_template([{"role": "assistant", "content": "no"}])


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("generate_until", ("x", {"num_beams": 4}), "generation_kwargs num_beams"),
        ("generate_until", ("x", {"max_gen_toks": LONGEST}), "max_gen_toks=100"),
        ("loglikelihood", ("x", ""), "a continuation of 0 tokens"),
        ("loglikelihood", ("x", "1" * (LONGEST + 1)), "a continuation of 101 tokens"),
    ],
)
def test_refusals(ours, kind, arguments, named):
    lm, _ = ours["dms"]
    with pytest.raises(EvaluationError, match=named):
        getattr(lm, kind)(requests(kind, arguments), disable_tqdm=True)
    assert not lm.engine.has_unfinished_requests()


def test_a_cache_that_is_too_small_is_refused(models):
    options = EngineOptions(cache_bytes=20_000, page_slots=4, slab_pages=8, policy="keep_all")
    lm = EngineLM(models["dms"], options)
    text = "9x + 4 = 22\n" * 40
    with pytest.raises(InferenceError, match="raise --cache-bytes"):
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert not lm.engine.has_unfinished_requests()


def test_a_model_without_a_tokenizer_is_refused(folder):
    with pytest.raises(EvaluationError, match=r"no tokenizer\.json"):
        EngineLM(folder("llama", None), EngineOptions())
