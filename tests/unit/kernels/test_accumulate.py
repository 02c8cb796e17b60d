"""DMC's merge of one token per sequence on a CPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from dms_train.method.spec import PRESETS
from tests.support import accumulate_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    "constants",
    [
        {"alpha_offset": -40.0},  # most tokens continue, beyond the newest twelve
        {"alpha_offset": 0.0, "channel": 0, "importance": "uniform"},
        {"alpha_offset": 20.0, "merge_window": 3},
    ],
    ids=["long", "uniform", "short"],
)
def test_states_are_those_of_the_whole_sequence(constants: dict, normed: bool) -> None:
    spec = PRESETS["dmc"].override(**constants)
    assert accumulate_cases.worst_state(spec, DEVICE, normed=normed) < 2e-5
