"""Qwen2, Qwen2.5 and the R1 models distilled into them."""

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.windows import WINDOWED_LAYERS, refuse_windows

FAMILY = ModelFamily(
    name="qwen2",
    classes="Qwen2",
    qkv_bias=True,  # not an option of its config.json
    always_has_head_dim=False,
    layers=WINDOWED_LAYERS,
    written={"use_sliding_window": False},
    refuse=refuse_windows,
)
