"""When the model state captures steps with parts of prompts, with stand-ins for its parts."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_steps_are_captured_with_the_first_captured_step_of_each_memory(in_vllm):
    (found,) = in_vllm("vllm_state.calls", [{}])
    # a cache that only measures, a request before any capture, and the real cache
    assert found["measuring"] == ["forget", "compile"]
    assert found["captured"] == ["capture"]
    assert found["again"] == []
    assert found["rebound"] == ["forget", "compile"]
    assert found["captured anew"] == ["capture"]
    assert found["off"] == []


def test_what_keeps_steps_from_being_captured(in_vllm):
    (found,) = in_vllm("vllm_state.gates", [{}])
    assert found == {
        "default": True,
        "no graphs": False,
        "a layer with a window": False,
        "a CPU": False,
        "experts on data-parallel ranks": False,
        "data-parallel ranks without experts": True,
        "offloaded weights": False,
    }
