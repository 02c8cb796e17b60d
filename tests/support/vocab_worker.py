"""Sharded losses and their gradients, for many cases in every tensor-parallel size.

torchrun ... -m tests.support.vocab_worker OUT_FOLDER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.vocabulary_losses import Projection, distillation_kl, next_token_loss
from dms_train.mcore.options import ParallelOptions

TP_SIZES = (2, 4)
WIDTH, HIDDEN = 128, 8
VOCABULARIES = (61, 100, 128)  # with 61 whole shards are padding
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TEMPERATURES = {"fp32": 2.0, "bf16": 1.0}
LOSSES = ("teacher_student", "student_teacher", "same", "lm")


def hidden(seed: int, dtype: str) -> Tensor:
    """[s=5, b=3, HIDDEN]."""
    x = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x.to(DTYPES[dtype])


def weight(seed: int, vocab: int, dtype: str) -> Tensor:
    """[WIDTH, HIDDEN] with enormous values in the padding."""
    x = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(10 + seed))
    x[vocab:] = 1e4
    return x.to(DTYPES[dtype])


def labels(vocab: int) -> Tensor:
    """[b, s], the first and the last token among them."""
    x = torch.randint(0, vocab, (3, 5), generator=torch.Generator().manual_seed(5))
    x[0, 0], x[0, 1] = 0, vocab - 1
    return x


def weights() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(6))


def projection(seed: int, vocab: int, dtype: str, view: ParallelView) -> Projection:
    shard = weight(seed, vocab, dtype).chunk(view.tp_size)[view.tp_rank].clone()
    return Projection(hidden(seed, dtype), shard)


def one(loss: str, vocab: int, dtype: str, view: ParallelView) -> dict[str, Tensor]:
    """Loss per position and this rank's parts of the gradients of their weighted sum."""
    student = projection(0, vocab, dtype, view)
    for tensor in student[:2]:
        tensor.requires_grad_()
    if loss == "lm":
        value = next_token_loss(student, labels(vocab), vocab, view.tp_group)
    else:
        teacher = projection(0 if loss == "same" else 1, vocab, dtype, view)
        direction = "teacher_student" if loss == "same" else loss
        divergence = Divergence(direction, TEMPERATURES[dtype])
        value = distillation_kl(student, teacher, divergence, vocab, view.tp_group)
    (value * weights()).sum().backward()
    assert student.hidden.grad is not None
    assert student.weight.grad is not None
    return {
        "loss": value.detach(),
        "d_hidden": student.hidden.grad,
        "d_weight": student.weight.grad,
    }


def main() -> None:
    out = Path(sys.argv[1])
    for tp in TP_SIZES:
        view = groups.start(ParallelOptions(tensor_model_parallel_size=tp), seed=1)
        results = {
            f"{loss}-{vocab}-{dtype}.{name}": tensor.contiguous()
            for loss, vocab, dtype in itertools.product(LOSSES, VOCABULARIES, DTYPES)
            for name, tensor in one(loss, vocab, dtype, view).items()
        }
        save_file(results, out / f"tp{tp}-dp{view.dp_rank}-rank{view.tp_rank}.safetensors")
        groups.stop(keep_process_group=True)
    groups.stop()


if __name__ == "__main__":
    main()
