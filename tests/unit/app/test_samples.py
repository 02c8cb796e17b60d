"""Samples of an evaluation, whose number a stored teacher may fix."""

from __future__ import annotations

from types import SimpleNamespace

from dms_train.app.samples import evaluation_source
from dms_train.cli.config_source import compose

VIEW = SimpleNamespace(dp_size=4, dp_rank=0, pp_size=1, vp_size=None)


def test_an_evaluation_takes_whole_passes_of_all_ranks() -> None:
    config = compose(["model.path=m", "data.paths=[d]", "data.micro_batch_size=2"])
    assert evaluation_source(config, VIEW, range(19)).global_batch_size == 16
