"""Errors inside the engine: logged with their cause, and the server goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from dms_train.observe import log
from dms_train.server import worker
from tests.support import served_model
from tests.support.served_model import wait_for
from tests.unit.server.test_streams import open_stream

SHORT = {"prompt": "the", "max_tokens": 2}


def fails(*_arguments, **_options):
    raise RuntimeError("a broken kernel")


def test_the_log_has_the_cause_of_a_failed_step(model, monkeypatch):
    stream = io.StringIO()
    log.configure(stream=stream)
    with served_model.serving(model) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine._runner, "step", fails)
            assert server.ask("/v1/completions", SHORT)[0] == 500
        assert server.ask("/v1/completions", SHORT)[0] == 200
    line = "error: a step of the engine failed - RuntimeError: a broken kernel\n"
    assert f"{line}Traceback (most recent call last):" in stream.getvalue()


def test_a_request_that_cannot_be_freed_does_not_end_the_engine(model, monkeypatch):
    with served_model.serving(model, engine={"max_num_seqs": 2}) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine._runner.cache, "free", fails)
            open_stream(server).close()
            wait_for(lambda: server.engine.unfinished == 0)
        assert server.ask("/v1/completions", SHORT)[0] == 200
        assert server.engine.free_batch_slots == 1


def test_a_step_and_the_free_after_it_fail_once_for_each_request(model, monkeypatch):
    """Four failures, then one that succeeds, then four again: the server goes on."""
    with served_model.serving(model) as server:
        for count in (4, 8):
            with monkeypatch.context() as patch:
                patch.setattr(server.engine._runner, "step", fails)
                patch.setattr(server.engine._runner.cache, "free", fails)
                answers = [server.ask("/v1/completions", SHORT)[0] for _ in range(4)]
            assert answers == [500] * 4
            assert server.gauge("dms_failed_steps") == count
            assert server.ask("/health")[0] == 200
            assert server.ask("/v1/completions", SHORT)[0] == 200


class Scripted:
    """An engine whose steps return outputs or raise, in order."""

    allocated_bytes = 0

    def __init__(self, *steps):
        self._steps = iter(steps)

    def step(self):
        found = next(self._steps)
        if isinstance(found, Exception):
            raise found
        return found

    def has_request(self, request_id):
        return True

    def abort(self, request_id):
        pass

    def live_positions(self, request_id):
        raise RuntimeError("positions cannot be read")


def thread_with(engine, monkeypatch, **tickets):
    """A thread that is not started, its deliveries and its pauses."""
    delivered, pauses = [], []
    thread = worker.EngineThread(engine)
    thread._tickets.update(tickets)
    thread._on_broken = lambda: None
    monkeypatch.setattr(thread, "_call_on_loop", lambda _, updates=(): delivered.extend(updates))
    monkeypatch.setattr(worker.time, "sleep", pauses.append)
    return thread, delivered, pauses


def output(request_id, *, finished):
    return SimpleNamespace(request_id=request_id, finished=finished)


def ticket(*, wants_positions=False):
    return SimpleNamespace(wants_positions=wants_positions, request_id=None)


def test_what_a_step_finished_before_its_failure_is_delivered(monkeypatch):
    ended, bad = ticket(), ticket(wants_positions=True)
    step = [output("a", finished=True), output("b", finished=False)]
    thread, delivered, _ = thread_with(Scripted(step), monkeypatch, a=ended, b=bad)
    thread._step()
    assert [(item.ticket, item.failure is None) for item in delivered] == [
        (ended, True),
        (bad, False),
    ]


def test_only_a_failed_step_is_followed_by_a_pause(monkeypatch):
    good = [output("a", finished=False)]
    engine = Scripted(RuntimeError("once"), good, good)
    thread, _, pauses = thread_with(engine, monkeypatch, a=ticket(), b=ticket())
    thread._step()
    assert len(pauses) == 1
    thread._tickets["a"] = ticket()
    thread._step()
    thread._step()
    assert len(pauses) == 1


@pytest.mark.parametrize(("returned", "broken"), [(2, True), (3, False)])
def test_steps_that_return_tokens_prove_that_the_engine_works(returned, broken, monkeypatch):
    good, bad = [output("a", finished=False)], [RuntimeError("no")]
    engine = Scripted(*bad * 4, *[good] * returned, *bad)
    thread, _, _ = thread_with(engine, monkeypatch)
    for _ in range(5 + returned):
        thread._tickets["a"] = ticket()
        thread._step()
    assert (thread.broken is not None) == broken
