"""Mistral with full attention: 7B v0.2 and later, Nemo."""

from functools import partial

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.windows import refuse_short_window

FAMILY = ModelFamily(
    name="mistral",
    classes="Mistral",
    written={"sliding_window": None},
    # 4096 is the default of transformers' MistralConfig where config.json has no such key
    refuse=partial(refuse_short_window, default=4096),
)
