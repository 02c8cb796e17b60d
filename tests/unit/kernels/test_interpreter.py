"""The shortened interpreter of tests computes what torch computes.

Each operation runs three times: the interpreter computes a result of two types once, and the
short way that it then takes gives the others.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles kernels")
SIZE, TIMES = 8, 3
LEFT = [-7, -3, -1, 0, 1, 2, 5, 2**30 + 1]
RIGHT = [3, -2, 1, 5, -7, 2, 4, 2**30]  # equal to the last of LEFT after rounding to float32


@triton.jit
def _store(out, time, number, values, numbers: tl.constexpr):
    i = tl.arange(0, 8)
    places = (time * numbers + number) * 64 + i[:, None] * 8 + i[None, :]
    tl.store(out + places, values)


@triton.jit
def _kernel(left, right, scalar, out, integers: tl.constexpr, numbers: tl.constexpr):
    i = tl.arange(0, 8)
    for time in range(3):
        a = tl.load(left + i, mask=i < 8, other=0)[:, None]
        row = tl.load(right + i, mask=i != 3, other=5)
        b = row[None, :]
        _store(out, time, 0, a + b, numbers)
        _store(out, time, 1, a - row, numbers)
        _store(out, time, 2, a * b, numbers)
        _store(out, time, 3, a < b, numbers)
        _store(out, time, 4, a <= b, numbers)
        _store(out, time, 5, a > b, numbers)
        _store(out, time, 6, a >= row, numbers)
        _store(out, time, 7, a == b, numbers)
        _store(out, time, 8, a != b, numbers)
        _store(out, time, 9, (a < b) & (b < 4), numbers)
        _store(out, time, 10, (a < b) | (b > 4), numbers)
        _store(out, time, 11, (a + b).to(tl.int64), numbers)
        _store(out, time, 12, (a + b).to(tl.float32), numbers)
        _store(out, time, 13, scalar * (a + b) + 3, numbers)
        _store(out, time, 14, 2 * b - a, numbers)
        if integers:
            _store(out, time, 15, a // b, numbers)
            _store(out, time, 16, a % b, numbers)
        else:
            _store(out, time, 15, (a - b) * 0.0, numbers)
            _store(out, time, 16, (a - b) * 0.5, numbers)


def expected(a: torch.Tensor, b: torch.Tensor, scalar: int) -> list[torch.Tensor]:
    found = [a + b, a - b, a * b, a < b, a <= b, a > b, a >= b, a == b, a != b]
    found += [(a < b) & (b < 4), (a < b) | (b > 4)]
    found += [(a + b).long(), (a + b).float(), scalar * (a + b) + 3, 2 * b - a]
    if a.is_floating_point() or b.is_floating_point():
        return [*found, (a - b) * 0.0, (a - b) * 0.5]
    return [*found, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b)]


@pytest.mark.parametrize("right", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("left", [torch.int32, torch.int64, torch.float32])
def test_operations_are_those_of_torch(left, right):
    a, b = torch.tensor(LEFT, dtype=left), torch.tensor(RIGHT, dtype=right)
    truth = expected(a[:, None], b[None, :], 3)
    out = torch.full((TIMES, len(truth), SIZE, SIZE), torch.nan, dtype=torch.float64)
    integers = not (left.is_floating_point or right.is_floating_point)
    _kernel[(1,)](a, b, 3, out, integers, len(truth))
    for time in range(TIMES):
        for number, values in enumerate(truth):
            want = values.expand(SIZE, SIZE).double()
            same = out[time, number].view(torch.int64) == want.view(torch.int64)  # -0.0 too
            assert same.all(), (time, number)
