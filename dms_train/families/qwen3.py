"""Qwen3, the dense models."""

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.windows import WINDOWED_LAYERS, refuse_windows

FAMILY = ModelFamily(
    name="qwen3",
    classes="Qwen3",
    qk_norm=True,
    head_size=128,  # transformers omits the key for this value
    layers=WINDOWED_LAYERS,
    fixed={"attention_bias": False},
    written={"use_sliding_window": False},
    refuse=refuse_windows,
)
