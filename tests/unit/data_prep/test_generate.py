"""`dms-data generate`: documents are prompts and what the model itself writes behind them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dms_train import LLM, SamplingParams
from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.data_prep.prepare import main
from dms_train.evaluation.answers import Attempt, verify_answer
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.tensors import expected_shapes
from dms_train.inference.engine import InferenceEngine
from tests.support import launch
from tests.support.r1_tokenizer import write_tokenizer
from tests.unit.data_prep.conftest import STOPS
from tests.unit.evaluation import conftest as evaluation
from tests.unit.evaluation.conftest import SPEC, write_model

tokenizer = evaluation.tokenizer
WriteRows = Callable[..., str]
BOS, EOS, NEW = 0, 1, 24
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 512,  # larger than the tokenizer's, as on the hub
}
TALK = [{"role": "user", "content": "What is 1 + 2?"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "Okay, let me"},
    {"prompt": ""},
    {"messages": [*TALK, {"role": "assistant", "content": "It is 3."}], "id": "sum"},
    {"prompt": "Wait"},
    {"prompt": None, "messages": TALK},
    *({"prompt": f"I think the result is {number}"} for number in range(6)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, of which many continuations come to the end-of-text token."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if "norm" in name else 0.3 * torch.randn(shape, generator=draw)
        for name, shape in expected_shapes(from_hf_config(CONFIG)).items()
    }
    weights["lm_head.weight"][EOS] *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def generate(tmp_path: Path, model: str) -> Callable[..., int]:
    def run(*words: str, name: str = "out") -> int:
        given = [*words, "--output", str(tmp_path / name)]
        if "--model" not in words:
            given += ["--model", model]
        if "--max-new-tokens" not in words:
            given += ["--max-new-tokens", str(NEW)]
        return main(["generate", *given])

    return run


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens.tolist(), one.mask.tolist()) for one in ShardReader(prefix)]


def records(prefix: Path) -> list[Any]:
    lines = Path(f"{prefix}.verdicts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompt_tokens(model: str, row: dict[str, Any]) -> list[int]:
    """Return the tokens that transformers makes of a row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if row.get("prompt") is None:
        text = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(row["prompt"])["input_ids"] or [BOS]


@torch.no_grad()
def greedy(network: Any, prompt: list[int]) -> Iterator[int]:
    """The most likely tokens, each from the whole text before it."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
        yield tokens[-1]
        if tokens[-1] == EOS:
            return


def test_documents_are_the_prompts_and_what_transformers_would_continue_them_with(
    tmp_path: Path, model: str, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    assert generate(write_rows(ROWS), "--temperature", "0") == 0
    network = AutoModelForCausalLM.from_pretrained(model)
    found = documents(tmp_path / "out")
    assert len(found) == len(ROWS)
    for row, (tokens, mask) in zip(ROWS, found, strict=True):
        prompt = prompt_tokens(model, row)
        continuation = list(greedy(network, prompt))
        assert tokens == prompt + continuation
        assert mask == [0] * len(prompt) + [1] * len(continuation)
    assert found[2][0] == found[4][0]  # the answer in the row is left out
    assert [one["key"] for one in records(tmp_path / "out")][:3] == ["", "", "sum"]


@pytest.mark.parametrize("kind", ["dense", "export"])
def test_a_continuation_is_the_one_that_its_seed_gives_alone(
    tmp_path: Path,
    model: str,
    write_rows: WriteRows,
    generate: Callable[..., int],
    tokenizer: Path,
    kind: str,
) -> None:
    if kind == "export":  # evicts tokens, and has another tokenizer
        write_model(tmp_path / "export", SPEC, 0, tokenizer)
        model, rows = str(tmp_path / "export"), [{"prompt": f"{n}: Solve"} for n in range(6)]
    else:
        rows = ROWS
    words = ("--continuations", "2", "--temperature", "0.8", "--top-p", "0.9", "--seed", "5")
    assert generate(write_rows(rows), *words, "--model", model, "--max-num-seqs", "3") == 0
    llm, found = LLM(model), documents(tmp_path / "out")
    ends = []
    for number, record in enumerate(records(tmp_path / "out")):
        tokens, mask = found[2 * number]
        prompt = tokens[: mask.index(1)]
        params = SamplingParams(
            n=2, max_tokens=NEW, temperature=0.8, top_p=0.9, seed=record["seed"]
        )
        alone = llm.generate(prompt, params)[0].outputs
        for index, output in enumerate(alone):
            assert found[2 * number + index][0] == prompt + output.token_ids
            named = {"stop": "finished", "length": "cut"}[str(output.finish_reason)]
            expected = {"end": named, "tokens": len(output.token_ids), "outcome": "kept"}
            assert record["continuations"][index] == expected
            ends.append(named)
        assert found[2 * number] != found[2 * number + 1]
    counts = read_manifest(tmp_path / "out").preparation
    assert counts is not None
    assert counts["continuations"] == {name: ends.count(name) for name in set(ends)}
    assert len({record["seed"] for record in records(tmp_path / "out")}) == len(rows)
    if kind == "dense":
        assert set(ends) == {"finished", "cut"}


def test_the_manifest_names_model_sampling_and_what_was_left_out(
    tmp_path: Path, model: str, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    rows = [
        {"prompt": "Okay"},
        {"prompt": None},
        {"prompt": "a b c d e f g h" * 20},  # no room behind it
        {"prompt": "What is 7?"},
        {"messages": [{"role": "assistant", "content": "Hello"}]},
    ]
    sets = write_rows([{"problem": "what is 7?"}], "evaluation.jsonl")
    words = ("--evaluation-set", sets, "--loss-on", "all", "--append-eod", "--seed", "3")
    assert generate(write_rows(rows), *words) == 0
    outcomes = [one["outcome"] for one in records(tmp_path / "out")]
    assert outcomes == ["kept", "missing_value", "too_long", "evaluation_overlap", "missing_value"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest.loss_mask is None
    assert manifest.eod_id == EOS
    assert documents(tmp_path / "out")[0][0][-1] == EOS
    found = manifest.preparation
    assert found is not None
    assert found["rows"] == {
        **{"read": 5, "missing_value": 2, "evaluation_overlap": 1, "kept": 1, "too_long": 1}
    }
    assert found["overlaps"] == {"evaluation.jsonl, exact": 1}
    settings = found["settings"]
    assert len(settings["model_sha256"]) == 64
    assert (settings["sampling"]["seed"], settings["sampling"]["max_tokens"]) == (3, NEW)
    assert settings["stop_token_ids"] == [EOS]
    assert main(["check", str(tmp_path / "out")]) == 0


def test_an_appended_end_does_not_count_unless_the_model_wrote_it(
    tmp_path: Path, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    assert generate(write_rows(ROWS), "--append-eod", "--continuations", "3") == 0
    assert all(tokens[-1] == EOS for tokens, _ in documents(tmp_path / "out"))
    ends = [one["end"] for record in records(tmp_path / "out") for one in record["continuations"]]
    counted = [mask[-1] for _, mask in documents(tmp_path / "out")]
    assert counted == [int(end == "finished") for end in ends]


def test_shards_together_are_the_whole(
    tmp_path: Path, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    file = write_rows(ROWS)
    assert generate(file, "--limit", "10") == 0
    whole = documents(tmp_path / "out")
    assert len(whole) == 10
    for index in range(3):
        assert generate(file, "--limit", "10", "--shard", f"{index}/3", name="part") == 0
        part = documents(tmp_path / f"part-0000{index}-of-00003")
        assert part == whole[index::3]


def test_texts_columns_and_empty_prompts(
    tmp_path: Path, model: str, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    from pyarrow import Table, parquet

    (tmp_path / "lines.txt").write_text("Okay, let me\n\n  Wait\n", encoding="utf-8")
    assert generate(str(tmp_path / "lines.txt"), name="lines") == 0
    begins = [tokens[: mask.index(1)] for tokens, mask in documents(tmp_path / "lines")]
    assert begins == [prompt_tokens(model, {"prompt": text}) for text in ("Okay, let me", "  Wait")]
    parquet.write_table(
        Table.from_pylist([{"problem": "What is 1 + 2?", "prompt": "no"}]), tmp_path / "a.parquet"
    )
    words = ("--column", "problem", "--chat")
    assert generate(str(tmp_path / "a.parquet"), *words, name="chat") == 0
    ((tokens, mask),) = documents(tmp_path / "chat")
    assert tokens[: mask.index(1)] == prompt_tokens(model, {"messages": TALK})
    assert generate("--unconditional", "5", name="empty") == 0
    found = documents(tmp_path / "empty")
    assert [tokens[: mask.index(1)] for tokens, mask in found] == [[BOS]] * 5
    assert len({tuple(tokens) for tokens, _ in found}) == 5


@pytest.mark.slow
def test_a_killed_call_goes_on_and_gives_the_same_files(
    tmp_path: Path, model: str, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    file = write_rows([{"prompt": f"Therefore, {number}"} for number in range(20)])
    words = [file, "--model", model, "--continuations", "2", "--max-num-seqs", "4"]
    words += ["--only-finished", "--source", "here"]
    assert generate(*words, name="whole") == 0
    given = ["generate", *words, "--output", str(tmp_path / "out"), "--max-new-tokens", str(NEW)]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, *given], env=launch.environment(), cwd=launch.ROOT
    )
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "give it more rows"
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = json.loads((tmp_path / "out.work" / "state.json").read_text())
    assert 0 < state["next_row"] < 20
    assert main(given) == 0
    for suffix in ("manifest.json", "bin", "idx", "loss_mask.bin", "verdicts.jsonl"):
        pair = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("whole", "out")]
        assert pair[0] == pair[1], suffix
    assert not (tmp_path / "out.work").exists()


def test_tokens_have_the_probabilities_of_the_model(
    tmp_path: Path, model: str, generate: Callable[..., int]
) -> None:
    draws = 2000
    words = ("--unconditional", str(draws), "--max-new-tokens", "1", "--max-num-seqs", "64")
    assert generate(*words) == 0
    counts = np.bincount([tokens[-1] for tokens, _ in documents(tmp_path / "out")], minlength=512)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[BOS]])).logits[0, -1]
    expected = draws * torch.softmax(logits.double(), -1).numpy()
    often = (
        expected >= 5
    )  # where the statistic is about chi-squared distributed; the rest is pooled
    pooled = [np.append(each[often], each[~often].sum()) for each in (counts, expected)]
    statistic = float(((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum())
    freedom = len(pooled[0]) - 1
    assert freedom > 20
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_documents_begin_with_a_random_length_of_each_passage(
    tmp_path: Path, model: str, generate: Callable[..., int]
) -> None:
    folder = tmp_path / "books"
    (folder / "part").mkdir(parents=True)
    lines = [f"Line {number} of the book, so that it has a name.\n" for number in range(150)]
    (folder / "one.txt").write_text("\n\n" + "".join(lines[:100]), encoding="utf-8")
    (folder / "part" / "two.md").write_text("".join(lines[100:]), encoding="utf-8")
    (folder / "part" / "notes.pdf").write_bytes(b"%PDF")
    (folder / ".hidden.txt").write_text("no", encoding="utf-8")
    assert generate(str(folder), "--beginning", "4-40", "--max-new-tokens", "2") == 0
    passages = [""]
    for number, line in enumerate(lines):
        passages[-1] += line
        if len(passages[-1]) >= 8 * 40 or number == 99:  # a file ends its last passage
            passages.append("")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)  # not Qwen2's, which splits digits
    found = documents(tmp_path / "out")
    assert len(found) == len(passages[:-1] if not passages[-1] else passages)
    lengths = [mask.index(1) for _, mask in found]
    for (tokens, _), passage, length in zip(found, passages, lengths, strict=False):
        assert tokens[:length] == tokenizer(passage)["input_ids"][:length]
    assert min(lengths) >= 4
    assert max(lengths) <= 40
    assert len(set(lengths)) > len(lengths) / 3
    sources = read_manifest(tmp_path / "out").sources
    assert [source.name for source in sources] == ["one.txt", "two.md"]


def test_documents_of_rows_that_are_too_short_are_left_out(
    tmp_path: Path, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    rows = [{"text": "I think the result is 3. " * 4}, {"text": "Okay"}]
    assert generate(write_rows(rows), "--beginning", "6-8") == 0
    assert [one["outcome"] for one in records(tmp_path / "out")] == ["kept", "too_short"]


def test_filters_are_applied_and_counted(
    tmp_path: Path,
    model: str,
    write_rows: WriteRows,
    generate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_rows([{"prompt": f"Hm {n}", "answer": n if n < 3 else None} for n in range(9)])
    words = (file, "--continuations", "2", "--only-finished")
    assert generate(file, "--continuations", "2", name="all") == 0
    assert generate(*words, "--answer-column", "answer") == 0
    every, kept = documents(tmp_path / "all"), documents(tmp_path / "out")
    # random weights write no answer, so that only rows without one are left
    assert kept == [one for one in every[6:] if one[0][-1] == EOS]
    assert 0 < len(kept) < 12
    decode = PreTrainedTokenizerFast.from_pretrained(model).decode
    expected = Counter(kept=len(kept), unfinished=12 - len(kept))
    for tokens, mask in every[:6]:
        text = decode(tokens[mask.index(1) :], skip_special_tokens=True)
        finished = tokens[-1] == EOS
        expected[verify_answer(Attempt("1", text)).value if finished else "unfinished"] += 1
    found = read_manifest(tmp_path / "out").preparation
    assert found is not None
    assert found["outcomes"] == dict(+expected)
    assert sum(found["continuations"].values()) == 18
    assert "tokens/s" in capsys.readouterr().out


def test_the_terms_of_a_finished_shard_can_be_corrected(
    tmp_path: Path, model: str, write_rows: WriteRows, generate: Callable[..., int]
) -> None:
    file = write_rows(ROWS[:2])
    assert generate(file) == 0
    tokens = (tmp_path / "out.bin").read_bytes()
    (before,) = read_manifest(tmp_path / "out").origins
    assert (before.source, before.license) == ("unknown", "unknown")
    assert before.model == Path(model).name
    assert generate(file, "--license", "MIT", "--source", "someone/prompts") == 0
    manifest = read_manifest(tmp_path / "out")
    (origin,) = manifest.origins
    assert (origin.source, origin.license) == ("someone/prompts", "MIT")
    assert (origin.sha256, origin.tokens) == (manifest.bin_sha256, manifest.tokens)
    assert (tmp_path / "out.bin").read_bytes() == tokens


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("bad.jsonl",), ("bad.jsonl: row 40", "column prompt or messages", "--column")),
        (("number.jsonl",), ("number.jsonl: row 0", "expected text, found int")),
        (("broken.jsonl",), ("broken.jsonl:2", "not valid JSON")),
        (("absent.jsonl",), ("absent.jsonl: No such file",)),
        (("page.pdf",), ("unknown file type", ".txt")),
        (("nobody/nothing",), ("local hub cache", "--allow-network")),
        ((), ("--unconditional",)),
        (("--unconditional", "2", "bad.jsonl"), ("files, one hub id or --unconditional",)),
        (("--unconditional", "2", "--answer-column", "a"), ("leave out --column, --chat",)),
        (("good.jsonl", "--beginning", "2-4", "--chat"), ("leave out --chat and --suffix",)),
        (("good.jsonl", "--answer-column", "b"), ("--answer-column b: no row has an answer",)),
        (("empty",), ("empty: no .parquet, .jsonl",)),
        (("--unconditional", "2", "--top-p", "3"), ("top_p=3.0",)),
        (("--unconditional", "2", "--max-model-len", "4096"), ("the model takes 128",)),
        (("--unconditional", "2", "--model", "absent/there/at/all"), ("no such directory",)),
        (("--unconditional", "2", "--device", "cuda"), ("device=cuda", "no GPU")),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
    write_rows: WriteRows,
    generate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(InferenceEngine, "__init__")  # nothing may be loaded
    write_rows([*({"prompt": "a"} for _ in range(40)), {"text": "a"}], "bad.jsonl")
    write_rows([{"prompt": 3}], "number.jsonl")
    write_rows([{"prompt": "a", "a": 1}], "good.jsonl")
    Path("empty").mkdir()
    Path("broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    before = sorted(tmp_path.iterdir())
    assert generate(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("dms-data: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
    assert sorted(tmp_path.iterdir()) == before


def test_workers_are_threads(generate: Callable[..., int]) -> None:
    before = torch.get_num_threads()
    try:
        assert generate("--unconditional", "1", "--workers", str(before + 1)) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_an_empty_prompt_needs_a_token_to_begin_with(
    tmp_path: Path,
    generate: Callable[..., int],
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model(tmp_path / "export", SPEC, 0, tokenizer)  # its tokenizer has no bos_token
    assert generate("--unconditional", "2", "--model", str(tmp_path / "export")) == 2
    assert (
        "row 0: the prompt is empty, and the tokenizer has no bos_token" in capsys.readouterr().err
    )


def test_tokens_of_documents_are_those_of_the_vocabulary_of_the_model(
    tmp_path: Path, model: str, generate: Callable[..., int]
) -> None:
    # random weights write tokens that the tokenizer does not have
    assert generate("--unconditional", "30") == 0
    tokens = np.concatenate([one.tokens for one in ShardReader(tmp_path / "out")])
    assert tokens.max() >= len(AutoTokenizer.from_pretrained(model))
    assert read_manifest(tmp_path / "out").vocab_size == CONFIG["vocab_size"]
