"""Silent and stalled ranks are named, and no other ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from dms_train.observe import processes
from dms_train.observe.heartbeats import Heartbeats, Phase, Report, Silent
from dms_train.observe.processes import mark

PATIENCE = 60.0
CHECKS = 3  # in a row, before a late rank counts as silent


class Ranks:
    """Heartbeats of several ranks in one process, which check when a test calls them.

    Time passes by setting the times of files.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.found: list[tuple[int, str | None]] = []
        self.all = [
            Heartbeats(folder, rank, ranks, PATIENCE, self._remember(rank)) for rank in range(ranks)
        ]
        folder.mkdir()

    def _remember(self, rank: int):  # type: ignore[no-untyped-def]
        return lambda found: self.found.append((rank, found))

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.all[rank]._beat()

    def stop_beating(self, rank: int, seconds: float = 2 * PATIENCE) -> None:
        """As a stopped process: the file stays."""
        file = self.all[rank]._file(rank)
        os.utime(file, (time.time() - seconds,) * 2)

    def without_progress(self, rank: int, phase: Phase, seconds: float = 1.5 * PATIENCE) -> None:
        """Its heartbeat after so many seconds in a phase."""
        heartbeats = self.all[rank]
        heartbeats._phase = phase
        heartbeats._last = (time.monotonic(), heartbeats._progress, seconds)
        heartbeats._beat()

    def close(self) -> None:
        for heartbeats in self.all:
            heartbeats.stop()


@pytest.fixture
def ranks(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Ranks(tmp_path / "ranks", 4)
    yield made
    made.close()


def test_the_rank_before_names_the_silent_ones(ranks: Ranks) -> None:
    for heartbeats in ranks.all:
        heartbeats.reached(7)
    ranks.beat(0, 1, 2, 3)
    ranks.stop_beating(1)
    ranks.stop_beating(2)
    assert [ranks.all[3].check() for _ in range(CHECKS + 1)] == [False] * (CHECKS + 1)
    assert [ranks.all[0].check() for _ in range(CHECKS)] == [False, False, True]
    ((by, found),) = ranks.found
    assert by == 0
    one = r"\(\S+, after step 7, silent for \d+ s\)"
    assert re.fullmatch(f"rank 1 {one}, rank 2 {one} did not answer", str(found))


def test_one_rank_reports_and_all_end(ranks: Ranks) -> None:
    ranks.beat(0, 1, 2, 3)
    ranks.stop_beating(1)
    ranks.stop_beating(3)
    assert [ranks.all[2].check() for _ in range(CHECKS - 1)] == [False] * (CHECKS - 1)
    while not ranks.all[0].check():
        assert ranks.found == []
    assert ranks.all[2].check()  # at which it would report the same
    assert ranks.all[3].check()
    (first, found), *others = ranks.found
    assert first == 0
    assert str(found).startswith("rank 1 ")
    assert others == [(2, None), (3, None)]


def test_a_report_of_an_earlier_run_ends_nothing(ranks: Ranks, tmp_path: Path) -> None:
    report = tmp_path / "ranks" / "reported"
    report.touch()
    os.utime(report, (1, 1))
    for heartbeats in ranks.all:
        heartbeats.start()
    assert [heartbeats.check() for heartbeats in ranks.all] == [False] * 4


def test_ranks_that_beat_or_left_are_not_named(ranks: Ranks) -> None:
    ranks.beat(0, 1, 2, 3)
    ranks.all[3].stop()
    for _ in range(CHECKS + 1):
        ranks.stop_beating(0, PATIENCE - 10)  # a little late
        assert [heartbeats.check() for heartbeats in ranks.all[:3]] == [False] * 3
    assert ranks.found == []


def test_files_of_an_earlier_run_do_not_count(ranks: Ranks, tmp_path: Path) -> None:
    old = tmp_path / "ranks" / "1"
    old.write_text("host, after step 3")
    os.utime(old, (time.time() - 9000,) * 2)
    ranks.all[0].start()
    assert [ranks.all[0].check() for _ in range(CHECKS + 1)] == [False] * (CHECKS + 1)
    ranks.all[0]._began -= 2 * PATIENCE  # since then it could have started
    while not ranks.all[0].check():
        assert ranks.found == []
    ((_, found),) = ranks.found
    assert str(found).startswith("rank 1 (no step known, silent for ")
    assert "rank 2" not in str(found)


def test_a_thread_checks_until_the_run_ends(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = threading.Event()
    monkeypatch.setattr("dms_train.observe.heartbeats._EVERY_SECONDS", 0.01)
    ranks.all[0].hang = lambda _: reported.set()
    ranks.beat(1)
    ranks.all[0].start()
    ranks.all[0]._began -= 2 * PATIENCE
    ranks.stop_beating(1)
    reported.wait()


def test_files_of_an_earlier_run_are_not_used(ranks: Ranks, tmp_path: Path) -> None:
    old = tmp_path / "ranks" / "1"
    old.write_text(json.dumps(asdict(Report("host", 3, "data", "tokens.py:1 in f", 99.0))))
    os.utime(old, (time.time() - 9000, time.time() - 9000))
    ranks.all[0].start()
    assert ranks.all[0].stuck() is None


def test_every_rank_that_stalls_reading_data_is_named_with_its_stack(
    ranks: Ranks, tmp_path: Path
) -> None:
    for heartbeats in ranks.all:
        heartbeats.reached(7)
    for rank in range(4):
        ranks.without_progress(rank, "data" if rank in (0, 2) else "step")
    found = [heartbeats.stuck() for heartbeats in ranks.all]
    assert found[0] is found[2] is None  # the ranks before them report
    assert found[1] == found[3]
    one = r"\(\S+, after step 7\) has stalled for 9\d s reading data, at \S+:\d+ in [^;]*"
    assert re.fullmatch(
        f"rank 0 {one}; rank 2 {one}; stacks in \\S+/ranks/\\*.stack", str(found[1])
    )
    stack = (tmp_path / "ranks" / "2.stack").read_text()
    assert "in without_progress" in stack
    assert "test_heartbeats.py" in stack


def test_waiting_ranks_are_named_only_when_all_wait(ranks: Ranks) -> None:
    for heartbeats in ranks.all:
        heartbeats.reached(7)
    for rank in range(4):
        ranks.without_progress(rank, "other" if rank == 2 else "step")
    assert [heartbeats.stuck() for heartbeats in ranks.all] == [None] * 4
    ranks.without_progress(2, "step")
    assert [heartbeats.stuck() for heartbeats in ranks.all[1:]] == [None] * 3
    assert re.search(
        r"after step 7 all ranks wait .* 60 s: ranks 0-3 at ", str(ranks.all[0].stuck())
    )


@pytest.mark.parametrize("phase", ["data", "step"])
def test_progress_resets_the_time_of_a_phase(ranks: Ranks, phase: Phase) -> None:
    for heartbeats in ranks.all:
        heartbeats.reached(7)
    for rank in range(4):
        ranks.without_progress(rank, phase)
    for heartbeats in ranks.all:
        heartbeats.progressed()
        heartbeats._beat()
    assert [heartbeats.stuck() for heartbeats in ranks.all] == [None] * 4


def test_the_first_step_of_a_process_has_no_limit(ranks: Ranks) -> None:
    for rank in range(4):
        ranks.without_progress(rank, "step")
    assert ranks.all[0].stuck() is None


def test_a_pause_of_the_process_counts_for_little(ranks: Ranks) -> None:
    heartbeats = ranks.all[1]
    with heartbeats.phase("data"):
        heartbeats._beat()
        at, progress, seconds = heartbeats._last
        heartbeats._last = (at - 1000 * PATIENCE, progress, seconds)
        heartbeats._beat()
    assert heartbeats._own is not None
    assert 0 < heartbeats._own.seconds < PATIENCE


def test_a_phase_ends_with_its_block(ranks: Ranks) -> None:
    heartbeats = ranks.all[0]
    with heartbeats.phase("data"):
        heartbeats._beat()
        assert heartbeats._own is not None
        assert heartbeats._own.phase == "data"
    heartbeats._beat()
    assert heartbeats._own.phase == "other"


@pytest.fixture
def other(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Rank 2 of four as a process of its own, and the heartbeats of rank 0."""
    process = subprocess.Popen(["sleep", "600"])
    heartbeats = Heartbeats(tmp_path, 0, 4, patience=600.0, hang=lambda _: None)
    heartbeats._beat()
    report = Report(socket.gethostname(), 7, "step", "a.py:1 in f", 0.0, mark(process.pid))
    (tmp_path / "2").write_text(json.dumps(asdict(report)))
    yield process, heartbeats
    process.kill()
    process.wait()


def test_a_process_that_is_gone_is_named_at_the_second_look(other) -> None:  # type: ignore[no-untyped-def]
    process, heartbeats = other
    assert [heartbeats.ended() for _ in range(3)] == [None] * 3
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet
    assert heartbeats.ended() is None
    assert re.fullmatch(r"rank 2 \(\S+, after step 7\)", str(heartbeats.ended()))
    process.wait()
    assert heartbeats.ended() is not None


def test_the_end_of_a_process_ends_the_run_before_the_patience(other, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    process, heartbeats = other
    reported = threading.Event()
    found: list[str] = []

    def hang(what: str) -> None:
        found.append(what)
        reported.set()

    monkeypatch.setattr("dms_train.observe.heartbeats._EVERY_SECONDS", 0.05)
    heartbeats.hang = hang
    heartbeats.start()
    os.utime(heartbeats._file(2))
    assert not reported.wait(0.5)
    process.kill()
    assert reported.wait(20)
    assert re.fullmatch(r"rank 2 \(\S+, after step 7\) has ended", found[0])


def test_ranks_that_left_in_order_or_run_elsewhere_are_not_named(other, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process, heartbeats = other
    process.kill()
    process.wait()
    assert heartbeats.ended() is None
    report = json.loads((tmp_path / "2").read_text())
    elsewhere = {**report, "process": f"other{report['process']}"}  # a container with own numbers
    (tmp_path / "2").write_text(json.dumps(elsewhere))
    assert [heartbeats.ended() for _ in range(3)] == [None] * 3
    (tmp_path / "2").write_text(json.dumps(report))
    assert heartbeats.ended() is None
    (tmp_path / "2").unlink()
    assert heartbeats.ended() is None


def test_a_hidden_process_does_not_count_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = processes.mark()
    assert own == processes.mark(os.getpid())

    def hide(_pid: int) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(processes, "_fields", hide)
    assert processes.mark() == ""
    assert not processes.has_ended(own)


def test_a_rank_that_fails_leaves_its_file(ranks: Ranks, tmp_path: Path) -> None:
    for heartbeats in ranks.all[:2]:
        heartbeats.start()
    ranks.all[0].stop(in_order=False)
    ranks.all[1].stop()
    for heartbeats in ranks.all[:2]:
        heartbeats.stop()  # the first call counts
    assert {file.name for file in (tmp_path / "ranks").iterdir()} == {"0"}


class Scripted(Heartbeats):
    """Sees the next rank silent or not by a list, one entry for each check."""

    script: list[bool]

    def _beat(self) -> float:
        return 0.0

    def _age(self, rank: int, now: float) -> Silent | None:
        return Silent(rank, 99.0, "host") if self.script[0] else None

    def wait(self, _seconds: float) -> bool:
        self.script.pop(0)
        return not self.script


@pytest.mark.parametrize(
    ("looks", "alarms"),
    [([True, True, True], 1), ([True, True, False] * 3, 0), ([True, False] * 4, 0)],
)
def test_a_pause_of_all_ranks_is_not_reported(
    tmp_path: Path, looks: list[bool], alarms: int
) -> None:
    found: list[str] = []
    heartbeats = Scripted(tmp_path, 0, 2, patience=1.0, hang=found.append)
    heartbeats.script = [False, *looks, False]
    heartbeats._ends.wait = heartbeats.wait  # type: ignore[method-assign, assignment]
    heartbeats._watch()
    assert len(found) == alarms


def test_a_rank_that_ends_after_a_report_reads_no_other_heartbeat(ranks: Ranks) -> None:
    for rank, heartbeats in enumerate(ranks.all):
        heartbeats.reached(7)
        ranks.without_progress(rank, "data")
    assert ranks.all[0].check()
    file = ranks.all[2]._file(2)
    file.unlink()
    file.mkdir()  # reading it fails
    assert ranks.all[1].check()
    (first, reason), second = ranks.found
    assert first == 0
    assert reason is not None
    assert second == (1, None)
