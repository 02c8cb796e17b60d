"""CUDA graphs of a set of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

Kind = TypeVar("Kind")


def capture(
    kinds: Iterable[Kind], run: Callable[[Kind], None], stream: torch.cuda.Stream
) -> dict[Kind, torch.cuda.CUDAGraph]:
    """Capture `run` of each kind without computing it; the graphs share their memory.

    Args:
        kinds: Arguments of `run`.
        run: Launches kernels that are compiled already.
        stream: Stream of the capture.
    """
    memory, graphs = torch.cuda.graph_pool_handle(), {}
    for kind in kinds:
        graphs[kind] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[kind], pool=memory, stream=stream):
            run(kind)
    return graphs
