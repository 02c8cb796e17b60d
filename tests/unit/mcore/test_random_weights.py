"""Initial weights depend on the seed and on the name, and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from dms_train.mcore.model.weights import RandomWeights
from tests.support import tiny

MATRICES = [
    f"model.layers.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
STD = 0.2


def weights(seed: int) -> RandomWeights:
    return RandomWeights(tiny.architecture("llama"), seed, STD)


def test_every_seed_and_name_has_weights_of_its_own() -> None:
    found = [
        weights(seed).get(name).flatten()[:16] for seed in (0, 1, 2**32 - 1) for name in MATRICES
    ]
    for one, other in itertools.combinations(found, 2):
        assert (one != other).all()


def test_a_seed_gives_the_same_weights_again() -> None:
    for name in MATRICES:
        assert torch.equal(weights(3).get(name), weights(3).get(name))


@pytest.mark.parametrize("seed", [0, 1, 1234])
def test_matrices_are_normal_and_residual_outputs_are_scaled_down(seed: int) -> None:
    layers = tiny.architecture("llama").num_layers
    for name in MATRICES:
        expected = STD / (2 * layers) ** 0.5 if "o_proj" in name or "down_proj" in name else STD
        found = weights(seed).get(name)
        # six standard errors of both estimates
        assert abs(found.mean()) < 6 * expected / found.numel() ** 0.5
        assert abs(found.std() / expected - 1) < 6 / (2 * found.numel()) ** 0.5
