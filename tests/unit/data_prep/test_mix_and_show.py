"""`dms-data mix` keeps the shares that were asked for; `dms-data show` prints what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dms_train.data.manifest import Source, file_sha256, read_manifest, write_manifest
from dms_train.data.origins import UNKNOWN_TERMS, Terms, counted
from dms_train.data.reader import ShardReader
from dms_train.data.writer import ShardWriter
from dms_train.data_prep.prepare import main
from tests.support import launch
from tests.support.r1_tokenizer import ASSISTANT, BEGIN, END, USER
from tests.unit.data_prep.conftest import row

VOCAB = 1000


def shard(
    prefix: Path, first: int, lengths: list[int], *, mask: bool = True, tokenizer: str = "a" * 64
) -> str:
    """A shard whose documents each repeat one token of their own, from `first` on."""
    with ShardWriter(
        prefix, vocab_size=VOCAB, eod_id=None, tokenizer_sha256=tokenizer, loss_mask=mask
    ) as writer:
        for number, length in enumerate(lengths):
            tokens = np.full(length, first + number, np.int32)
            writer.add(tokens, (np.arange(length) % 2).astype(np.uint8) if mask else None)
        writer.finish((Source(name="words", sha256="b" * 64, rows=len(lengths)),))
    return str(prefix)


def numbers(prefix: Path) -> list[int]:
    return [int(document.tokens[0]) for document in ShardReader(prefix)]


def test_a_damaged_shard_is_not_mixed_into_a_sound_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = shard(tmp_path / "a", 0, [5, 6])
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[0] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert main(["mix", "--output", str(tmp_path / "out"), prefix]) == 2
    assert f"{prefix}.bin: SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "out.manifest.json").exists()


def test_weights_are_shares_of_the_tokens_throughout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = shard(tmp_path / "a", 0, rng.integers(5, 40, 300).tolist())
    b = shard(tmp_path / "b", 500, rng.integers(5, 10, 300).tolist())
    assert main(["mix", f"{a}=1", f"{b}=3", "--output", str(tmp_path / "out")]) == 0
    reader = ShardReader(tmp_path / "out")
    tokens = Counter[str]()
    for document in reader:
        tokens["ab"[int(document.tokens[0]) >= 500]] += len(document.tokens)
        # never further from 1 : 3 than the longest document of each
        assert abs(3 * tokens["a"] - tokens["b"]) <= 3 * 40 + 10
    found = numbers(tmp_path / "out")
    assert len(set(found)) == len(found)
    assert set(range(500, 800)) <= set(found)  # b is used up
    assert [source.rows for source in reader.manifest.sources] == [len(found) - 300, 300]


def test_origins_are_the_tokens_of_each_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = np.random.default_rng(0).integers(5, 40, (2, 200)).tolist()
    names = [shard(tmp_path / name, 300 * n, lengths[n]) for n, name in enumerate("ab")]
    for name, terms in zip(names, (Terms(source="s", license="MIT"), UNKNOWN_TERMS), strict=True):
        manifest = read_manifest(name)
        own = counted(terms, manifest.bin_sha256, manifest.tokens)
        write_manifest(name, replace(manifest, origins=(own,) if terms.license == "MIT" else ()))
    assert main(["mix", f"{names[0]}=1", f"{names[1]}=3", "--output", str(tmp_path / "c")]) == 0
    tokens = [0, 0]
    for document in ShardReader(tmp_path / "c"):
        tokens[int(document.tokens[0]) >= 300] += len(document.tokens)
    origins = read_manifest(tmp_path / "c").origins
    hashes = [file_sha256(Path(f"{name}.bin")) for name in names]
    assert [(one.source, one.license, one.sha256, one.tokens) for one in origins] == [
        ("s", "MIT", hashes[0], tokens[0]),
        ("unknown", "unknown", hashes[1], tokens[1]),
    ]
    share = f"{tokens[0] / sum(tokens):.1%} of the tokens: source s, licence MIT"
    assert share in capsys.readouterr().out.splitlines()
    d = shard(tmp_path / "d", 700, [sum(tokens)])
    assert main(["mix", str(tmp_path / "c"), d, "--output", str(tmp_path / "e")]) == 0
    assert [one.tokens for one in read_manifest(tmp_path / "e").origins] == [*tokens, sum(tokens)]


def test_a_larger_vocabulary_may_come_second(tmp_path: Path) -> None:
    a = shard(tmp_path / "a", 0, [5])
    with ShardWriter(
        tmp_path / "b", vocab_size=70_000, eod_id=None, tokenizer_sha256="a" * 64
    ) as writer:
        writer.add(np.full(3, 69_999, np.int32))
        writer.finish((Source(name="words", sha256="b" * 64, rows=1),))
    assert main(["mix", a, str(tmp_path / "b"), "--output", str(tmp_path / "out")]) == 0
    assert sorted(numbers(tmp_path / "out")) == [0, 69_999]


def test_without_weights_every_document_is_there_once_in_a_seeded_order(tmp_path: Path) -> None:
    a = shard(tmp_path / "a", 0, [5] * 50)
    b = shard(tmp_path / "b", 500, [9] * 10, mask=False)
    orders = []
    for name, seed in (("one", "1"), ("same", "1"), ("two", "2")):
        assert main(["mix", a, b, "--output", str(tmp_path / name), "--seed", seed]) == 0
        orders.append(numbers(tmp_path / name))
    assert sorted(orders[0]) == [*range(50), *range(500, 510)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    for document in ShardReader(tmp_path / "one"):
        if document.tokens[0] < 500:
            assert document.mask.tolist() == [0, 1, 0, 1, 0]
        else:  # a shard without a mask counts every token
            assert document.mask.tolist() == [1] * 9


def test_shards_that_do_not_belong_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = shard(tmp_path / "a", 0, [5])
    b = shard(tmp_path / "b", 0, [5], tokenizer="c" * 64)
    out = ["--output", str(tmp_path / "out")]
    for words, message in (
        ([a, b], "different tokenizers"),
        ([f"{a}=1", a], "give every shard a weight"),
        ([str(tmp_path / "absent")], "absent.manifest.json: missing"),
    ):
        assert main(["mix", *words, *out]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["mix", f"{a}=0", *out])
    assert "not a number above 0" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def shown(tmp_path: Path, r1: str, write_rows) -> list[str]:
    """Words that show a shard of three documents."""
    output = str(tmp_path / "out")
    file = write_rows([row(number, generations=["a\nb"] * 2) for number in range(3)])
    assert main(["openr1", file, "--output", output, "--tokenizer", r1]) == 0
    return ["show", output, "--tokenizer", r1]


def test_documents_are_shown_with_what_the_loss_counts(
    shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main([*shown, "--first", "1", "--documents", "9"]) == 0
    lines = capsys.readouterr().out
    assert "\033" not in lines
    edges = re.findall(r"document (\d): (\d+) tokens, (\d+) in the loss", lines)
    assert [edge[0] for edge in edges] == ["1", "2"]
    assert {edge[2] for edge in edges} == {"4"}
    assert f"{BEGIN}{USER}What is 2 + 1?{ASSISTANT}⟦a\nb{END}⟧\n" in lines


def test_a_terminal_gets_colours(shown: list[str], tmp_path: Path) -> None:
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-m", "dms_train.data_prep.prepare", *shown]
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        env=launch.environment(),
        cwd=launch.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    text = done.stdout.replace("\r\n", "\n")
    green, grey, reset = "\033[32m", "\033[90m", "\033[0m"
    assert f"{grey}{BEGIN}{USER}What is 0 + 1?{ASSISTANT}{reset}" in text
    assert f"{green}a{reset}\n{green}b{END}{reset}" in text
    assert "⟦" not in text


def test_show_refuses_another_tokenizer_and_absent_documents(
    shown: list[str], tmp_path: Path, r1: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shown, "--first", "3"]) == 2
    assert "no document 3, only 3 exist" in capsys.readouterr().err
    other = shard(tmp_path / "other", 0, [5])
    assert main(["show", other, "--tokenizer", r1]) == 2
    assert "made with tokenizer aaaaaaaaaaaa" in capsys.readouterr().err
    digest = file_sha256(Path(r1) / "tokenizer.json")
    assert read_manifest(tmp_path / "out").tokenizer_sha256 == digest


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["show", "x", "--tokenizer", "y", "--first", "-1"], ("--first", "'-1'", "0 or more")),
        (["show", "x", "--tokenizer", "y", "--documents", "few"], ("--documents", "'few'")),
        (
            ["openr1", "x", "--output", "y", "--tokenizer", "z", "--filter", "flags"],
            ("--filter", "'flags'", "'flag'", "'reverify'", "'strict'"),
        ),
        (
            ["chat", "x", "--output", "y", "--tokenizer", "z", "--loss-on", "user"],
            ("--loss-on", "'user'", "'assistant'", "'all'"),
        ),
    ],
)
def test_a_wrong_argument_is_refused_with_what_it_may_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str], facts: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert [fact for fact in facts if fact not in error] == []
