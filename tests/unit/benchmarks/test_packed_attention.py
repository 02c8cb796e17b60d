"""The benchmark of packed attention on a CPU: what it times is the attention of the documents."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import packed_attention
from benchmarks.__main__ import main
from benchmarks.attention.shapes import make_inputs
from dms_train.kernels.train_attention import reference

CPU = torch.device("cpu")


def test_every_pack_is_timed_beside_one_document(tmp_path: Path) -> None:
    assert main(["packed_attention", "--device", "cpu", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/packed_attention.json")
    for case in json.loads(file.read_text())["cases"]:
        names = [row["name"] for row in case["rows"]]
        assert names == [packed_attention.ALONE, *packed_attention.PACKS]
        assert case["rows"][0]["of_one"] == 1.0


@pytest.mark.parametrize("name", packed_attention.PACKS)
def test_documents_attend_alone(name: str) -> None:
    (shape,) = packed_attention.TINY_SHAPES
    p = make_inputs(shape, packed_attention.TINY_WINDOW, CPU, torch.float32)
    edges = packed_attention.bounds(shape.s, packed_attention.PACKS[name])
    assert edges[-1] == shape.s
    parts = [
        reference.dms_attention(
            *(x[:, i:j] for x in (p.query, p.key, p.value)),
            p.log_keep()[..., i:j],
            p.window,
            p.scale,
        )
        for i, j in pairwise(edges)
    ]
    found = packed_attention.packed(p, edges).forward()
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-5, atol=1e-5)
