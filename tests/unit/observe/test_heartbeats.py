"""Silent ranks are named, and only they."""

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
from dms_train.observe.heartbeats import Heartbeats, Report, Silent
from dms_train.observe.main_thread import MainThread, Stand
from dms_train.observe.processes import mark


class Told(MainThread):
    """What a rank hears of its main thread; those of this process share one."""

    def __init__(self) -> None:
        self.stand = Stand("works", 0.0, "step.py:1 in f")

    def look(self, reached: object, at_most: float) -> Stand:
        return self.stand


class Ranks:
    """Heartbeats of several ranks in one process, and what they found."""

    def __init__(self, folder: Path, ranks: int, patience: float) -> None:
        self.found: list[tuple[int, str | None]] = []
        self.told = threading.Event()
        self.main = [Told() for _ in range(ranks)]
        self.all = [
            Heartbeats(folder, rank, ranks, patience, self._remember(rank), self.main[rank])
            for rank in range(ranks)
        ]

    def _remember(self, rank: int):  # type: ignore[no-untyped-def]
        def hang(found: str | None) -> None:
            self.found.append((rank, found))
            self.told.set()

        return hang

    def fall_silent(self, rank: int) -> None:
        """As a stopped process: the file stays."""
        self.all[rank]._ends.set()

    def close(self) -> None:
        for heartbeats in self.all:
            heartbeats.stop()


@pytest.fixture
def ranks(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Ranks(tmp_path / "ranks", 4, patience=0.6)
    yield made
    made.close()


def test_the_rank_before_names_the_silent_ones(ranks: Ranks) -> None:
    for heartbeats in ranks.all:
        heartbeats.start()
        heartbeats.reached(7)
    for heartbeats in ranks.all:
        heartbeats._beat()
    ranks.fall_silent(1)
    ranks.fall_silent(2)
    assert ranks.told.wait(20)
    by, found = ranks.found[0]
    assert by == 0
    one = r"\(\S+, after step 7, silent for \d+ s\)"
    assert re.fullmatch(f"rank 1 {one}, rank 2 {one} did not answer", found)


def test_one_rank_says_it_and_all_end(ranks: Ranks) -> None:
    for heartbeats in ranks.all:
        heartbeats.start()
    ranks.fall_silent(1)
    while len(ranks.found) < 3:  # bounded by the test's time limit
        time.sleep(0.05)
    assert {rank for rank, _ in ranks.found} == {0, 2, 3}
    spoken = [found for _, found in ranks.found if found is not None]
    assert spoken
    assert all(found.startswith("rank 1 ") for found in spoken)
    assert ranks.found[-1][1] is None


def test_what_an_earlier_run_said_ends_nothing(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "said").touch()
    os.utime(folder / "said", (1, 1))
    for heartbeats in ranks.all:
        heartbeats.start()
    time.sleep(0.5)  # several looks
    assert ranks.found == []


def test_ranks_that_beat_or_left_are_not_named(ranks: Ranks) -> None:
    for heartbeats in ranks.all:
        heartbeats.start()
    ranks.all[3].stop()
    assert not ranks.told.wait(2)


def test_files_of_an_earlier_run_do_not_count(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    old = tmp_path / "ranks" / "1"
    old.write_text("host, after step 3")
    os.utime(old, (time.time() - 9000, time.time() - 9000))
    ranks.all[0].start()
    assert ranks.all[0].silent() == []  # it may be about to start
    assert ranks.told.wait(20)
    assert ranks.found[0][1].startswith("rank 1 (no step known, silent for ")
    assert "rank 2" not in ranks.found[0][1]


def test_what_an_earlier_run_left_is_not_believed(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    old = tmp_path / "ranks" / "1"
    old.write_text(json.dumps(asdict(Report("host", 3, "stands", "tokens.py:1 in f", 99.0))))
    os.utime(old, (time.time() - 9000, time.time() - 9000))
    ranks.all[0].start()
    assert ranks.all[0].stuck() is None


def test_every_standing_rank_is_named_and_where(ranks: Ranks) -> None:
    for number, main in enumerate(ranks.main):
        main.stand = Stand(
            "stands" if number in (0, 2) else "waits", 9.0, f"tokens.py:{number} in f"
        )
    for heartbeats in ranks.all:
        heartbeats.reached(7)
        heartbeats.folder.mkdir(exist_ok=True)
        heartbeats._beat()
    found = [heartbeats.stuck() for heartbeats in ranks.all]
    assert found[0] is found[2] is None  # the ranks before them speak, and all ranks do not wait
    assert found[1] == found[3]
    one = r"\(\S+, after step 7\) lives but has not gone on for 9 s, at tokens.py"
    assert re.fullmatch(f"rank 0 {one}:0 in f; rank 2 {one}:2 in f", str(found[1]))


def test_who_waits_is_named_only_when_all_do(ranks: Ranks) -> None:
    places = ["a.py:1 in f", "a.py:1 in f", "b.py:2 in g", "a.py:1 in f"]
    for number, main in enumerate(ranks.main):
        main.stand = Stand("waits", 9.0, places[number])
    ranks.main[2].stand = Stand("works", 0.0, places[2])
    for _ in range(2):
        for heartbeats in ranks.all:
            heartbeats.folder.mkdir(exist_ok=True)
            heartbeats._beat()
        if ranks.main[2].stand.kind == "works":
            assert [heartbeats.stuck() for heartbeats in ranks.all] == [None] * 4
            ranks.main[2].stand = Stand("waits", 9.0, places[2])
    found = ranks.all[0].stuck()
    assert str(found).endswith(": ranks 0-1, 3 at a.py:1 in f; rank 2 at b.py:2 in g")


@pytest.fixture
def other(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Rank 2 of four as a process of its own, and the heartbeats of rank 0."""
    process = subprocess.Popen(["sleep", "600"])
    heartbeats = Heartbeats(tmp_path, 0, 4, patience=600.0, hang=lambda _: None)
    heartbeats._beat()
    report = Report(socket.gethostname(), 7, "waits", "a.py:1 in f", 0.0, mark(process.pid))
    (tmp_path / "2").write_text(json.dumps(asdict(report)))
    yield process, heartbeats
    process.kill()
    process.wait()


def test_a_process_that_is_gone_is_named_at_the_second_look(other) -> None:  # type: ignore[no-untyped-def]
    process, heartbeats = other
    assert [heartbeats.ended() for _ in range(3)] == [None] * 3
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as long as nobody asks
    assert heartbeats.ended() is None
    assert re.fullmatch(r"rank 2 \(\S+, after step 7\)", str(heartbeats.ended()))
    process.wait()
    assert heartbeats.ended() is not None


def test_the_end_of_a_process_ends_the_run_long_before_its_silence(other, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    process, heartbeats = other
    told = threading.Event()
    found: list[str] = []

    def hang(what: str) -> None:
        found.append(what)
        told.set()

    monkeypatch.setattr("dms_train.observe.heartbeats._EVERY_SECONDS", 0.05)
    heartbeats.hang = hang
    heartbeats.start()
    os.utime(heartbeats._file(2))
    assert not told.wait(0.5)
    process.kill()
    assert told.wait(20)
    assert re.fullmatch(r"rank 2 \(\S+, after step 7\) has ended", found[0])


def test_who_left_in_order_and_who_is_elsewhere_is_not_named(other, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
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


def test_who_cannot_be_seen_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Sees the next rank silent or not as a list says, one entry for each look."""

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
def test_a_pause_of_all_ranks_is_no_silence(tmp_path: Path, looks: list[bool], alarms: int) -> None:
    found: list[str] = []
    heartbeats = Scripted(tmp_path, 0, 2, patience=1.0, hang=found.append)
    heartbeats.script = [False, *looks, False]
    heartbeats._ends.wait = heartbeats.wait  # type: ignore[method-assign, assignment]
    heartbeats._watch()
    assert len(found) == alarms
