"""TriAttention: keys that the expected query attends from later positions stay (arXiv:2604.04921).

Before RoPE, the queries of a head concentrate around their mean. The logit of the mean
query for a key is a trigonometric series in their distance. The policy averages it over future
queries at distances 1, 2, 4 and so on, and adds the part of the norms that the mean does not
explain. It evicts at the end of a prompt and after every `interval` generated tokens.
`dms-calibrate` measures the statistics of a model's queries.

Shape letters: L layers, b sequences, h KV heads, r query heads per KV head, s slots, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Self

import torch
from torch import Tensor

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.rotation import moved_by
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy
from dms_train.limits import AtLeast, Below


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStatistics:
    """Queries of a model before RoPE, as pairs (c, c + d / 2) of channels that RoPE turns.

    Attributes:
        mean: [L, h * r, d], mean query of each head.
        norm: [L, h * r, d / 2], mean norm of each pair.
        frequency: [d / 2], radians by which RoPE turns a pair for each position.
    """

    mean: Tensor
    norm: Tensor
    frequency: Tensor

    def save(self, path: Path) -> None:
        """Write a safetensors file.

        Raises:
            InferenceError: It cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file({item.name: getattr(self, item.name) for item in fields(self)}, path)
        except SafetensorError as error:
            raise InferenceError(f"{path}: cannot be written ({error})") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            InferenceError: The file is absent or holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            loaded = cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise InferenceError(
                f"statistics={path}: no file of query statistics ({error}); write one with "
                "dms-calibrate"
            ) from None
        return loaded

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device."""
        return type(self)(**{x.name: getattr(self, x.name).to(device) for x in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TriAttentionOptions(ScoreOptions):
    """Options of `triattention`.

    Attributes:
        statistics: File of the model's query statistics, which `dms-calibrate` writes.
        farthest: Largest distance of a future query. Distances are the powers of two up to it.
    """

    statistics: str | None = None
    farthest: Annotated[int, AtLeast(1), Below(2**31)] = 2**16
    interval: Annotated[int | None, AtLeast(1), Below(2**31)] = 128

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, and one if there is no file."""
        yield from ScoreOptions.check(self, path)
        if self.statistics is None:
            yield "needs statistics: a file that dms-calibrate writes for the model"


class TriAttentionPolicy(ScorePolicy):
    """Score tokens by the attention of expected future queries."""

    options: TriAttentionOptions

    def __init__(self, options: TriAttentionOptions) -> None:
        super().__init__(options)
        assert options.statistics is not None
        self._statistics = QueryStatistics.load(Path(options.statistics))

    def slot_scores(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return the largest standardised score of the query heads of a KV head, [b, h, s]."""
        assert slots.key is not None
        wide = torch.promote_types(slots.key.dtype, torch.float32)
        key = slots.key.to(wide)
        mean, norm, frequency = self._layer(slots.layer, key)
        distance = 2 ** torch.arange(self.options.farthest.bit_length(), device=key.device)
        at = (sequences.end - 1)[:, None] + distance
        expected = moved_by(mean[:, :, None], at[:, None, None], frequency).mean(-2)
        series = expected @ key.transpose(-1, -2)
        spread = norm - pair_norms(mean)
        return largest_standardised(
            series + spread @ pair_norms(key).transpose(-1, -2), slots.position >= 0
        )

    def _layer(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean [h, r, d], norm [h, r, d / 2] and frequency of a layer.

        Raises:
            InferenceError: The statistics are those of another model.
        """
        if self._statistics.mean.device != key.device:
            self._statistics = self._statistics.to(key.device)
        found = self._statistics
        layers, heads, size = found.mean.shape
        h, d = key.shape[1], key.shape[3]
        if layer >= layers or heads % h or size != d:
            raise InferenceError(
                f"statistics={self.options.statistics}: {layers} layers with {heads} query heads "
                f"of size {size}, but layer {layer} of the model has {h} KV heads of size {d}; "
                "run dms-calibrate for this model"
            )
        mean, norm = (x[layer].view(h, heads // h, -1).to(key) for x in (found.mean, found.norm))
        return mean, norm, found.frequency


def pair_norms(x: Tensor) -> Tensor:
    """Return the norms of the pairs that RoPE turns, [..., d / 2], of x [..., d]."""
    return torch.hypot(*x.chunk(2, -1))


def largest_standardised(score: Tensor, held: Tensor) -> Tensor:
    """Return the maximum over query heads of scores with mean 0 and variance 1 over the tokens.

    Args:
        score: [b, h, r, s].
        held: bool [b, h, s], False for empty slots, which do not count.
    """
    real = held[:, :, None]
    count = real.sum(-1, keepdim=True).clamp(min=1)
    centred = (score - (score * real).sum(-1, keepdim=True) / count) * real
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    tiny = torch.finfo(score.dtype).tiny
    return (centred / deviation.clamp(min=tiny)).amax(2)


POLICY = PolicyKind(TriAttentionOptions, lambda options, spec: TriAttentionPolicy(options))
