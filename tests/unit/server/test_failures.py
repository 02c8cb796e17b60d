"""Errors inside the engine: logged with their cause, and the server goes on."""

from __future__ import annotations

import io

from dms_train.observe import log
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
        assert server.engine.free_rows == 1


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
