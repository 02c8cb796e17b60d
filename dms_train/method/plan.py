"""Plan and result of one optimizer step, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dms_train.method.token_losses import TokenLoss, token_loss

# Keys of earlier versions, and the fields that replaced them.
_RENAMED = {"neuron_scale": "channel_scale"}

Eviction = Literal["none", "soft", "hard", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Plan of the current step, the same on every rank.

    Attributes:
        step: Global optimizer step, part of the noise key.
        stage_step: Step within the stage, position on its learning-rate schedule.
        channel_scale: Factor on the eviction channel; 1 leaves the model untouched, 0 clears it.
        eviction: `none`; `soft` relaxed with noise (training); `hard` thresholded (inference
            rule); `all` evicts every token that leaves the window (window-only control).
        target_cr: Compression ratio to reach; 1 requires no eviction.
        loss: A name in `TOKEN_LOSSES`.
        noise: Whether the relaxation is noisy (off only in checks).
        layer_weights: alpha* of each layer over alpha* of `target_cr`, by number of the layer; the
            compression loss then has a term for each layer. Empty for one term of all layers.
    """

    step: int = 0
    stage_step: int = 0
    channel_scale: float = 1.0
    eviction: Eviction = "none"
    target_cr: float = 1.0
    loss: str = "distill"
    noise: bool = True
    layer_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _ = self.token_loss  # raises for an unknown name
        if self.eviction not in get_args(Eviction):
            choices = ", ".join(get_args(Eviction))
            raise ValueError(f"eviction={self.eviction}: choose one of {choices}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepPlan:
        """Read the fields of a plan that any version of the program stored."""
        fields = {_RENAMED.get(key, key): value for key, value in values.items()}
        return cls(**{**fields, "layer_weights": tuple(fields.get("layer_weights", ()))})

    @property
    def token_loss(self) -> TokenLoss:
        """Return the loss of that name; ValueError for an unknown one."""
        return token_loss(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Measurements of a step or an evaluation, the same on every rank.

    Attributes:
        loss: Token loss plus compression loss.
        terms: Terms of the token loss by name, for example the KL; nats per token.
        aux_loss: Compression loss.
        alpha: Mean decision, relaxed while training and hard otherwise.
        cr_factor: Tokens seen over slots live at the last token, by the inference rule.
        kv_reads: Slots attended, summed over the queries of one sample.
        grad_norm: Gradient norm before clipping; 0 for an evaluation.
        learning_rate: Learning rate of this step; 0 for an evaluation.
        memory_bytes: Largest memory of any process; 0 for an evaluation.
        skipped: Whether the step changed nothing because its loss or gradient norm is not finite.
        kept: Share of the tokens held at the end of a sample, [layers][KV heads], by the inference
            rule; empty for a training step and for an evaluation without evictions. Layers with a
            sliding window are left out.
        kept_layers: Number of the layer of each row of `kept`, from 0.
    """

    loss: float
    terms: Mapping[str, float]
    aux_loss: float
    alpha: float
    cr_factor: float
    kv_reads: float
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    memory_bytes: float = 0.0
    skipped: bool = False
    kept: tuple[tuple[float, ...], ...] = ()
    kept_layers: tuple[int, ...] = ()

    @property
    def token_loss(self) -> float:
        """Sum of the terms of the token loss."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Learning-rate schedule of one stage: linear warm-up, then constant or cosine to `min_lr`."""

    max_lr: float
    min_lr: float
    steps: int
    warmup_steps: int
    style: Literal["constant", "cosine"]
