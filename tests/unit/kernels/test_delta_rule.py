"""The chunked gated delta rule against a float64 loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dms_train.kernels.layers.delta_rule import causal_convolution, gated_delta_rule
from dms_train.kernels.options import DELTA_CHUNK as CHUNK
from dms_train.method.documents import PackedDocuments

B, G, R, K, V = 2, 2, 3, 4, 5
LENGTHS = [[CHUNK - 1, 1, 90], [150]]


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    q, k = (torch.randn(B, length, G, K, generator=draw, dtype=dtype) for _ in "qk")
    v = torch.randn(B, length, G, R, V, generator=draw, dtype=dtype)
    log_a, rate = (torch.rand(B, length, G, R, generator=draw, dtype=dtype) for _ in "ab")
    return [q, k, v, -3 * log_a, rate]


def looped(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, rate: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    state, outputs = torch.zeros(B, G, R, K, V, dtype=torch.float64), []
    for t in range(q.shape[1]):
        if first is not None:
            state = state * (first[:, t] != t)[:, None, None, None, None]
        own_q, own_k = (torch.nn.functional.normalize(x[:, t], dim=-1) for x in (q, k))
        state = state * log_a[:, t].exp()[..., None, None]
        missing = v[:, t] - torch.einsum("bgrkv,bgk->bgrv", state, own_k)
        update = torch.einsum("bgk,bgrv->bgrkv", own_k, rate[:, t][..., None] * missing)
        state = state + update
        outputs.append(torch.einsum("bgrkv,bgk->bgrv", state, own_q) / K**0.5)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 22])
def test_outputs_state_and_gradients_are_those_of_a_loop(length: int) -> None:
    own, same = ([x.requires_grad_() for x in inputs(length)] for _ in range(2))
    for got, expected in zip(gated_delta_rule(*own), looped(*same), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (gated_delta_rule(*own)[0] ** 2).sum().backward()
    (looped(*same)[0] ** 2).sum().backward()
    for got, expected in zip(own, same, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_a_sequence_may_arrive_in_pieces() -> None:
    whole = inputs(CHUNK + 30)
    expected, last = looped(*whole)
    state, outputs = None, []
    for start, stop in ((0, 20), (20, 21), (21, CHUNK + 30)):
        out, state = gated_delta_rule(*(x[:, start:stop] for x in whole), state=state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_documents_are_separate() -> None:
    length = 2 * CHUNK + 30
    documents = PackedDocuments.of([torch.tensor(own) for own in LENGTHS], length)
    whole = inputs(length)
    expected, last = looped(*whole, first=documents.first)
    got, state = gated_delta_rule(*whole, first=documents.first)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_half_precision_rounds_only_inputs_and_outputs() -> None:
    rounded = [x.bfloat16() for x in inputs(CHUNK + 9)]
    got, state = gated_delta_rule(*rounded)
    expected, _ = looped(*(x.double() for x in rounded))
    assert got.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-3)


def test_the_convolution_is_that_of_torch_and_stops_at_documents() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(B, 12, 6, generator=draw)
    weight = torch.randn(6, 4, generator=draw)

    def of(part: Tensor) -> Tensor:
        out = torch.conv1d(part.mT, weight[:, None], padding=3, groups=6)[..., : part.shape[1]]
        return torch.nn.functional.silu(out).mT

    torch.testing.assert_close(causal_convolution(x, weight), of(x))
    later = causal_convolution(x[:, 5:], weight, before=x[:, 2:5])
    torch.testing.assert_close(later, of(x)[:, 5:])
    documents = PackedDocuments.of([torch.tensor([2, 9]), torch.tensor([12])], 12)
    expected = torch.cat([of(x[:1, :2]), of(x[:1, 2:11]), of(x[:1, 11:])], 1)
    got = causal_convolution(x, weight, first=documents.first)
    torch.testing.assert_close(got, torch.cat([expected, of(x[1:])]))
