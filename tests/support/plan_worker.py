"""Bytes that one rank of any layout holds in a real step, counted in one process on the CPU.

    python -m tests.support.plan_worker CASES.json OUT.json

The collectives of torch's `fake` backend do nothing, so one process is any rank of any number. What
only a GPU has stands in by tensors of the same sizes: its fused norm keeps its input and a number
a row, its attention keeps output, sums and bias. Products are zeros: they hold the same bytes, and
some CPUs take 20 times as long to compute them in bf16 as in fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dms_train.data.batches import Batch
from dms_train.kernels import dispatch
from dms_train.mcore import engine as engine_module
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.layers.context import sequence_shards
from dms_train.mcore.options import ALL_WEIGHTS, OptimOptions, ParallelOptions, Trainable
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import configs
from tests.support.live_memory import LiveBytes, saved_bytes

SIZES = {
    "hidden_size": 128,
    "ffn_hidden_size": 448,
    "num_attention_heads": 8,
    "kv_channels": 16,
    "max_position_embeddings": 1024,
}
_ROW_TILE = 128


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor | None) -> Tensor:
        b, s, heads, _ = q.shape
        padded = -(-s // _ROW_TILE) * _ROW_TILE
        out = torch.zeros(q.shape, dtype=q.dtype)
        bias = () if log_keep is None else (torch.zeros(log_keep.shape),)
        ctx.save_for_backward(q, k, v, out, torch.zeros(b, heads, padded), *bias)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, *bias = ctx.saved_tensors
        return *(torch.zeros_like(x) for x in (q, k, v)), (bias[0] if bias else None)


def _stand_in() -> torch.library.Library:
    """The operations that stand in for others; those of the library last as long as it."""
    products = torch.library.Library("aten", "IMPL")
    products.impl("mm", _zeros, "CPU")
    products.impl("bmm", _zeros, "CPU")
    F.rms_norm = lambda x, shape, weight, eps: _Norm.apply(x, weight)
    dispatch.train_attention = lambda name: (
        lambda q, k, v, log_keep, *_: _Attention.apply(q, k, v, log_keep)
    )
    # nothing is received: all ranks are taken to have the same values
    dist.all_gather_object = lambda out, value, group=None: out.__setitem__(
        slice(None), [value] * len(out)
    )
    plain = dist.new_group
    dist.new_group = lambda *args, **kwargs: plain(*args, **{**kwargs, "backend": "fake"})
    return products


def _batches(case: dict[str, Any]) -> list[Batch]:
    shape = (case["samples"], case["length"])
    tokens = torch.zeros(shape, dtype=torch.int64)
    samples = torch.arange(shape[0])
    one = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(shape), samples=samples)
    return [one] * case["microbatches"]


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    return a.new_zeros(*a.shape[:-1], b.shape[-1])


def _layer_bytes(engine: McoreEngine, case: dict[str, Any]) -> int:
    """Bytes that the first layer of this rank keeps."""
    model = engine._models[0].train()
    shards = sequence_shards(engine._config)
    shape = (case["length"] // shards, case["samples"], SIZES["hidden_size"])
    dtype = engine._config.params_dtype
    hidden = torch.zeros(shape, dtype=dtype, requires_grad=True)
    keys, eviction_stats = (
        torch.zeros(shape[1], dtype=torch.int64),
        torch.zeros(shape[1], EVICTION_STATS),
    )
    rope = model.rotary_pos_emb.get_emb(case["length"])
    run = model._layers(0, 1)
    return saved_bytes(lambda: run(hidden, eviction_stats, keys, rope), model.parameters())


def step_bytes(case: dict[str, Any]) -> dict[str, int]:
    """Bytes of the model, the most that a step adds to them, and what one layer keeps."""
    parallel = ParallelOptions(**case["parallel"])
    world_size = parallel.ranks_per_copy
    rank = case["stage"] * (world_size // parallel.pipeline_model_parallel_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    view = groups.start(parallel, seed=1)
    a = configs.architecture(**SIZES, **case["architecture"])
    spec = PRESETS[case["method"]]
    trainable = Trainable(weights=case["train"])
    options = TrainEngineOptions(
        parallel=parallel, optim=OptimOptions(lr=1e-3), seed=1, trainable=trainable
    )
    with LiveBytes() as live:
        engine = McoreEngine(a, spec, view, options, None)
        if case["distills"] and trainable.weights != "all":
            engine.attach_teacher(None)
        elif case["distills"]:
            original = engine_module.MethodState(spec, engine._attend)
            teachers = engine._build_chunks(original, None, ALL_WEIGHTS)
            for student, teacher in zip(engine._models, teachers, strict=True):
                student.set_teacher(teacher)
            del teachers
        fixed = live.peak = live.total
        loss = "distill" if case["distills"] else "lm"
        plan = StepPlan(eviction="soft", channel_scale=0.0, target_cr=2.0, loss=loss)
        engine.forward_backward(plan, _batches(case))
        peak = live.peak
    kept = _layer_bytes(engine, case)
    groups.stop()
    return {"fixed": fixed, "step": peak - fixed, "layer": kept}


def main() -> None:
    products = _stand_in()
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = {name: step_bytes(case) for name, case in cases.items()}
    del products
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
