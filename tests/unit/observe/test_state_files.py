"""The state files of a run folder."""

from __future__ import annotations

from pathlib import Path

from dms_train.observe.state_files import StateFiles


def fail(files: StateFiles, rank: int, attempt: str, error: Exception) -> None:
    try:
        raise error
    except type(error) as raised:
        files.failed(rank, attempt, raised, [str(raised)])


class PeerLost(RuntimeError):
    """Named like the error of ranks that only saw another one end."""


def test_a_new_start_removes_the_mark_of_a_stop(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.begin()
    files.stopped(7)
    assert (tmp_path / "state" / "STOPPED").read_text() == "step 7\n"
    files.begin()
    assert not (tmp_path / "state" / "STOPPED").exists()
    assert (tmp_path / "state" / "heartbeat").is_file()


def test_a_finished_stage_stays_finished_with_its_first_step(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert not files.is_done("retrofit")
    files.done("retrofit", 5)
    files.done("retrofit", 9)
    assert files.is_done("retrofit")
    assert (tmp_path / "state" / "retrofit.done").read_text() == "step 5\n"


def test_marks_of_former_stage_names_count(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.begin()
    (tmp_path / "state" / "validate.done").touch()
    assert files.is_done("validate_export")
    assert not files.is_done("run_tasks")
    (tmp_path / "state" / "evaluate.done").touch()
    assert files.is_done("run_tasks")


def test_the_root_cause_is_not_the_rank_that_lost_its_peer(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert files.root_cause() is None
    fail(files, 0, "7.0", ValueError("of an attempt before"))
    fail(files, 0, "7.1", PeerLost("another rank ended"))
    fail(files, 1, "7.1", OSError("disk full"))
    cause = files.root_cause()
    assert cause is not None
    assert (cause["rank"], cause["error"], cause["message"]) == (1, "OSError", "disk full")
    assert "disk full" in cause["traceback"][-1]


def test_a_refusal_is_stored_with_its_message(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.refused(["error: a: missing", "error: b: missing"])
    assert (tmp_path / "state" / "REFUSED").read_text() == "error: a: missing\nerror: b: missing\n"
