"""Shards from NumPy files of token ids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.word_tokenizer import write_word_tokenizer
from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.data_prep.prepare import main

WORDS = ("<eod>", *(f"w{number}" for number in range(1, 60)))


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs the command on files in this folder."""
    monkeypatch.chdir(tmp_path)
    write_word_tokenizer(Path("tokenizer"), WORDS)

    def run(*words: str) -> int:
        return main(["arrays", "--output", "out", "--tokenizer", "tokenizer", *words])

    return run


def test_rows_lengths_and_offsets_become_documents(arrays) -> None:
    documents = [[5, 6, 0], [7, 8, 0], [9, 0], [1, 2, 3, 0]]
    np.save("rows.npy", np.array(documents[:2]))
    np.savez("lengths.npz", ids=np.array([9, 0], dtype=np.uint8), lengths=np.array([2]))
    np.savez("offsets.npz", ids=np.array(documents[3]), offsets=np.array([0, 4]))
    assert arrays("rows.npy", "lengths.npz", "offsets.npz", "--eod-id", "0") == 0
    reader, manifest = ShardReader(Path("out")), read_manifest("out")
    assert [reader[number][0].tolist() for number in range(4)] == documents
    assert (manifest.vocab_size, manifest.eod_id) == (len(WORDS), 0)
    assert [(source.name, source.rows) for source in manifest.sources] == [
        ("rows.npy", 2),
        ("lengths.npz", 1),
        ("offsets.npz", 1),
    ]
    assert main(["check", "out"]) == 0


IDS = np.array([1, 2, 3, 0])
REFUSED = [
    ({"a": IDS}, [], "a.npz: holds a; give ids with lengths or offsets"),
    ({"ids": IDS, "lengths": np.array([2, 1])}, [], "cover all 4 ids"),
    ({"ids": IDS, "lengths": np.array([4, 0])}, [], "at least one token"),
    ({"ids": IDS, "lengths": np.array([5, -1])}, [], "at least one token"),
    ({"ids": IDS, "offsets": np.array([1, 4])}, [], "cover all 4 ids"),
    ({"ids": IDS, "offsets": np.array([0.0, 4.0])}, [], "must be a list of whole numbers"),
    ({"ids": IDS, "offsets": np.array([], dtype=int)}, [], "must be a list of whole numbers"),
    ({"ids": IDS / 2, "lengths": np.array([4])}, [], "ids are float64"),
    ({"ids": IDS - 5, "lengths": np.array([4])}, [], "ids from -5 to -2"),
    ({"ids": IDS + 2**33, "lengths": np.array([4])}, [], "give ids of a vocabulary"),
    ({"ids": IDS + 1000, "lengths": np.array([4])}, [], "token id 1003 is outside the vocabulary"),
    ({"ids": IDS, "lengths": np.array([2, 2])}, ["--eod-id", "0"], "document 1 ends in token 2"),
    ({"ids": np.array([{}]), "lengths": np.array([1])}, [], "not a NumPy file of numbers"),
]


@pytest.mark.parametrize(("content", "more", "message"), REFUSED)
def test_unfit_arrays_are_refused_in_one_line(arrays, capsys, content, more, message) -> None:
    np.savez("a.npz", **content)
    assert arrays("a.npz", *more) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path.cwd().glob("out*"))


def test_other_files_are_refused(arrays, capsys) -> None:
    Path("text.npy").write_text("1 2 3")
    np.save("cube.npy", np.zeros((2, 2, 2), dtype=int))
    np.save("none.npy", np.zeros((0, 3), dtype=int))
    for name, message in (
        ("text.npy", "text.npy: not a NumPy file of numbers"),
        ("cube.npy", "cube.npy: 3 dimensions; give [documents, tokens]"),
        ("none.npy", "none.npy: no documents; nothing was written"),
        ("absent.npy", "absent.npy"),
    ):
        assert arrays(name) == 2
        assert message in capsys.readouterr().err
