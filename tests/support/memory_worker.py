"""Two ranks of which the second holds more memory.

torchrun ... -m tests.support.memory_worker
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dms_train.mcore import groups
from dms_train.mcore.footprint import own_memory
from dms_train.mcore.options import ParallelOptions
from dms_train.method.plan import StepPlan
from tests.support import tiny
from tests.support.resume_worker import build

EXTRA_BYTES = 2**28


def main() -> None:
    view = groups.start(ParallelOptions(tensor_model_parallel_size=2), seed=1)
    engine = build("tp2", "fp32", view, 1)
    extra = torch.ones(view.rank * EXTRA_BYTES // 4)
    before = torch.tensor([own_memory(view.device), 0.0, 0.0], dtype=torch.float64)
    plan = StepPlan(step=0, stage_step=0, eviction="soft", channel_scale=0.0, target_cr=4.0)
    result = engine.train_step(plan, [tiny.batch(0)])
    found = [torch.empty(3, dtype=torch.float64) for _ in range(2)]
    before[1:] = torch.tensor([own_memory(view.device), result.memory_bytes])
    dist.all_gather(found, before)
    least, most = found[1][:2].tolist()
    assert least > found[0][1].item(), "the extra memory is not counted"
    assert found[0][2] == found[1][2], "the ranks report different values"
    assert least <= result.memory_bytes <= 1.1 * most
    assert len(extra) == view.rank * EXTRA_BYTES // 4  # held until here
    groups.stop()


if __name__ == "__main__":
    main()
