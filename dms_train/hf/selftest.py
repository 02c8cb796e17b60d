"""Reference output that is shipped with an export, computed by the trained model.

It is the only part of an export that can reveal an eviction channel written to the wrong row.
Loaders cannot: any content of a row is valid to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dms_train.hf.errors import HFError
from dms_train.hf.safetensors_files import save_tensors
from dms_train.hf.typed import typed
from dms_train.hf.values import Values

# A subfolder: some consumers load every *.safetensors file beside config.json.
REFERENCE = Path("dms_selftest") / "reference.safetensors"
DECISION_TOLERANCE = 0.5
KL_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelfTest:
    """One token sequence and the trained model's output for it.

    Attributes:
        input_ids: int64 [T]; T should exceed the window by 64 or more.
        decision_logits: float32 [layers, kv_heads, T], scale * eviction channel - offset, without
            noise or temperature.
        logits: float32 [T, vocab], computed with the hard eviction mask.
        dtype: Compute dtype of the reference, e.g. `bfloat16`.
        decision_tolerance: Largest mean decision-logit difference in any KV head that passes.
        kl_tolerance: Largest mean KL in nats per token that passes.
    """

    input_ids: Tensor
    decision_logits: Tensor
    logits: Tensor
    dtype: str = "bfloat16"
    decision_tolerance: float = DECISION_TOLERANCE
    kl_tolerance: float = KL_TOLERANCE

    def __post_init__(self) -> None:
        length = self.input_ids.shape[0] if self.input_ids.dim() == 1 else -1
        if self.decision_logits.dim() != 3 or self.decision_logits.shape[-1] != length:
            raise HFError(
                f"self-test: input_ids {tuple(self.input_ids.shape)} and decision_logits "
                f"{tuple(self.decision_logits.shape)} are not [T] and [layers, kv_heads, T]"
            )
        if self.logits.dim() != 2 or self.logits.shape[0] != length:
            raise HFError(f"self-test: logits {tuple(self.logits.shape)} are not [T, vocab]")

    @typed
    def save(self, directory: str | Path) -> None:
        """Write `dms_selftest/reference.safetensors` below `directory`."""
        path = Path(directory) / REFERENCE
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "input_ids": self.input_ids.to(torch.int64),
            "decision_logits": self.decision_logits.to(torch.float32),
            "logits": self.logits.to(torch.float32),
        }
        metadata = {
            "dtype": self.dtype,
            "decision_tolerance": str(self.decision_tolerance),
            "kl_tolerance": str(self.kl_tolerance),
        }
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(path, contiguous, metadata)

    @classmethod
    @typed
    def load(cls, directory: str | Path) -> SelfTest:
        """Read the self-test of an export.

        Raises:
            FileNotFoundError: If the directory has no self-test.
            ValueError: If the file is broken or lacks a tensor.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(directory) / REFERENCE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no self-test; export it again with one")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                names = ("input_ids", "decision_logits", "logits")
                tensors = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise HFError(f"{path}: not a readable self-test ({error})") from None
        return cls(
            **tensors,
            dtype=metadata.get("dtype", "bfloat16"),
            decision_tolerance=_tolerance(path, metadata, "decision_tolerance", DECISION_TOLERANCE),
            kl_tolerance=_tolerance(path, metadata, "kl_tolerance", KL_TOLERANCE),
        )


def _tolerance(path: Path, metadata: dict[str, str], key: str, default: float) -> float:
    """Read a limit that the metadata states as text."""
    try:
        return Values(str(path), {key: float(metadata.get(key, default))}).positive(key)
    except ValueError:
        raise HFError(f"{path}: {key}={metadata[key]!r} is no limit; export it again") from None
