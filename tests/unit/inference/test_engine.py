"""The public interface: prompts, stops, refusals, sampling."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from tests.unit.inference.conftest import random_ids, small_spec

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def llm(folder):
    return LLM(folder("llama", small_spec("dms")))


def test_forms_of_a_prompt(llm):
    ids = random_ids(5)
    forms = [ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    found = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(outputs) == 1 for outputs in found)
    assert len({tuple(outputs[0].outputs[0].token_ids) for outputs in found}) == 1
    assert [outputs[0].request_id for outputs in found] == ["0", "1", "2", "3"]


def test_stop_tokens(llm, folder, tmp_path):
    ids = random_ids(5)
    free = llm.generate(ids, GREEDY)[0].outputs[0]
    assert (len(free.token_ids), free.finish_reason) == (12, "length")
    stop = free.token_ids[4]
    until = free.token_ids.index(stop) + 1
    named = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(stop,))
    stopped = llm.generate(ids, named)[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:until], "stop")
    copy = shutil.copytree(folder("llama", small_spec("dms")), tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 60]}))
    other = LLM(copy)
    assert other.generate(ids, GREEDY)[0].outputs[0].token_ids == free.token_ids[:until]
    on = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert other.generate(ids, on)[0].outputs[0].token_ids == free.token_ids


def test_the_models_limit_ends_a_request(llm):
    output = llm.generate(random_ids(1020), GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda llm: llm.generate("text"), "no tokenizer"),
        (lambda llm: llm.generate([[]]), "empty"),
        (
            lambda llm: llm.generate([1, 61]),
            "token=61: must be an integer of at least 0 and below 61",
        ),
        (lambda llm: llm.generate(random_ids(1024)), "the model takes 1024"),
        (lambda llm: llm.generate([[1], [2]], [GREEDY]), "2 prompts but 1"),
        (lambda llm: llm.generate(7), "give text"),
        (lambda llm: llm.generate([1], SamplingParams(stop=("x",))), "no tokenizer"),
        (lambda llm: SamplingParams(stop="x"), "a tuple of non-empty texts"),
        (lambda llm: SamplingParams(stop=("",)), "non-empty"),
        (lambda llm: SamplingParams(max_tokens=-1), "max_tokens"),
        (lambda llm: SamplingParams(temperature=-1), "temperature"),
        (lambda llm: SamplingParams(top_p=0), "top_p"),
        (lambda llm: SamplingParams(top_k=0), "top_k"),
        (lambda llm: EngineOptions(policy="none"), "policy"),
        (lambda llm: EngineOptions(prefill_chunk=0), "prefill_chunk"),
        (lambda llm: LLM("absent", policy="window", policy_options={"window": 0}), "window"),
    ],
)
def test_refusals(llm, call, named):
    with pytest.raises(InferenceError, match=named):
        call(llm)


def test_stream_shows_every_pass(folder):
    llm = LLM(folder("llama", small_spec("dms")), max_num_seqs=2, page_slots=4)
    prompts = [random_ids(n, seed=n) for n in (20, 3, 9)]
    seen: dict[str, list] = {}
    for step in llm.stream(prompts, GREEDY):
        assert llm.allocated_bytes >= sum(output.kv.allocated_bytes for output in step)
        for output in step:
            seen.setdefault(output.request_id, []).append(output)
    whole = LLM(folder("llama", small_spec("dms")), page_slots=4).generate(prompts, GREEDY)
    for passes, last in zip(seen.values(), whole, strict=True):
        assert [o.finished for o in passes] == [False] * 11 + [True]
        tokens = [o.outputs[0].token_ids for o in passes]
        assert tokens == [last.outputs[0].token_ids[:n] for n in range(1, 13)]
        for name in ("live_bytes", "allocated_bytes"):
            values = [getattr(o.kv, name) for o in passes]
            assert values[-1] == getattr(last.kv, name)
            assert max(values) == getattr(last.kv, f"peak_{name}")
        assert passes[-1].kv.kv_reads == last.kv.kv_reads
    assert llm.kv.requests == 3
    assert llm.kv.live_bytes == 0


def test_a_stream_that_is_dropped_frees_its_rows(llm):
    stream = llm.stream([random_ids(5), random_ids(7)], GREEDY)
    next(stream)
    assert llm.engine.free_batch_slots == llm.options.max_num_seqs - 2
    stream.close()
    assert llm.engine.free_batch_slots == llm.options.max_num_seqs
    with pytest.raises(InferenceError, match="empty"):
        llm.stream([[]])


def test_policies_check_their_model_and_options(folder):
    with pytest.raises(InferenceError, match="dense"):
        LLM(folder("llama", None), policy="dms")
    with pytest.raises(InferenceError, match="no window"):
        LLM(folder("llama", None), policy="window")
    llm = LLM(folder("llama", None), policy="window", policy_options={"window": 3})
    kv = llm.generate(random_ids(30))[0].kv
    assert kv.live_tokens == 4


def test_a_conversation_that_loses_its_row_computes_its_cache_again(folder):
    ids, turn = random_ids(30), random_ids(7, seed=1)
    alone = LLM(folder("llama", small_spec("dms")), max_num_seqs=1).conversation()
    expected = [alone.say(part, GREEDY).outputs[0].token_ids for part in (ids, turn)]
    llm = LLM(folder("llama", small_spec("dms")), max_num_seqs=1)
    conversation = llm.conversation()
    found = [conversation.say(ids, GREEDY).outputs[0].token_ids]
    assert llm.generate([1], GREEDY)[0].finished
    found.append(conversation.say(turn, GREEDY).outputs[0].token_ids)
    assert found == expected
    assert llm.engine.preemptions == 1
    conversation.close()
    with pytest.raises(InferenceError, match="closed"):
        conversation.say([1])


def test_a_seed_fixes_a_request(llm):
    how = SamplingParams(max_tokens=12, seed=5)
    alone = llm.generate(random_ids(9), how)[0].outputs[0].token_ids
    crowd = llm.generate([random_ids(3, seed=1), random_ids(9)], how)[1].outputs[0].token_ids
    assert alone == crowd


def test_text(stories):
    llm = LLM(stories)
    output = llm.generate("Once upon a time", SamplingParams(max_tokens=20, temperature=0.0))[0]
    assert output.prompt == "Once upon a time"
    assert output.prompt_token_ids[0] == 1
    assert "there was" in output.outputs[0].text
    golden = json.loads((stories / "golden.json").read_text())["greedy_from_bos_200"]["ids"]
    again = llm.generate(golden[:1], SamplingParams(max_tokens=59, temperature=0.0))[0]
    assert again.outputs[0].token_ids == golden[1:60]


@pytest.fixture
def characters(folder, tmp_path):
    """Build a random model with the vocabulary of the exam sheets."""
    write_exam_tokenizer(tmp_path / "tokenizer")
    copy = shutil.copytree(folder("llama", small_spec("dms")), tmp_path / "copy")
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.json", copy)
    return LLM(copy)


def test_stop_texts(characters):
    """Outputs end before the stop text, and the batch slot is free again."""
    prompts = ["So -2*c = -30.", "1: Solve"]
    how = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    free = [output.outputs[0] for output in characters.generate(prompts, how)]
    for at in (1, 7, 20):
        stop = free[0].text[at : at + 3]
        assert len(stop) == 3
        until = free[0].text.index(stop)
        first, second = characters.generate(prompts, [replace(how, stop=("never", stop)), how])
        assert first.outputs[0].text == free[0].text[:until]
        assert first.outputs[0].finish_reason == "stop"
        # the model may also generate tokens without characters
        assert free[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
        assert second.outputs[0] == free[1]
    unseen = characters.generate(prompts, replace(how, stop=("\n\n\n\n",)))
    assert [output.outputs[0] for output in unseen] == free


def test_a_streamed_text_is_never_taken_back(characters):
    """A part of a stop text at the end is held back."""
    how = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    free = characters.generate("1: Solve", how)[0].outputs[0].text
    stop = free[12:16]
    passes = characters.stream("1: Solve", replace(how, stop=(stop,)))
    texts = [output.outputs[0].text for outputs in passes for output in outputs]
    assert texts[-1] == free[: free.index(stop)]
    assert all(later.startswith(text) for text, later in pairwise(texts))


def test_stop_texts_across_turns(characters):
    how = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with characters.conversation() as conversation:
        text = conversation.say("So", how).outputs[0].text
    stop = text[5:8]
    with characters.conversation() as conversation:
        short = conversation.say("So", replace(how, stop=(stop,))).outputs[0]
        assert short.text == text[: text.index(stop)]
        # what the first turn ended at does not end the second
        assert (
            conversation.say("1", replace(how, max_tokens=3)).outputs[0].finish_reason == "length"
        )


def test_logits_of_the_longest_text(llm):
    assert llm.logits(random_ids(1024)).shape == (1024, 61)
    with pytest.raises(InferenceError, match="1025 tokens"):
        llm.logits(random_ids(1025))


@pytest.mark.parametrize("decoding", [False, True], ids=["alone", "beside-another"])
def test_a_cache_that_fails_while_a_step_is_planned_loses_the_requests_of_the_step_only(
    folder, monkeypatch, decoding
):
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, EngineOptions(max_num_seqs=2))
    if decoding:
        engine.add_request(random_ids(5), GREEDY)
        engine.step()
    lost = engine.add_request(random_ids(6), GREEDY)
    later = engine.add_request(random_ids(7), GREEDY)
    assign = engine._runner.cache.assign

    def fails(*_arguments):
        monkeypatch.setattr(engine._runner.cache, "assign", assign)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._runner.cache, "assign", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert engine.free_batch_slots == 2
    assert not engine.has_request(lost)
    assert engine.has_request(later)
    tokens = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    assert engine.free_batch_slots == 2
    assert tokens == LLM(directory).generate(random_ids(7), GREEDY)[0].outputs[0].token_ids


def test_requests_that_cannot_be_freed_are_forgotten(folder, monkeypatch):
    """A batch slot in an unknown state is not used again; without any slot a step fails."""
    directory = folder("llama", small_spec("dms"))
    engine = InferenceEngine(directory, EngineOptions(max_num_seqs=2))
    runner = engine._runner
    compute, free = runner.step, runner.cache.free

    def fails(*_arguments):
        raise RuntimeError("a broken kernel")

    for left in (1, 0):
        monkeypatch.setattr(runner, "step", fails)
        monkeypatch.setattr(runner.cache, "free", fails)
        lost = engine.add_request(random_ids(5), GREEDY)
        with pytest.raises(RuntimeError, match="a broken kernel"):
            engine.step([lost])
        assert not engine.has_request(lost)
        assert not engine.has_unfinished_requests()
        assert engine.free_batch_slots == left
        monkeypatch.setattr(runner, "step", compute)
        monkeypatch.setattr(runner.cache, "free", free)
        kept = engine.add_request(random_ids(7), GREEDY)
        if left:
            expected = LLM(directory).generate(random_ids(7), GREEDY)[0].outputs[0].token_ids
            outputs = []
            while engine.has_request(kept):
                outputs = engine.step()
            assert outputs[0].outputs[0].token_ids == expected
    with pytest.raises(RuntimeError, match="no batch slot is left"):
        engine.step()


def test_all_continuations_of_a_request_are_forgotten_when_one_cannot_be_freed(folder, monkeypatch):
    engine = InferenceEngine(folder("llama", small_spec("dms")), EngineOptions(max_num_seqs=3))
    request = engine.add_request(random_ids(5), SamplingParams(n=3, max_tokens=9))
    while engine.decoding < 3:
        engine.step()
    free, calls = engine._runner.cache.free, []

    def fails_once(rows):
        calls.append(rows)
        if len(calls) == 1:
            raise RuntimeError("a broken kernel")
        free(rows)

    monkeypatch.setattr(engine._runner.cache, "free", fails_once)
    with pytest.raises(RuntimeError, match="a broken kernel"):
        engine.abort(request)
    assert not engine.has_unfinished_requests()
    assert (engine.unfinished, engine.free_batch_slots) == (0, 2)
