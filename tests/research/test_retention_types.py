"""Token types against traces labelled by hand, and what is held against one masked forward pass."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from dms_train.evaluation.bootstrap import ratio
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method.visibility import visible
from research.data import countdown
from research.data.words import WORDS, decoded
from research.retention import run as retention
from research.retention.grammars import GRAMMARS
from research.retention.held import TypedSequence, count, decode, typed
from research.retention.pictures import _word_cells
from tests.research.lab_model import write_lab_model
from tests.unit.inference import conftest as inference

oracle, load, folder = inference.oracle, inference.load, inference.folder
GRAMMAR = GRAMMARS["countdown"]
SPEC = inference.small_spec("dms")
LABELS = {
    "m": "markers",
    "p": "prompt numbers",
    "t": "target",
    "1": "first move #k",
    "f": "first move a op b = c",
    "i": "first move: numbers left",
    "2": "later move #k",
    "l": "later move a op b = c",
    "j": "later move: numbers left",
    "r": "last results",
    "a": "answer",
    "o": "other",
}
FOUR = (
    ("P 4 1 4 3 T 44", "mppppmt"),
    ("R #1 4 + 3 = 7 : 1 4 7", "m1fffmfmiii"),
    ("#1 4 + 1 = 5 : 7 5 > 12 2 35 .", "2lllmlmjjmrrrm"),
    ("#1 7 / 1 = 7 : 7 4 > . 3 . .", "2lllmlmjjmmrmm"),
    ("R #2 4 * 3 = 12 : 1 4 12", "m1fffmfmiii"),
    ("#2 12 - 1 = 11 : 11 4 > 15 7 44 !", "2lllmlmjjmrrrm"),
    ("ANS 4 * 3 , 12 - 1 , 11 * 4 <eod>", "maaamaaamaaam"),
)
FIVE = (
    ("P 2 3 4 5 20 T 97", "mpppppmt"),
    ("R #12 20 - 4 = 16 : 2 3 5 16", "m1fffmfmiiii"),
    ("#12 3 + 2 = 5 : 5 5 16", "2lllmlmjjj"),
    ("#12 16 * 5 = 80 : 80 5 > 85 75 . 16", "2lllmlmjjmrrmr"),
)
DAMAGED = (
    ("7 P 4 T T 9 9 R 4 + 3", "ompmooomooo"),
    ("R #1 4 - + 5 : 1", "m1ffoooo"),
    ("#3 4 - 2 = > 5 the 6", "2lllmmroo"),
    ("! 5 ANS 1 , ANS #2 x", "momamm2o"),
)


def names(letters: str) -> list[str]:
    return [LABELS[letter] for letter in letters]


@pytest.mark.parametrize("trace", [FOUR, FIVE, DAMAGED])
def test_every_word_has_the_type_that_it_was_given_by_hand(trace) -> None:
    words = " ".join(text for text, _ in trace).split()
    expected = names("".join(labels for _, labels in trace))
    assert len(words) == len(expected)
    for end in range(len(words) + 1):  # a search may be cut off anywhere
        assert [word.type for word in GRAMMAR.read(words[:end])] == expected[:end]
    assert set(expected) <= set(GRAMMAR.types)


def test_a_picture_begins_a_row_with_every_line() -> None:
    sequence = TypedSequence(
        words=GRAMMAR.read(" ".join(text for text, _ in FOUR).split()),
        held=torch.ones(0),
        left=torch.ones(0),
    )
    expected = [
        (row, column) for row, (_, labels) in enumerate(FOUR) for column in range(len(labels))
    ]
    assert _word_cells(sequence) == expected


@pytest.mark.parametrize("numbers", [4, 5])
def test_every_word_of_a_training_document_has_a_type(numbers: int) -> None:
    """Counts of each type by regular expressions over the text."""
    rng, rule = random.Random(numbers), countdown.TRAINING[numbers]
    for _ in range(8):
        drawn = countdown.instance(rng, rule, "train")
        text = " ".join(decoded(countdown.search(rng, drawn)))
        found = [word.type for word in GRAMMAR.read(text.split())]
        first, lines = len(re.findall(r"R #", text)), len(re.findall(r"#", text))
        pairs = re.findall(r"> ([\d. ]*)", text)
        answer = text.partition("ANS ")[2]
        left = sum(len(x.split()) for x in re.findall(r"R [^:]*: ([\d ]*)", text))
        all_left = sum(len(x.split()) for x in re.findall(r": ([\d ]*)", text))
        expected = {
            "prompt numbers": numbers,
            "target": 1,
            "first move #k": first,
            "first move a op b = c": 4 * first,
            "first move: numbers left": left,
            "later move #k": lines - first,
            "later move a op b = c": 4 * (lines - first),
            "later move: numbers left": all_left - left,
            "last results": sum(len(re.findall(r"\d+", x)) for x in pairs),
            "answer": 3 * (numbers - 1),
            "other": 0,
        }
        assert answer.count(",") == numbers - 2
        expected["markers"] = len(text.split()) - sum(expected.values())
        assert {name: found.count(name) for name in GRAMMAR.types} == expected


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the lab's words that evicts about half of all tokens."""
    directory = tmp_path_factory.mktemp("lab") / "export"
    write_lab_model(directory, SPEC)
    return directory


def held_by(oracle, export: Path, tokens: list[int]) -> torch.Tensor:
    """Return the tokens that the query after the last token may read, bool [l, h, t]."""
    return visible(oracle(export, tokens)[1], SPEC)[:, :, -1]


def searches(amount: int) -> list[str]:
    """Prompts with most of a search behind them."""
    rng, found = random.Random(3), []
    while len(found) < amount:
        drawn = countdown.instance(rng, countdown.TRAINING[4], "train")
        words = decoded(countdown.search(rng, drawn))
        if 200 < len(words) < 700:
            found.append(" ".join(words[: len(words) - 20]))
    return found


def brute_force(sequences, *, left: bool) -> dict[str, list]:
    """[tokens, held by each head, held by any] of each type, one token after the other."""
    layers, heads, _ = sequences[0][1].shape
    found = {name: [0, torch.zeros(layers, heads), 0] for name in GRAMMAR.types}
    for words, held in sequences:
        for at, word in enumerate(GRAMMAR.read(words)):
            if left and len(words) - 1 - at <= SPEC.window:
                continue
            entry = found[word.type]
            entry[0] += 1
            entry[1] += held[:, :, at]
            entry[2] += bool(held[:, :, at].any())
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_held_tokens_are_those_that_a_masked_forward_pass_still_reads(
    oracle, export: Path, temperature: float
) -> None:
    prompts = searches(4)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    llm = LLM(export, max_num_seqs=3, prefill_chunk=16, kernels="reference")
    curve, ended = decode(llm, prompts, [params] * 4)
    words = [[WORDS[token] for token in each.tokens] for each in ended]
    for prompt, each, text in zip(prompts, ended, words, strict=True):
        assert text[:-29] == prompt.split()
        assert torch.equal(each.held, held_by(oracle, export, each.tokens))
        factor = len(text) / each.held.sum(-1).double().mean().item()
        assert any(factor == pytest.approx(other) for other in curve[len(text)])
    sequences = [typed(llm, each, GRAMMAR) for each in ended]
    for left in (False, True):
        counted = count(sequences, GRAMMAR.types, left=left)
        pairs = zip(words, (each.held for each in ended), strict=True)
        for name, (tokens, held, anywhere) in brute_force(list(pairs), left=left).items():
            found = counted[name]
            assert (found.tokens, found.somewhere) == (tokens, anywhere)
            assert torch.equal(found.held, held.double())
    shares = counted["last results"].shares
    assert 0.05 < shares.min() < shares.max() < 0.95


def problems(path: Path) -> Path:
    rows = countdown.held_out_problems(12, countdown.PROBLEMS[4], seed=5)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_counts_what_a_model_generates(oracle, export, tmp_path, capsys) -> None:
    file = problems(tmp_path / "problems.jsonl")
    words = [str(export), str(file), "--task", "countdown", "--documents", "11", "--heads", "1.0"]
    words += ["--max-tokens", "60", "--temperature", "0.6", "--seed", "7", "--sample", "10"]
    assert retention.main([*words, "--output", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "retention.json").read_text())
    rows = [json.loads(line) for line in file.read_text().splitlines()][:11]
    prompts = [countdown.Instance(tuple(row["numbers"]), row["target"]).prompt for row in rows]
    params = [SamplingParams(max_tokens=60, temperature=0.6, seed=7 + n) for n in range(11)]
    outputs = LLM(export, max_num_seqs=2).generate(prompts, params)
    sequences = []
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids[:-1]
        held = held_by(oracle, export, tokens)
        sequences.append(([WORDS[token] for token in tokens], held))
    for part, left in (("all", False), ("left_window", True)):
        for name, (tokens, held, anywhere) in brute_force(sequences, left=left).items():
            stored = record["types"][part][name]
            assert stored["tokens"] == tokens
            if tokens:
                assert torch.allclose(torch.tensor(stored["held"]), held / tokens)
                assert stored["held_by_any_head"] == pytest.approx(anywhere / tokens)
    targets = [held[:, :, 6].double().mean().item() for _, held in sequences]
    expected = ratio(targets, [1.0] * 11)
    assert record["types"]["left_window"]["target"]["held_mean"] == {
        "value": pytest.approx(expected.value),
        "low": pytest.approx(expected.low),
        "high": pytest.approx(expected.high),
    }
    for name in ("kept_by_type.png", "kept_in_trace.png", "retention_by_head.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("target"))
    assert f"{100 * expected.value:.1f}" in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--sample 12", "--sample 12: there are 12 documents, from 0 on"),
        ("--heads 0.0,2.1", "--heads 2.1: the model has 2 layers and 2 KV heads, from 0 on"),
        ("--temperature -1", "temperature=-1.0: must be a number from 0 to 1e6"),
        ("--device cuda:99", "cuda:99"),
    ],
)
def test_bad_input_is_refused_in_one_line(export, tmp_path, capsys, given, message) -> None:
    file = problems(tmp_path / "problems.jsonl")
    command = [str(export), str(file), "--task", "countdown", *given.split()]
    assert retention.main([*command, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_evicts_nothing_is_refused(folder, tmp_path, capsys) -> None:
    file = problems(tmp_path / "problems.jsonl")
    assert retention.main([str(folder("llama", None)), str(file), "--task", "countdown"]) == 2
    assert "no export of DMS, whose tokens are kept or evicted" in capsys.readouterr().err


def test_a_task_without_a_grammar_is_measured_by_head(export, tmp_path) -> None:
    file = tmp_path / "problems.jsonl"
    row = {"prompt": "M a = 40 * 7 , b = a + 31 :", "answers": ["9"]}
    file.write_text(10 * (json.dumps(row) + "\n"))
    words = [str(export), str(file), "--task", "arithmetic", "--max-tokens", "20"]
    assert retention.main([*words, "--output", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "retention.json").read_text())
    assert set(record) == {"sequences", "median_cr_factor", "kept"}
    assert record["sequences"] == 10
