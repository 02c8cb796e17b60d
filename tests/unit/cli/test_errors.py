"""Exit codes and error lines of every command."""

from __future__ import annotations

import errno
import json

import pytest

from dms_train.app import failures, launcher, session
from dms_train.app.failures import PeerLost, lost_peer
from dms_train.app.teacher_check import TeacherError
from dms_train.cli import errors
from dms_train.cli.errors import run_main
from dms_train.config.build import ConfigError
from dms_train.data.errors import DataError
from dms_train.observe.state_files import StateFiles
from dms_train.training.errors import KLLimitError


def failing(error: BaseException):
    def command() -> None:
        raise error

    return command


def test_success_and_own_exit_codes():
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 7) == 7


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("a: b", "c: d"), "config error: a: b\nconfig error: c: d\n"),
        (DataError("tokens.bin: too\nshort"), "error: tokens.bin: too short\n"),
        (FileNotFoundError("x: no such directory"), "error: x: no such directory\n"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), "error: f: No space left"),
        (PeerLost("rank 3: gone"), "error: rank 3: gone\n"),
    ],
)
def test_expected_failures_are_lines_and_code_2(error, text, monkeypatch, capsys):
    monkeypatch.setattr(errors, "_PATIENCE_SECONDS", 0)
    assert run_main(failing(error)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(text)
    assert captured.out == ""


def test_a_report_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DMS_ATTEMPT", "12.0")
    assert launcher.attempt() == "12.0"
    (tmp_path / "errors").touch()  # in place of the folder
    session._say_why(ConfigError("a: b"), StateFiles(tmp_path), begun=False)


@pytest.mark.parametrize(
    ("rank", "error", "begun", "refused"),
    [
        ("0", ConfigError("a: b"), False, "config error: a: b\n"),
        ("3", ConfigError("a: b"), False, None),
        ("0", ConfigError("a: b"), True, None),
        ("0", OSError(errno.ENOSPC, "full"), False, None),
        ("0", TeacherError("a: b"), True, "config error: a: b\n"),
        ("0", KLLimitError("a"), True, "error: a\n"),
        ("3", KLLimitError("a"), True, None),
    ],
)
def test_every_rank_records_why_it_ends_and_rank_0_a_refusal(
    rank, error, begun, refused, tmp_path, monkeypatch
):
    monkeypatch.setenv("DMS_ATTEMPT", "12.0")
    monkeypatch.setenv("RANK", rank)
    session._say_why(error, StateFiles(tmp_path), begun=begun)
    described = json.loads((tmp_path / "errors" / f"12.0-rank{rank}.json").read_text())
    assert described["error"] == type(error).__name__
    assert described["message"] == " ".join(failures.describe(error))
    state = tmp_path / "state" / "REFUSED"
    assert (state.read_text() if state.exists() else None) == refused


def test_interrupt_is_130(capsys):
    assert run_main(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("bug"), KeyError("bug"), RuntimeError("bug")])
def test_bugs_propagate(error):
    with pytest.raises(type(error)):
        run_main(failing(error))


@pytest.mark.parametrize(
    ("rank", "error", "waits", "text"),
    [
        ("0", ConfigError("a"), False, "config error: a\n"),
        ("3", ConfigError("a"), True, "[rank 3] config error: a\n"),
        ("3", DataError("a"), True, "[rank 3] error: a\n"),
        ("3", OSError(errno.ENOSPC, "full"), False, "[rank 3] error: full\n"),
        ("0", PeerLost("rank 0: gone"), True, "error: rank 0: gone\n"),
    ],
)
def test_other_ranks_wait_before_they_print(rank, error, waits, text, monkeypatch, capsys):
    naps: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", naps.append)
    monkeypatch.setenv("RANK", rank)
    assert run_main(failing(error)) == 2
    assert bool(naps) == waits
    assert capsys.readouterr().err == text


class DistNetworkError(RuntimeError):
    """Stands for the class of this name in torch.distributed."""


def test_a_lost_peer_is_recognised():
    assert lost_peer(DistNetworkError("any"))
    assert lost_peer(RuntimeError("[gloo/pair.cc:534] Connection closed by peer [::1]:29500"))
    assert lost_peer(RuntimeError("Timed out waiting 600000ms for recv operation to complete"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
