"""Traces of several layouts in one process: `python -m tests.support.trace_worker OUT.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dms_train.app import collectives
from dms_train.config.schema import RunConfig
from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.hf.experts import Experts
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.step_time import sent_bytes
from tests.support import configs
from tests.support.matrix import FULL_MATRIX
from tests.support.plain_delta import sizes_of

SIZES = {
    "num_layers": 8,
    "hidden_size": 128,
    "ffn_hidden_size": 448,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "kv_channels": 16,
    "max_position_embeddings": 1024,
}
WORLD_SIZE = 16
# tensor, pipeline and virtual pipeline size, sequence parallelism, recomputation
LAYOUTS: dict[str, tuple[int, int, int | None, bool, str | None]] = {
    "uneven_tp2_pp2": (2, 2, None, True, None),
    "tp4_pp2_vp2_full": (4, 2, 2, True, "full"),
    "tp2_pp4_no_sequence": (2, 4, None, False, None),
    "tp2_mlp": (2, 1, None, True, "mlp"),
    "dp16": (1, 1, None, False, None),
    "tied_tp2_pp4": (2, 4, None, True, None),
    "tied_dp16": (1, 1, None, False, None),
    "ep2": (1, 1, None, False, None),
    "tp2_ep2_full": (2, 1, None, True, "full"),
    "cp4_tp2": (2, 1, None, True, None),
    "shared_tp2_ep2": (2, 1, None, True, None),
    "linear_cp4_tp2": (2, 1, None, True, None),
}
# By default not those whose ways of sharding other layouts have as well.
LIKE_OTHERS = ("tp2_pp4_no_sequence", "dp16", "ep2", "tp2_ep2_full", "cp4_tp2")
COMPARED = [name for name in LAYOUTS if FULL_MATRIX or name not in LIKE_OTHERS]
# Ranks that share experts, in the layouts of a model with experts.
EXPERT_RANKS = {"ep2": 2, "tp2_ep2_full": 2, "shared_tp2_ep2": 2}
OVERLAPPED = ("tp2_mlp",)
# Ranks that share the positions of a sample.
CONTEXT_RANKS = {"cp4_tp2": 4, "linear_cp4_tp2": 4}
_LOCAL, _GLOBAL = (LayerAttention(rotary_base=1e4, window=window) for window in (64, None))
WINDOWS = (_LOCAL, _GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL, _GLOBAL)
MODELS = {"windows": WINDOWS} | ({"whole": ()} if FULL_MATRIX else {})
LINEAR = sizes_of("qwen3_next", key_heads=8)
EXPERTS = Experts(count=16, topk=2, ffn_hidden_size=64, normalize=True)


def architecture(layout: str) -> Architecture:
    """The small model; the layout's name says if weights are tied, or layers linear."""
    more: dict[str, Any] = {"tie_word_embeddings": layout.startswith("tied")}
    if layout in EXPERT_RANKS:
        more |= {"family": "qwen3_moe", "experts": EXPERTS}
    if layout.startswith("shared"):
        experts = replace(EXPERTS, shared_ffn_hidden_size=48)
        more |= {"family": "qwen3_next", "experts": experts, "linear": LINEAR}
    if layout.startswith("linear"):
        more |= {"family": "qwen3_5_text", "linear": LINEAR}
    return configs.architecture(**SIZES, **more)


def config(layout: str, **changes: Any) -> RunConfig:
    """A configuration in one of the layouts."""
    tp, pp, vp, sequence, recompute = LAYOUTS[layout]
    return configs.config(
        parallel__tensor_model_parallel_size=tp,
        parallel__pipeline_model_parallel_size=pp,
        parallel__virtual_pipeline_model_parallel_size=vp,
        parallel__num_layers_in_first_pipeline_stage=5 if layout.startswith("uneven") else None,
        parallel__context_parallel_size=CONTEXT_RANKS.get(layout, 1),
        parallel__expert_model_parallel_size=EXPERT_RANKS.get(layout, 1),
        parallel__sequence_parallel=sequence,
        parallel__tp_comm_overlap=layout in OVERLAPPED,
        parallel__recompute_granularity="selective" if recompute == "mlp" else recompute,
        parallel__recompute_modules=("mlp" if recompute == "mlp" else "core_attn",),
        parallel__params_dtype="bf16",
        data__seq_length=256,
        data__global_batch_size=32,
        **changes,
    )


def compared(layout: str) -> dict[str, Any]:
    """Bytes that the first and last stage send, by group, and what the plan counts."""
    made, model = config(layout), architecture(layout)
    stages = stages_of(made, model, WORLD_SIZE)
    found = {}
    for stage in sorted({0, len(stages) - 1}):
        sent: dict[str, float] = {}
        for collective, traffic in collectives.trace(made, model, WORLD_SIZE, stage).items():
            sent[collective.group] = sent.get(collective.group, 0.0) + traffic.sent_bytes
        found[stage] = {"sent": sent, "planned": sent_bytes(stages[stage])._asdict()}
    return {"first": found[0], "last": found[len(stages) - 1]}


def whole(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    """Calls and bytes of one step of the whole configuration, and those extended to it."""
    made, model = config("uneven_tp2_pp2"), architecture("uneven_tp2_pp2")
    model = replace(model, layers=layers)
    extended = collectives.trace(made, model, WORLD_SIZE, 0)
    with collectives._one_process(WORLD_SIZE, 0):
        engine, names = collectives._engine(made, model)
        # the recorded step begins by gathering the weights that this one updates
        collectives._step(engine, made, collectives._batches(1, 4, 2), names)
        batches = collectives._batches(1, made.data.seq_length, 8)
        recorder = collectives._step(engine, made, batches, names)
        collectives.groups.stop(keep_process_group=True)
    return {
        "extended": {_name(c): (t.calls, t.tensor_bytes) for c, t in extended.items()},
        "real": {_name(c): (n, recorder.bytes[c]) for c, n in recorder.calls.items()},
    }


def reductions(bucket_size: int | None) -> float:
    """Number of gradient reductions in a step of 16 copies."""
    made = config("dp16", parallel__ddp_bucket_size=bucket_size)
    found = collectives.trace(made, architecture("dp16"), WORLD_SIZE, 0)
    return next(t.calls for c, t in found.items() if _name(c) == "reduce-scatter data 16")


def _name(collective: collectives.Collective) -> str:
    return f"{collective.kind} {collective.group} {collective.ranks}"


if __name__ == "__main__":
    results = {layout: compared(layout) for layout in COMPARED}
    results |= {name: whole(layers) for name, layers in MODELS.items()}
    results |= {
        "reductions": [reductions(None), reductions(100_000)],
    }
    Path(sys.argv[1]).write_text(json.dumps(results))
