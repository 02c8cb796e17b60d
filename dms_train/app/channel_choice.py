"""Choice of the eviction channel of a model that has none yet: `method.channel=auto`.

The eviction channel is a channel of the pretrained model, which loses it. The run takes the channel
whose loss changes the output least, measured on its training data before the first step.
"""

from __future__ import annotations

import time

from dms_train.app.preparation import Prepared
from dms_train.app.samples import beginning
from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.limits import AUTO
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log
from dms_train.training.engine import TokenSource
from dms_train.training.stages import Stage

_SCREENING_TOKENS = 256  # of every data-parallel copy, for all channels
_FINAL_TOKENS = 2048  # of every data-parallel copy, for the best channels
_FINALISTS = 8


def choose_channel(
    prepared: Prepared, view: ParallelView, engine: McoreEngine, source: TokenSource
) -> None:
    """Rank the channels if the run must choose one, and give the best one to the engine.

    Args:
        prepared: The run, at the point it starts from.
        view: This rank's position in the layout.
        engine: Student and teacher, before the first step.
        source: Training data.
    """
    if not ranks_channels(prepared):
        return
    since = time.monotonic()
    candidates = candidate_channels(prepared.architecture)
    losses = rank_channels(engine, candidates, source.microbatches(0))
    channel = groups.value_of_rank_0(next(iter(losses)))
    engine.set_channel(channel)
    log.logger().info(
        "method.channel=auto: eviction channel %d (%.0f s); nats per token after zeroing: %s",
        *(channel, time.monotonic() - since),
        ", ".join(f"{loss:.4f} for {index}" for index, loss in losses.items()),
    )


def ranks_channels(prepared: Prepared) -> bool:
    """Return whether this run chooses the eviction channel of its model by a ranking.

    A student keeps its channel, and a pretraining needs none.
    """
    trained = [stage for stage in prepared.stages if isinstance(stage, Stage)]
    return (
        prepared.config.method.channel == AUTO
        and prepared.start.spec is None
        and any(stage.requires_eviction or stage.enables_eviction for stage in trained)
    )


def candidate_channels(architecture: Architecture) -> list[int]:
    """Return the channels among which a run chooses.

    Where RoPE rotates a part of each head, they are the other channels: these hold no position. The
    last channel is -1, which export formats of third parties require.
    """
    half, rotated = architecture.kv_channels // 2, architecture.rotary_channels // 2
    channels = range(architecture.kv_channels)
    still = [channel for channel in channels if channel % half >= rotated]
    return [*(still or channels)[:-1], -1]


def rank_channels(
    engine: McoreEngine, channels: list[int], batches: list[Batch]
) -> dict[int, float]:
    """Rank channels on a short text, and the best of them on a longer one.

    Args:
        engine: Student and teacher.
        channels: The candidates.
        batches: This rank's micro-batches.

    Returns:
        Loss after zeroing each of the best channels, in nats per token, best first.
    """
    for tokens in (_SCREENING_TOKENS, _FINAL_TOKENS):
        losses = engine.channel_losses(channels, beginning(batches, tokens, engine.view))
        ranking = sorted(zip(losses, channels, strict=True), key=lambda entry: entry[0])
        channels = [channel for _, channel in ranking[:_FINALISTS]]
    return {channel: loss for loss, channel in ranking}
