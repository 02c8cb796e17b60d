"""Silent ranks are named, and only they."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dms_train.observe.heartbeats import Heartbeats, Silent


class Ranks:
    """Heartbeats of several ranks in one process, and what they found."""

    def __init__(self, folder: Path, ranks: int, patience: float) -> None:
        self.found: list[tuple[int, list[Silent]]] = []
        self.told = threading.Event()
        self.all = [
            Heartbeats(folder, rank, ranks, patience, self._remember(rank)) for rank in range(ranks)
        ]

    def _remember(self, rank: int):  # type: ignore[no-untyped-def]
        def hang(silent: list[Silent]) -> None:
            self.found.append((rank, silent))
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
    by, silent = ranks.found[0]
    assert by == 0
    assert [entry.rank for entry in silent] == [1, 2]
    assert "after step 7" in str(silent[0])


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
    assert [entry.rank for entry in ranks.found[0][1]] == [1]


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
    found: list[list[Silent]] = []
    heartbeats = Scripted(tmp_path, 0, 2, patience=1.0, hang=found.append)
    heartbeats.script = [False, *looks, False]
    heartbeats._ends.wait = heartbeats.wait  # type: ignore[method-assign, assignment]
    heartbeats._watch()
    assert len(found) == alarms
