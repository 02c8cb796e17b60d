"""Two ranks, of which the second has a smaller GPU, as their driver would report.

torchrun ... -m tests.support.unequal_worker GIB_OF_RANK_1
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from dms_train.app.memory_check import check_memory
from dms_train.cli.errors import run_main
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions
from tests.support import configs


def main() -> None:
    view = groups.start(ParallelOptions(distributed_timeout_minutes=0.5), seed=1)
    names = {0: ("NVIDIA H200", 139.0), 1: ("NVIDIA A100", float(sys.argv[1]))}
    name, gib = names[view.rank]
    found = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    torch.cuda.get_device_properties = lambda _device: found  # type: ignore[assignment, return-value]
    config = configs.config(parallel__params_dtype="bf16", data__seq_length=8192)
    try:
        on_gpu = replace(view, device=torch.device("cuda"))
        check_memory(config, configs.KNOWN["qwen_r1_1_5b"], on_gpu, validates=False)
        groups.value_of_rank_0(None)  # a rank that continues needs the other
    finally:
        groups.stop()


if __name__ == "__main__":
    sys.exit(run_main(main))
