"""Memory that the stage `validate_export` takes of one GPU; it loads one model at a time."""

from __future__ import annotations

from dms_train.config.schema import RunConfig
from dms_train.evaluation.options import COMPARED_POSITIONS
from dms_train.evaluation.reading import cached_token_bytes, most_tokens, read_token_bytes
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats import FORMATS
from dms_train.planning.gpus import calibration
from dms_train.planning.parameters import parameter_count

_GIB = 2**30
_WIDTHS = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}
_LOGIT_BYTES = 8 * 8  # float64, and as many copies while they are compared


def needed_bytes(config: RunConfig, architecture: Architecture) -> float:
    """Return the bytes for the larger model with its dense cache, or for comparing logits.

    The original is assumed to be stored in the dtype of the export.
    """
    a, options = architecture, config.stage.validate_export
    export = config.stage.export
    own = None if export.format is None else FORMATS[export.format].dtype
    width = _WIDTHS[export.dtype or own or config.parallel.params_dtype]
    # samples of packed data are several texts, so their number does not bound the tokens
    cache = most_tokens(a, config.data.seq_length) * read_token_bytes(a, width)
    if options.problems is not None:
        answers = options.max_num_seqs * options.max_tokens
        cache = max(cache, answers * cached_token_bytes(a, width))
    model = parameter_count(a) * width + cache
    heads = 2 * a.vocab_size * a.hidden_size * width
    compared = heads + COMPARED_POSITIONS * a.vocab_size * _LOGIT_BYTES
    return max(model, compared) + calibration().outside_bytes


def problem(
    config: RunConfig, architecture: Architecture, label: str, memory: float, training: float = 0
) -> str | None:
    """Return one line if `validate_export` does not fit a GPU; None if it does.

    Args:
        config: The configuration.
        architecture: Architecture of both models.
        label: Name of the GPU.
        memory: Memory of the GPU in bytes.
        training: Bytes that stay allocated if the process has trained before.
    """
    if config.stage.validate_export.device == "cpu":
        return None
    needed = needed_bytes(config, architecture) + training
    if needed <= memory:
        return None
    besides = f", {training / _GIB:.1f} GiB of the training included" if training else ""
    return (
        f"stage.validate_export: needs {needed / _GIB:.1f} GiB of one GPU{besides}, a {label} has "
        f"{memory / _GIB:.1f} GiB"
    )
