"""Names and rows of tensors in the files of a family, where they differ from those of Llama.

Training, engine and exports use the names of Llama and Gemma 3 for every family. A family may have
other names, join several matrices into one, hold the experts of a layer in one tensor, or turn
other pairs of channels than c and c + d / 2 by RoPE. Scores do not change when the channels of
queries and keys change their order together. Therefore the rows of both get an order in which RoPE
turns c with c + d / 2. Channels without RoPE are pairs whose angle is zero.
"""

from __future__ import annotations

from typing import NamedTuple

from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import Shape, expected_shapes

_ROTATED = tuple(f"self_attn.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
# Tensor of all experts that holds a projection, its first column and their distance.
_EXPERT_TENSORS = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}


class StoredPart(NamedTuple):
    """Rows of a tensor in the files that make up one tensor of `expected_shapes`.

    Attributes:
        stored: Name of the tensor in the files.
        first: First of the rows.
        rows: Number of rows.
        order: Channel in the files for every channel of a head; empty if rows keep their order.
        expert: Index of the expert in a tensor of all experts, in which its matrix is transposed;
            None for other tensors.
        step: Distance of the rows.
        block: Rows of a head, if the tensor in the files joins parts for each head; otherwise 0.
        stride: Distance between the blocks of two heads.
    """

    stored: str
    first: int
    rows: int
    order: list[int]
    expert: int | None = None
    step: int = 1
    block: int = 0
    stride: int = 0


def channel_order(a: Architecture) -> list[int]:
    """Return the channel in the files for every channel of a head."""
    d, r = a.kv_channels, a.rotary_channels
    still = range(r, d)
    half, rest = r // 2, len(still) // 2
    if a.described.interleaved_rope:
        first, second = range(0, r, 2), range(1, r, 2)
    else:
        first, second = range(half), range(half, r)
    return [*first, *still[:rest], *second, *still[rest:]]


def file_channel(a: Architecture, channel: int) -> int:
    """Return the channel in the files for a channel of a head; -1 is the last one in both."""
    return channel if channel < 0 else channel_order(a)[channel]


def _joined_parts(stored: str, rows: dict[str, int], heads: int) -> dict[str, StoredPart]:
    """Return the parts of a tensor that joins modules.

    Args:
        stored: Name of the tensor in the files.
        rows: Rows of each module, in order; 0 for one without this tensor.
        heads: Number of heads for each of which it joins them; 0 if it joins them whole.
    """
    parts, first = dict[str, StoredPart](), 0
    stride = sum(rows.values()) // heads if heads else 0
    for module, count in rows.items():
        block = count // heads if heads else 0
        if count:
            parts[module] = StoredPart(stored, first, count, [], block=block, stride=stride)
        first += block or count
    return parts


def _heads(a: Architecture, stored: str) -> int:
    """Return the number of heads for which a tensor in the files joins its modules."""
    if a.linear is not None and stored.startswith("linear_attn."):
        return a.linear.key_heads
    return a.num_attention_heads


def stored_parts(a: Architecture) -> dict[str, StoredPart]:
    """Return the tensors that the files hold under another name or in another order, by name."""
    order = channel_order(a)
    if order == list(range(a.kv_channels)):
        order = []
    groups = {name: (name,) for name in _ROTATED if order} | dict(a.described.stored)
    shapes, parts = expected_shapes(a), dict[str, StoredPart]()
    for layer in range(a.num_layers):
        at = f"model.layers.{layer}."
        for stored, modules in groups.items():
            heads = _heads(a, stored) if stored in a.described.stored_by_head else 0
            for kind in ("weight", "bias"):
                rows = {m: shapes.get(f"{at}{m}.{kind}", (0,))[0] for m in modules}
                for module, part in _joined_parts(f"{at}{stored}.{kind}", rows, heads).items():
                    own = order if module in _ROTATED else []
                    parts[f"{at}{module}.{kind}"] = part._replace(order=own)
        parts |= _expert_parts(a, f"{at}mlp.experts", shapes)
    return parts


def _expert_parts(a: Architecture, at: str, shapes: dict[str, Shape]) -> dict[str, StoredPart]:
    """Return the tensors of the experts of a layer, if the files hold them in one tensor."""
    parts = dict[str, StoredPart]()
    if not a.described.stacked_experts:
        return parts
    for expert in range(a.num_experts):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            for projection, (stored, first, step) in _EXPERT_TENSORS.items():
                name = f"{at}.{expert}.{projection}.{kind}"
                where = f"{at}.{stored}{suffix}"
                parts[name] = StoredPart(where, first, shapes[name][0], [], expert, step)
    return parts


def stored_shapes(a: Architecture) -> dict[str, Shape]:
    """Return name and shape of every tensor in the files of a model."""
    parts, stored = stored_parts(a), dict[str, Shape]()
    for name, shape in expected_shapes(a).items():
        part = parts.get(name)
        if part is not None and part.expert is not None:
            stored[part.stored] = (a.num_experts, *shape[1:], part.step * part.rows)
            continue
        at = name if part is None else part.stored
        stored[at] = (stored.get(at, (0,))[0] + shape[0], *shape[1:])
    return stored
