"""Values of a wrong type that Python code passes are refused in one line that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dms_train import limits
from dms_train.data.batches import BatchSource
from dms_train.data.options import DataOptions
from dms_train.data.tokens import build_datasets, build_valid_samples
from dms_train.data.writer import ShardWriter
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS, spec_from_dict
from dms_train.method.token_losses import token_loss
from dms_train.training.stages import build_stages
from tests.support import configs
from tests.support.training_loop import OPTIONS

DMS, DATA = PRESETS["dms"], {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1}


def source(**sizes: Any) -> BatchSource:
    given = {
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
    }
    return BatchSource([], **{**given, **sizes})  # type: ignore[arg-type]


def datasets(**changes: Any) -> Any:
    options = DataOptions(**{"paths": ("p",), **DATA, **changes})
    return build_datasets(
        options,
        vocab_size=9,
        eod_id=0,
        train_samples=1,
        valid_samples=0,
        seed=1,
        cache_dir="none",
    )


def stages(**changes: Any) -> Any:
    return build_stages(replace(OPTIONS, retrofit=replace(OPTIONS.retrofit, **changes)), 0)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: DMS.override(window="16"), "method.window='16': expected a whole number"),
        (lambda: DMS.override(window=16.5), "method.window=16.5: expected a whole number"),
        (lambda: DMS.override(tau="a"), "method.tau='a': expected a number"),
        (lambda: DMS.override(channel=[0]), "method.channel=[0]: expected a whole number"),
        (
            lambda: DMS.override(clear_after_rope="no"),
            "method.clear_after_rope='no': expected true or false",
        ),
        (lambda: spec_from_dict(7), "method=7: expected a mapping of constants"),  # type: ignore[arg-type]
        (lambda: spec_from_dict({"kind": ["dms"]}), "method.kind=['dms']: choose one of dmc, dms"),
        (lambda: token_loss(["lm"]), "loss=['lm']: choose one of distill, lm"),  # type: ignore[arg-type]
        (
            lambda: StepPlan(eviction="some"),  # type: ignore[arg-type]
            "eviction=some: choose one of none, soft, hard, all",
        ),
        (lambda: stages(target_cr="4"), "stage.retrofit.target_cr='4': expected a number"),
        (lambda: stages(steps_per_cr=True), "stage.retrofit.steps_per_cr=True: expected a whole"),
        (
            lambda: build_stages(replace(OPTIONS, hold={"steps": 1}), 0),  # type: ignore[arg-type]
            "stage.hold={'steps': 1}: expected HoldOptions",
        ),
        (lambda: datasets(paths="corpus"), "data.paths='corpus': expected a tuple, each item text"),
        (lambda: datasets(paths=("a", 1)), "data.paths=('a', 1): expected a tuple, each item text"),
        (lambda: datasets(weights=(1, "a")), "data.weights=(1, 'a'): expected a tuple, each item"),
        (lambda: datasets(seq_length="8"), "data.seq_length='8': expected a whole number"),
        (
            lambda: build_valid_samples(
                DataOptions(paths="p", **DATA),  # type: ignore[arg-type]
                vocab_size=9,
                seed=1,
                cache_dir="none",
            ),
            "data.paths='p': expected a tuple, each item text",
        ),
        (lambda: source(micro_batch_size="1"), "micro_batch_size='1': expected a whole number"),
        (lambda: source(data_parallel_size=1.0), "data_parallel_size=1.0: expected a whole number"),
    ],
)
def test_one_line_names_the_value(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        call()
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1, 2],),
        (np.array([1.0, 2.0]),),
        (np.array([], dtype=np.int32),),
        (np.array([1, 2]), [1, 1]),
        (np.array([1, 2]), np.array([1], dtype=np.uint8)),
    ],
)
def test_a_document_that_is_no_array_of_ids_is_refused(tmp_path: Path, arguments: Any) -> None:
    with (
        ShardWriter(
            tmp_path / "p", vocab_size=9, eod_id=None, tokenizer_sha256="a" * 64, loss_mask=True
        ) as writer,
        pytest.raises(ValueError, match="a document"),
    ):
        writer.add(*arguments)


def test_whole_numbers_are_numbers_and_none_is_unset() -> None:
    assert DMS.override(alpha_scale=50).alpha_scale == 50
    assert list(limits.problems(configs.config())) == []
    assert stages(start_cr=None)
