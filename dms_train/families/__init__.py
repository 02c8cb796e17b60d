"""Model families: names, names of weights, and keys of config.json.

One module per family, named after it, with one `FAMILY`; `registry` finds them, so one file adds a
family. `base` holds the description, and `decoder` what Llama-like decoders share: names and shapes
of parameters, and keys of layers that differ. Nothing here needs torch, megatron or transformers.
"""

from dms_train.families.base import LayerAttention, ModelFamily, Refusal
from dms_train.families.decoder.parameters import ParameterMap
from dms_train.families.registry import FAMILIES

__all__ = ["FAMILIES", "LayerAttention", "ModelFamily", "ParameterMap", "Refusal"]
