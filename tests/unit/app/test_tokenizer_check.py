"""A run says at its start that a tokenizer is missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dms_train.app.preparation import _tokenizer_hash
from dms_train.app.start_point import find_start
from dms_train.cli.config_source import compose
from dms_train.config.build import ConfigError
from tests.support import piece_tokenizer, refusals

SCRATCH = ("model=scratch", "stage=pretrain", "data.paths=[none]")


def hashed(*words: str) -> str | None:
    config = compose(list(words))
    return _tokenizer_hash(config, find_start(config))


def test_a_missing_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    refusals.write_model(tmp_path / "model", tmp_path / "empty")
    for words in (SCRATCH, ("stage=pretrain", "data.paths=[none]", f"model.path={tmp_path}/model")):
        caplog.clear()
        assert hashed(*words) is None
        (line,) = caplog.messages
        assert line.startswith("no tokenizer (")
        assert line.endswith("exports take and return token ids only")


def test_a_tokenizer_is_named_by_its_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = piece_tokenizer.write_tokenizer(tmp_path)
    right = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert hashed(*SCRATCH, f"model.tokenizer={folder}") == right
    assert not caplog.messages


def test_a_tokenizer_that_is_not_there_or_not_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*: no tokenizer\.json; correct"):
        hashed(*SCRATCH, f"model.tokenizer={tmp_path}")
    refusals.write_model(tmp_path / "model", tmp_path)
    words = ("stage=pretrain", "data.paths=[none]", f"model.path={tmp_path}/model")
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*: the tokenizer is that of"):
        hashed(*words, f"model.tokenizer={tmp_path}")
