"""Number of weights that train, and of the adapters that stand beside frozen weights."""

from __future__ import annotations

from typing import NamedTuple

from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import Trainable
from dms_train.method.base import MethodSpec


class Adapters(NamedTuple):
    """Numbers of parameters of the adapters of one layer.

    Attributes:
        sharded: Parameters that tensor parallelism divides.
        replicated: Parameters that every tensor-parallel rank holds, without those of channels.
        channel: Parameters of the eviction channels, which every tensor-parallel rank holds.
        inner: Rows of the narrow products: ranks of the targets on the q, k, v projection, and
            rows of the eviction channels.
        channels: Rows of the eviction channels.
    """

    sharded: int = 0
    replicated: int = 0
    channel: int = 0
    inner: int = 0
    channels: int = 0

    def parameters(self, layers: int, method_layers: int, tp: int = 1) -> int:
        """Return the parameters of `layers` layers on a rank; the method acts on some of them."""
        return layers * (self.sharded // tp + self.replicated) + method_layers * self.channel


def trained_layers(a: Architecture, weights: str) -> list[int]:
    """Return the numbers of the layers that train with this value of `method.train`."""
    if weights == "all":
        return list(range(a.num_layers))
    return a.method_layers if weights == "channel" else a.cache_layers


def attention_weights(a: Architecture, tp: int = 1) -> int:
    """Count a layer's weights and biases of q, k, v and o projections on a tensor-parallel rank."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    gate = query if a.described.output_gate else 0
    sharded = a.hidden_size * (2 * (query + key) + gate)
    sharded += query + 2 * key if a.add_qkv_bias else 0
    return sharded // tp + (a.hidden_size if a.described.linear_bias else 0)


def adapters(a: Architecture, trainable: Trainable, method: MethodSpec) -> Adapters:
    """Count the adapters of a layer with decisions; all are 0 for `all` and `attention`."""
    if not trainable.adapts:
        return Adapters()
    rank, h = trainable.lora.rank, a.hidden_size
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    outputs = {"q": query, "k": key, "v": key}
    own = [outputs[target] for target in trainable.targets if target in outputs]
    rows = a.num_query_groups * method.channels(a.num_attention_heads // a.num_query_groups)
    with_output = "o" in trainable.targets
    return Adapters(
        sharded=rank * (sum(own) + (query if with_output else 0)),
        replicated=rank * h * (len(own) + with_output),
        channel=rows * (h + a.add_qkv_bias),
        inner=rank * len(own) + rows,
        channels=rows,
    )


def peft_parameters(a: Architecture, trainable: Trainable, method: MethodSpec) -> int:
    """Count the numbers of an export in format `peft`, without the biases of q."""
    count = adapters(a, trainable, method)
    # a replaced row has a rank of its own: the row itself, and a column that selects it
    replaced = count.channels * (a.hidden_size + a.num_attention_heads * a.kv_channels)
    return len(a.cache_layers) * (count.sharded + count.replicated + replaced)
