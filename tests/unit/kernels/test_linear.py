"""The products of a decode step and its sampling, in Triton's interpreter, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dms_train.kernels import dispatch
from dms_train.kernels.layers.types import EmbeddingTables
from dms_train.method.splitmix import uniform

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if not dispatch.is_supported(DEVICE):
    pytest.skip("needs triton", allow_module_level=True)

triton_linear = pytest.importorskip("dms_train.kernels.layers.triton_linear")
triton_embed = pytest.importorskip("dms_train.kernels.layers.triton_embed")
triton_sample = pytest.importorskip("dms_train.kernels.layers.triton_sample")

EPSILON = 1e-5


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, device=DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def normed(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return a residual stream as the product before it leaves it."""
    after = triton_linear.normed_input(x, EPSILON)
    after.scaled.copy_(x * weight)
    for number, block in enumerate(x.split(triton_linear.ROWS, 1)):
        after.squares[number] = block.square().sum(1)
    return after


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 64, 64), (3, 200, 96), (17, 70, 300), (65, 40, 64), (2, 6400, 32), (2, 6400, 70)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_a_normalised_input(m: int, n: int, k: int, bias: bool) -> None:
    torch.manual_seed(m + n)
    x, norm, weight = normal(m, k), normal(k), normal(n, k, scale=0.1)
    added = normal(n) if bias else None
    memory = triton_linear.linear_workspace(m, DEVICE)
    out = triton_linear.linear(normed(x, norm), weight, memory, out=normal(m, n), bias=added)
    wide = F.rms_norm(x.double(), (k,), norm.double(), EPSILON)
    close(out, F.linear(wide, weight.double(), None if added is None else added.double()))
    assert not memory.arrived.any()


@pytest.mark.parametrize(("m", "f", "k"), [(1, 64, 64), (5, 100, 130), (70, 33, 64)])
def test_swiglu_behind_a_pair_of_products(m: int, f: int, k: int) -> None:
    torch.manual_seed(m)
    x, norm, weight = normal(m, k), normal(k), normal(2 * f, k, scale=0.1)
    memory = triton_linear.linear_workspace(m, DEVICE)
    out = triton_linear.swiglu_linear(normed(x, norm), weight, memory, out=normal(m, f))
    wide = F.rms_norm(x.double(), (k,), norm.double(), EPSILON) @ weight.double().T
    close(out, F.silu(wide[:, :f]) * wide[:, f:])


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 64), (4, 130, 300), (3, 64, 2100), (66, 70, 1100)]
)
def test_a_product_added_to_the_residual_stream(m: int, n: int, k: int) -> None:
    """Split products leave their counters at 0, so that a second call adds the same again."""
    torch.manual_seed(n)
    x, weight, norm, residual = normal(m, k), normal(n, k, scale=0.1), normal(n), normal(m, n)
    memory, after = (
        triton_linear.linear_workspace(m, DEVICE),
        triton_linear.normed_input(residual, 0.0),
    )
    expected = residual.double()
    for _ in range(2):
        triton_linear.add_linear(x, weight, memory, residual=residual, norm=norm, after=after)
        expected = expected + x.double() @ weight.double().T
        close(residual, expected)
        close(after.scaled, expected * norm.double())
        close(after.squares.sum(0) / n, expected.square().mean(1))
        assert not memory.arrived.any()


# tokens, outputs and channels of products whose programs hold their weights
HELD = [(1, 768, 4096), (9, 3072, 1024), (16, 3050, 1024)]


@pytest.mark.parametrize(("m", "n", "k"), HELD)
def test_products_of_programs_that_hold_their_weights(m: int, n: int, k: int) -> None:
    torch.manual_seed(m)
    assert triton_linear._tiling(m, n, k, 2, pair=False, adds=True).held
    x, weight, norm, bias = (normal(*shape).half() for shape in ((m, k), (n, k), (n,), (n,)))
    residual, memory = normal(m, n).half(), triton_linear.linear_workspace(m, DEVICE)
    after, before = triton_linear.normed_input(residual, 0.0), residual.double()
    scaled = weight * 0.1
    triton_linear.add_linear(x, scaled, memory, residual=residual, norm=norm, after=after)
    product = x.double() @ scaled.double().T
    torch.testing.assert_close(residual.double(), before + product, rtol=2e-3, atol=2e-2)
    one = normal(k).half()
    out = triton_linear.linear(normed(x, one), scaled, memory, out=residual.clone(), bias=bias)
    wide = F.linear((x * one).double(), scaled.double())
    wide = wide / (x.double().square().mean(1, keepdim=True) + EPSILON).sqrt() + bias.double()
    torch.testing.assert_close(out.double(), wide, rtol=2e-3, atol=2e-2)
    assert not memory.arrived.any()


@pytest.mark.parametrize("m", [1, 16, 17, 64, 200])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_workspace_holds_the_parts_of_every_product(m: int, itemsize: int) -> None:
    memory, held = triton_linear.linear_workspace(m, torch.device("cpu")), 0
    blocks = -(-m // 64)
    for n in range(1, 14_000, 61):
        for k in range(96, 9_300, 160):
            for adds in (False, True):
                cut = triton_linear._tiling(m, n, k, itemsize, pair=False, adds=adds)
                if cut.split > 1:
                    tiles = -(-n // cut.rows) * blocks
                    width = triton_linear._padded(m)
                    assert tiles * cut.split * cut.rows * width <= memory.parts.numel()
                    assert tiles <= memory.arrived.numel()
                assert not cut.held or cut.split * cut.columns == k
                held += cut.held
    assert (held > 0) == (itemsize == 2 and m <= 16)


def test_a_step_starts_with_known_and_with_sampled_tokens() -> None:
    torch.manual_seed(0)
    width, d = 150, 6
    tables = EmbeddingTables(
        normal(20, width), normal(9, d), normal(9, d), torch.tensor([4, 5, 6], device=DEVICE)
    )
    tokens, position, rows = torch.tensor(
        [[7, -1, -1, 3], [8, 0, 2, 0], [1, 2, 0, -1]], device=DEVICE
    )
    norm, residual, (cos, sin) = normal(width), normal(4, width), normal(2, 4, d)
    after = triton_linear.normed_input(residual, EPSILON)
    triton_embed.embed(
        tokens, position, rows, tables, norm=norm, residual=residual, after=after, cos=cos, sin=sin
    )
    expected = tables.embedding[torch.tensor([7, 6, 4, 3], device=DEVICE)]
    assert torch.equal(residual, expected)
    assert torch.equal(cos, tables.cos[position])
    assert torch.equal(sin, tables.sin[position])
    close(after.scaled, expected.double() * norm.double())
    close(after.squares.sum(0), expected.double().square().sum(1))


@pytest.mark.parametrize("vocab", [5, 4096, 9000])
def test_tokens_are_drawn_with_the_numbers_of_the_generator(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = normal(5, vocab, scale=3.0)
    logits[3] = 1.0  # of equal scores the first one wins
    temperature = torch.tensor([0.0, 1.0, 0.6, 0.0, 3.0], dtype=torch.float64, device=DEVICE)
    keys = torch.randint(-(2**62), 2**62, (5,), device=DEVICE)
    rows = torch.tensor([2, -1, 0, 1, 3], device=DEVICE)
    tokens, last = torch.zeros_like(rows), torch.full((4,), -7, device=DEVICE)
    memory = triton_sample.sample_workspace(8, DEVICE)
    triton_sample.sample(logits, temperature, keys, rows, tokens=tokens, last=last, memory=memory)
    noise = -(-uniform(keys, vocab).log()).log()
    drawn = (logits.double() / temperature[:, None].clamp(min=1e-9) + noise).argmax(-1)
    expected = torch.where(temperature > 0, drawn, logits.argmax(-1))
    expected[3] = 0
    assert tokens.tolist() == expected.tolist()
    assert last.tolist() == [int(tokens[i]) for i in (2, 3, 0, 4)]
    assert not memory.arrived.any()
