"""Meters, log lines and progress displays."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from dms_train.observe import log, progress
from dms_train.observe.metrics import Means, Throughput, duration
from dms_train.observe.progress import BarProgress, LineProgress, NoProgress, open_progress


class Clock:
    """Advances on request only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream whose isatty() is True."""

    def isatty(self) -> bool:
        return True


def test_means_are_weighted_and_start_over():
    means = Means()
    means.add({"a": 1.0, "b": 5.0})
    means.add({"a": 4.0}, weight=2)
    assert means.take() == {"a": 3.0, "b": 5.0}
    assert means.take() == {}


def test_throughput_over_its_window():
    clock = Clock()
    meter = Throughput(window=2, clock=clock)
    rates = []
    for seconds in (1, 1, 4, 4):
        clock.now += seconds
        rates.append(meter.step(8))
    assert rates == [8.0, 8.0, 16 / 5, 2.0]


def test_throughput_leaves_pauses_out():
    clock = Clock()
    meter = Throughput(clock=clock)
    clock.now += 1
    meter.step(8)
    clock.now += 1000
    meter.pause()
    clock.now += 1
    assert meter.step(8) == 8.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.4, "59s"), (187, "3m07s"), (7500, "2h05m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_log_lines_of_rank_zero():
    stream = io.StringIO()
    logger = log.configure(0, stream)
    logger.info("two\nlines")
    log.logger().warning("careful")
    first, second = stream.getvalue().splitlines()
    assert first[8:] == " two lines"
    assert second[8:] == " warning: careful"


def test_other_ranks_only_warn():
    stream = io.StringIO()
    logger = log.configure(3, stream)
    logger.info("hidden")
    logger.error("shown")
    assert stream.getvalue()[8:] == " [rank 3] error: shown\n"


def test_an_exception_is_named_in_its_line_and_traced_below():
    stream = io.StringIO()
    logger = log.configure(0, stream)
    try:
        raise ValueError("odd\nvalue")
    except ValueError:
        logger.exception("a step failed")
    first, second, *_, last = stream.getvalue().splitlines()
    assert first[8:] == " error: a step failed - ValueError: odd value"
    assert second == "Traceback (most recent call last):"
    assert last == "value"


def test_a_library_repeats_itself_now_and_then_only():
    stream = io.StringIO()
    log.configure(0, stream)
    log.adopt("some.library")
    library = logging.getLogger("some.library")
    for number in range(1000):
        library.error("no descriptors are left\nsocket %d", number)
    library.error("something else")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("error: no descriptors are left socket 0")
    assert second.endswith("error: something else")


def test_configuring_twice_does_not_double_lines():
    stream = io.StringIO()
    log.configure(0, stream)
    log.configure(0, stream).info("once")
    assert stream.getvalue().count("once") == 1


def test_log_follows_a_replaced_stderr(monkeypatch):
    logger = log.configure()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logger.info("here")
    assert "here" in sys.stderr.getvalue()


def test_lines_now_and_then_and_at_the_end():
    clock, stream = Clock(), io.StringIO()
    view = LineProgress(stream, every_seconds=10, clock=clock)
    view.start("retrofit", 12, done=2)
    for done in range(3, 13):
        clock.now += 4
        view.step(done, {"loss": 0.5, "kl": 0.25, "target_cr": 2, "cr": 1.5, "other": 1})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "retrofit: 10 steps"
    assert lines[1] == "retrofit 5/12  loss 0.5000  KL 0.2500  CR target 2.00  CR 1.50  28s left"
    assert lines[-1].startswith("retrofit 12/12")
    assert len(lines) == 5


def test_choice_of_display(monkeypatch):
    assert isinstance(open_progress(False), NoProgress)
    assert isinstance(open_progress(True, io.StringIO()), LineProgress)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(open_progress(True, Terminal()), LineProgress)


def test_bar_shows_stage_and_values(monkeypatch):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    view = open_progress(True)
    assert isinstance(view, BarProgress)
    view.start("retrofit", 3)
    for done in (1, 2, 3):
        view.step(done, {"loss": 0.5, "tokens_per_second": 12345.0})
    view.close()
    shown = terminal.getvalue()
    for text in ("retrofit", "3/3", "loss 0.5000", "tok/s 12,345"):
        assert text in shown


def test_nothing_is_shown_by_other_ranks():
    view = NoProgress()
    view.start("a", 1)
    view.step(1, {})
    view.close()
    assert progress.describe({"loss": 1.0, "unknown": 2.0}) == "loss 1.0000"
