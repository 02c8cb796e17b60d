"""Values filled in for megatron-core equal those that torch and megatron would have made."""

from __future__ import annotations

import torch

from dms_train.mcore import compat
from tests.support.live_memory import LiveBytes


def test_state_of_adam_is_that_of_an_update_with_gradients_of_zeros(build):
    ours, theirs = (build("qwen3", "dms", dtype="bf16") for _ in range(2))
    compat.create_optimizer_state(ours._optimizer)
    for part in compat.optimizer_parts(theirs._optimizer):
        for group in part.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        part._init_optimizer_states_with_dummy_values()
    parts = [compat.optimizer_parts(engine._optimizer) for engine in (ours, theirs)]
    for mine, other in zip(*parts, strict=True):
        states = [list(part.optimizer.state.values()) for part in (mine, other)]
        assert len(states[0]) > 0
        for state, expected in zip(*states, strict=True):
            assert state.keys() == expected.keys()
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)
                assert state[name].requires_grad == expected[name].requires_grad
            assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
            assert (state["step"].item(), expected["step"].item()) == (0, 1)
            assert state["step"].device == expected["step"].device


def test_state_of_adam_takes_its_own_memory_only(build):
    engine = build("llama", "dms", dtype="bf16")
    with LiveBytes() as live:
        compat.create_optimizer_state(engine._optimizer)
    parameters = sum(p.numel() for p in engine._models[0].parameters())
    assert live.peak < 1.05 * 2 * 4 * parameters
